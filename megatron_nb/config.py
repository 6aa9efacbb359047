"""Stage files -> the job's dataclass. The only module that knows Hydra.

Hydra composes plain mappings: the stage file, its groups (`model=tiny`), the command line (`optimizer.lr=1e-4`). The schema
is a dataclass that lives beside the code it configures; its defaults are the first entry of every stage file, and what was
composed is compared with it key by key and type by type before any work. A key the schema has needs no `+`.
"""
from __future__ import annotations

import dataclasses
import dis
import functools
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

STAGES = Path(str(files("hydra_conf"))).absolute()  # a job starts from any working directory
MISSING = "???"  # Hydra's mark for a key that must be given
NO_FOLDER = ["hydra.sweep.dir=runs", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
NO_LOGGING = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
HELP = """usage: python -m {module} [GROUP=OPTION ...] [KEY=VALUE ...]        one process, or
       torchrun --nproc-per-node N -m {module} ...

  --cfg job            print the resolved configuration and stop
  --dry-run            check everything, print what would run and stop (launch.dry_run=true)
  --config-name STAGE  a stage file: {stages}
  --config-dir DIR     a folder of your own stage files and groups
  --multirun           one run per combination of comma lists: optimizer.lr=1e-5,2e-5

groups:
{groups}"""


class ConfigError(ValueError):
    """What stands in a stage file or on the command line cannot be run."""


def job(schema: type, stage: str | None = None) -> Callable:
    """Make `main(config: schema)` a command: compose `stage` with the command line, check, run.

    The decorated function also takes a finished config, as tests and other jobs call it. A mistake in the configuration
    ends the process with code 2 and one line on rank 0, before `main`. A ValueError that this project's code raises while
    `main` runs is a user's mistake too (a bad data file): one line, code 1. HYDRA_FULL_ERROR=1 shows the traceback.
    """
    ConfigStore.instance().store(name=schema.__name__, node=_defaults(schema))

    def decorate(main: Callable[[Any], None]) -> Callable:
        @functools.wraps(main)
        def command(config: Any = None) -> None:
            if config is not None:
                return main(config)
            try:
                config = _from_command_line(main, schema, stage)
            except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                _stop(error, code=2)
            if config is None:
                return None
            try:
                return main(config)
            except ValueError as error:
                if not _raised_by_us(error):
                    raise
                _stop(error, code=1)

        return command

    return decorate


def build(kind: Any, value: Any, key: str = "") -> Any:
    """`value` (mappings, lists, scalars) as an instance of the annotation `kind`; `key` is its dotted place.

    Raises ConfigError for an unknown key, a missing one or a wrong type, naming the key, the value and the type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    number = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str) and value == MISSING:
        raise ConfigError(f"{key} must be given: {key}={_name(kind)}")
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        *alternatives, last = [option for option in arguments if option is not type(None)]
        for option in alternatives:
            try:
                return build(option, value, key)
            except ConfigError:
                continue
        return build(last, value, key)
    if origin is Literal and value in arguments:
        return value
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
        for name in value:
            _find(kind, [str(name)], key)
        hints = typing.get_type_hints(kind)
        given = {**{name: MISSING for name, default in _defaults(kind).items() if default == MISSING}, **value}
        return kind(**{name: build(hints[name], item, _join(key, name)) for name, item in given.items()})
    if isinstance(value, Mapping) and (origin or kind) is dict:
        return {name: build((*arguments, Any, Any)[1], item, _join(key, str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple) and (origin or kind) in (list, tuple):
        fixed = origin is tuple and arguments[1:] != (...,)
        if not fixed or len(arguments) == len(value):
            kinds = arguments if fixed else (*arguments, Any)[:1] * len(value)
            return (origin or kind)(build(each, item, f"{key}[{i}]") for i, (each, item) in enumerate(zip(kinds, value)))
    if (kind in (float, str) and number) or (kind is Path and isinstance(value, str)):  # lr=1, name=2024, cache_dir=/tmp
        return kind(value)
    if (kind is int and number) or (kind in (float, bool, str) and isinstance(value, kind)):
        return value
    found = "null" if value is None else f"the {type(value).__name__} {value!r}"
    raise ConfigError(f"{key or 'the configuration'} must be {_name(kind)}, found {found}")


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML; `from_yaml` reads it back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def from_yaml(path: str | Path, schema: type, section: str = "") -> Any:
    """The configuration saved at `path` (or its `section`, such as "model") as an instance of `schema`."""
    saved = OmegaConf.to_container(OmegaConf.load(path))
    if section and section not in saved:
        raise ConfigError(f"{path} has no section {section!r}; it has {', '.join(map(str, saved))}")
    try:
        return build(schema, saved[section] if section else saved, section)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value of a configuration."""
    return dict(_leaves(_plain(config)))


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) where two configurations differ; None where one has no such key."""
    olds, news = flatten(old), flatten(new)
    return {key: (olds.get(key), news.get(key)) for key in {**olds, **news} if olds.get(key) != news.get(key)}


def _from_command_line(main: Callable, schema: type, stage: str | None) -> Any:
    """The configuration sys.argv asks for, or None when it only asked to see something (or Hydra ran a sweep)."""
    words = ["launch.dry_run=true" if word == "--dry-run" else word for word in sys.argv[1:]]
    arguments = get_args_parser().parse_args(words)
    stage = arguments.config_name or stage
    folders = [STAGES] + [Path(folder).absolute() for folder in [arguments.config_dir] if folder]
    if arguments.help:
        return _print(_help(main, stage, folders))
    if stage is None:
        raise ConfigError(f"which stage? give --config-name: {', '.join(_stages())}")
    checked = {line: _check(line, schema, folders) for line in arguments.overrides}
    if arguments.multirun or arguments.hydra_help or arguments.info or arguments.shell_completion or arguments.package:
        task = functools.wraps(main)(lambda values: main(build(schema, OmegaConf.to_container(values, resolve=True))))
        sys.argv[1:] = [checked.get(word, word) for word in words] + NO_FOLDER + NO_LOGGING
        return hydra.main(config_path=str(STAGES), config_name=stage, version_base="1.3")(task)()
    home = folders.pop() if (folders[-1] / f"{stage}.yaml").exists() else folders.pop(0)
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"]
    with hydra.initialize_config_dir(str(home), version_base="1.3"):
        values = hydra.compose(stage, [*checked.values(), *search])
    config = build(schema, OmegaConf.to_container(values, resolve=True))
    return _print(to_yaml(config)) if arguments.cfg else config


def _check(line: str, schema: type, folders: list[Path]) -> str:
    """One word of the command line as Hydra shall see it; ConfigError when neither schema nor groups know its key.

    A known key is passed on as `++key=`, which also reaches below a mapping (data.sources.NAME.path).
    """
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        raise ConfigError(f"cannot read {line!r} as KEY=VALUE: {str(error).splitlines()[0]}") from error
    key = override.key_or_group
    group = "/" in key or any((folder / key).is_dir() for folder in folders)
    if group or key.split(".")[0] == "hydra":
        return line
    _find(schema, key.split("."), groups=_groups(folders))
    return line if override.is_delete() else "++" + line.lstrip("+")


def _find(schema: Any, names: list[str], prefix: str = "", groups: Mapping[str, Any] = types.MappingProxyType({})) -> None:
    """Walk from `schema` along `names`; ConfigError, with the nearest key and where it lives, at the first unknown one."""
    kind = schema
    for depth, name in enumerate(names):
        options = typing.get_args(kind) if _is_union(kind) else [kind]
        mapping = next((option for option in options if (typing.get_origin(option) or option) in (dict, Any)), None)
        if mapping is not None:
            kind = (*typing.get_args(mapping), Any, Any)[1]
            continue
        kind = next(filter(dataclasses.is_dataclass, options), kind)
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in hints:
            homes = dict.fromkeys(groups, "a group") | {_join(prefix, key): home for key, home in _keys(schema)}
            wrong = _join(prefix, ".".join(names[: depth + 1]))
            nearest = max(homes, key=lambda key: _likeness(wrong, key))
            raise ConfigError(
                f"unknown key {wrong!r}: {_name(kind)} has no {name!r}; the nearest is {nearest!r} ({homes[nearest]}). "
                "--cfg job prints every key"
            )
        kind = hints[name]


def _likeness(wrong: str, key: str) -> float:
    """How near two dotted keys are: as a whole, by their last word, and whether one word begins with the other."""
    a, b = wrong.split(".")[-1], key.split(".")[-1]
    begins = 0.5 * (a.startswith(b) or b.startswith(a))
    return SequenceMatcher(None, wrong, key).ratio() + SequenceMatcher(None, a, b).ratio() + begins


def _keys(schema: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of a dataclass with where it lives."""
    module = "" if schema.__module__ == "__main__" else f" of {schema.__module__}"
    for name, hint in typing.get_type_hints(schema).items():
        yield _join(prefix, name), f"in {schema.__name__}{module}"
        if dataclasses.is_dataclass(hint):
            yield from _keys(hint, _join(prefix, name))


