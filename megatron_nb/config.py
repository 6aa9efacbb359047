"""Stage files -> the job's dataclass. The only module that knows Hydra.

Hydra composes plain mappings: the stage file, its groups (`model=tiny`), the command line (`optimizer.lr=1e-4`). The schema
is a dataclass that lives beside the code it configures; its defaults are the first entry of every stage file, and what was
composed is compared with it key by key and type by type before any work. A key the schema has needs no `+`.
"""
from __future__ import annotations

import argparse
import dis
import errno
import functools
import itertools
import os
import sys
import time
import typing
from collections.abc import Callable, Collection, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_nb.give_up import GivesUp, give_up
from megatron_nb.schema import ConfigError, build, defaults, diff, flatten, plain, require_key

__all__ = [  # fmt: skip
    "AFTER_SWEEP", "ConfigError", "build", "compose", "diff", "flatten", "from_yaml", "groups_in", "is_group", "job",
    "schema_in", "schema_of_stage", "sweep_point", "to_yaml",
]

STAGES = Path(str(files("hydra_conf"))).absolute()  # a job starts from any working directory
NO_FOLDER = ["hydra.sweep.dir=runs", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
NO_LOGGING = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
AFTER_SWEEP: list[Callable[[], None]] = []  # called when all points of a --multirun have been composed
HELP = """usage: python -m {module} [GROUP=OPTION ...] [KEY=VALUE ...]        one process, or
       torchrun --nproc-per-node N -m {module} ...

  --cfg job            print the resolved configuration and stop
  --dry-run            check everything, print what would run and stop (launch.dry_run=true)
  --config-name STAGE  a stage file: {stages}
  --config-dir DIR     a folder of your own stage files and groups
  --multirun           one run per combination of comma lists: optimizer.lr=1e-5,2e-5

groups:
{groups}"""


def job(schema: type, stage: str | None = None) -> Callable:
    """Make `main(config: schema)` a command: compose `stage` with the command line, check, run.

    The decorated function also takes a finished config, as tests and other jobs call it. A mistake in the configuration
    ends the process with code 2 and one line on rank 0, before `main`. A ValueError that this project's code raises while
    `main` runs is a user's mistake too (a bad data file), and so are a GivesUp and a full disk: one line, code 1.
    HYDRA_FULL_ERROR=1 shows the traceback.
    """
    ConfigStore.instance().store(name=schema.__name__, node=defaults(schema))

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
            except (ValueError, GivesUp) as error:
                if not _raised_by_us(error):
                    raise
                _stop(error, code=1)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                _stop(ConfigError(f"the disk is full: {error}: make room, then start the same command again"), code=1)

        return command

    return decorate


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML; `from_yaml` reads it back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def from_yaml(path: str | Path, schema: type, section: str = "") -> Any:
    """The configuration saved at `path` (or its `section`, such as "model") as an instance of `schema`."""
    saved = OmegaConf.to_container(OmegaConf.load(path))
    if section and section not in saved:
        raise ConfigError(f"{path} has no section {section!r}; it has {', '.join(map(str, saved))}")
    try:
        return build(schema, saved[section] if section else saved, section)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def compose(schema: type, stage: str, words: list[str] | tuple[str, ...] = (), folder: str | Path | None = None) -> Any:
    """The configuration of a stage file and the words of a command line; `folder` holds further stage files and groups."""
    folders = _folders(folder)
    checked = [_check(word, schema, folders) for word in words]
    home = folders.pop() if (folders[-1] / f"{stage}.yaml").exists() else folders.pop(0)
    search = f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"
    try:
        with hydra.initialize_config_dir(str(home), version_base="1.3"):
            values = hydra.compose(stage, [*checked, search])
        plain_values = OmegaConf.to_container(values, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from error
    return build(schema, plain_values)


def _command_line() -> tuple[list[str], argparse.Namespace]:
    """(words of sys.argv as Hydra knows them, the same parsed)"""
    words = ["launch.dry_run=true" if word == "--dry-run" else word for word in sys.argv[1:]]
    return words, get_args_parser().parse_args(words)


def schema_of_stage(known: Collection[str]) -> str:
    """The schema that the stage file of the command line begins with: one of `known`, or the process ends with code 2."""
    _, arguments = _command_line()
    stages = {stage: schema for stage, schema in _schemas(_folders(arguments.config_dir)).items() if schema in known}
    if arguments.config_name not in stages:
        asked = arguments.config_name
        given = f"--config-name={asked} is no stage of this command: give" if asked else "which stage? give --config-name:"
        _stop(ConfigError(f"{given} {', '.join(stages)}"), code=2)
    return stages[arguments.config_name]


def sweep_point() -> list[str] | None:
    """The words of this point of a --multirun; None outside of one."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return [word.lstrip("+") for word in HydraConfig.get().overrides.task]


def schema_in(stage: str) -> str | None:
    """The schema that a stage file of this project begins with."""
    file = STAGES / f"{stage}.yaml"
    return ((yaml.safe_load(file.read_text()) or {}).get("defaults") or [None])[0] if file.is_file() else None


def is_group(key: str) -> bool:
    """Whether a key of the command line names a group of options, not a value."""
    return (STAGES / key).is_dir()


def groups_in(stage: str) -> list[str]:
    """The groups that a stage file of this project lets one choose from."""
    told = (yaml.safe_load((STAGES / f"{stage}.yaml").read_text()) or {}).get("defaults") or []
    return [group for default in told if isinstance(default, dict) for group in default]


def _schemas(folders: list[Path]) -> dict[str, str | None]:
    """Stage file -> the schema it begins with."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return {path.stem: ((yaml.safe_load(path.read_text()) or {}).get("defaults") or [None])[0] for path in paths}


def _from_command_line(main: Callable, schema: type, stage: str | None) -> Any:
    """The configuration sys.argv asks for, or None when it only asked to see something (or Hydra ran a sweep)."""
    words, arguments = _command_line()
    stage = arguments.config_name or stage
    folders = _folders(arguments.config_dir)
    if arguments.help:
        return _print(_help(main, stage, folders))
    if stage is None:
        raise ConfigError(f"which stage? give --config-name: {', '.join(_stages())}")
    if arguments.multirun or arguments.hydra_help or arguments.info or arguments.shell_completion or arguments.package:
        task = functools.wraps(main)(lambda values: main(build(schema, OmegaConf.to_container(values, resolve=True))))
        checked = {line: _check(line, schema, folders) for line in arguments.overrides}
        sys.argv[1:] = [checked.get(word, word) for word in words] + NO_FOLDER + NO_LOGGING
        hydra.main(config_path=str(STAGES), config_name=stage, version_base="1.3")(task)()
        for finish in AFTER_SWEEP:
            finish()
        return None
    config = compose(schema, stage, arguments.overrides, arguments.config_dir)
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
    require_key(schema, key.split("."), groups=_group_names(folders))
    return line if override.is_delete() else "++" + line.lstrip("+")


def _folders(more: str | Path | None) -> list[Path]:
    return [STAGES, *([Path(more).absolute()] if more else [])]


def _stages() -> list[str]:
    return sorted(path.stem for path in STAGES.glob("*.yaml"))


def _groups(folders: list[Path]) -> dict[str, list[str]]:
    """Group -> its options."""
    options = sorted(path for folder in folders for path in folder.glob("*/*.yaml"))
    return {path.parent.name: [o.stem for o in options if o.parent.name == path.parent.name] for path in options}


def _group_names(folders: list[Path]) -> Iterator[str]:
    """Listed only when asked for: hundreds of words are checked when a chain is composed."""
    yield from _groups(folders)


def _help(main: Callable, stage: str | None, folders: list[Path]) -> str:
    """The stage file's own first comment lines, then what can be chosen."""
    module = getattr(sys.modules["__main__"].__spec__, "name", None) or main.__module__
    path = next((path for folder in folders if (path := folder / f"{stage}.yaml").exists()), None)
    lines = path.read_text().splitlines() if path else []
    about = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
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
        told = "\n".join([f"{rank}{error}{cause}", *getattr(error, "__notes__", [])])
        print(f"error: {told}", file=sys.stderr)
        give_up(told)
    sys.exit(code)