def _defaults(schema: type) -> dict[str, Any]:
    """The defaults of a dataclass as mappings, read from its fields: no __post_init__ has filled anything in yet."""
    hints, values = typing.get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        required = field.default is field.default_factory is dataclasses.MISSING
        if dataclasses.is_dataclass(hint) and (required or field.default_factory is hint):
            values[field.name] = _defaults(hint)
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = _plain(field.default_factory())
        else:
            values[field.name] = MISSING if required else _plain(field.default)
    return values


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as mappings, lists and strings."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, _join(key, name))
    else:
        yield key, value


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _stages() -> list[str]:
    return sorted(path.stem for path in STAGES.glob("*.yaml"))


def _groups(folders: list[Path]) -> dict[str, list[str]]:
    """Group -> its options."""
    options = sorted(path for folder in folders for path in folder.glob("*/*.yaml"))
    return {path.parent.name: [o.stem for o in options if o.parent.name == path.parent.name] for path in options}


def _help(main: Callable, stage: str | None, folders: list[Path]) -> str:
    """The stage file's own first comment lines, then what can be chosen."""
    module = getattr(sys.modules["__main__"].__spec__, "name", None) or main.__module__
    path = next((path for folder in folders if (path := folder / f"{stage}.yaml").exists()), None)
    lines = path.read_text().splitlines() if path else []
    about = [line.lstrip("# ") for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)]]
    groups = "\n".join(f"  {group:<20} {' '.join(options)}" for group, options in _groups(folders).items())
    return "\n".join([*about, "", HELP.format(module=module, stages=", ".join(_stages()), groups=groups)])


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _print(text: str) -> None:
    if _rank() == 0:
        print(text.rstrip())


def _raised_by_us(error: BaseException) -> bool:
    """Whether a `raise` of this project made it: those speak to the user; int("x") or a library's are bugs to be traced."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    ours = trace.tb_frame.f_globals.get("__name__", "").split(".")[0] in ("megatron_nb", "nb_kernels", "__main__")
    return ours and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _stop(error: Exception, code: int) -> typing.NoReturn:
    """End the process with the error in one line instead of a traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    if code == 2 and _rank() != 0:
        time.sleep(5)  # every rank finds the same mistake; torchrun ends them all when rank 0 has printed it and left
    else:
        rank = f"rank {_rank()}: " if "RANK" in os.environ and code != 2 else ""
        cause = f": {error.__cause__}" if isinstance(error, HydraException) and error.__cause__ else ""
        print(f"error: {rank}{error}{cause}", file=sys.stderr)
    sys.exit(code)
