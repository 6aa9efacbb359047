"""Plain mappings <-> the dataclasses that configure each part: key by key, type by type, with errors a user can act on."""
from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

MISSING = "???"  # stands for a key that must be given


class ConfigError(ValueError):
    """What stands in a stage file or on the command line cannot be run."""


def build(kind: Any, value: Any, key: str = "") -> Any:
    """`value` (mappings, lists, scalars) as an instance of the annotation `kind`; `key` is its dotted place.

    Raises ConfigError for an unknown key, a missing one or a wrong type, naming the key, the value and the type;
    ValueError for what a dataclass refuses, beginning with its place.
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
            require_key(kind, [str(name)], key)
        hints = typing.get_type_hints(kind)
        given = {**{name: MISSING for name, default in defaults(kind).items() if default == MISSING}, **value}
        fields = {name: build(hints[name], item, _join(key, name)) for name, item in given.items()}
        try:
            return kind(**fields)
        except ValueError as error:  # its own rules know their field, not where it stands
            if key in str(error):
                raise
            raise ValueError(f"{key}: {error}") from error
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


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key -> value of a configuration."""
    return dict(_leaves(plain(config)))


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) where two configurations differ; None where one has no such key."""
    olds, news = flatten(old), flatten(new)
    return {key: (olds.get(key), news.get(key)) for key in {**olds, **news} if olds.get(key) != news.get(key)}


def require_key(schema: Any, names: list[str], prefix: str = "", groups: Iterable[str] = ()) -> None:
    """Walk from `schema` along `names`; ConfigError at the first unknown one, with the nearest key and where it lives.

    groups: names of Hydra groups, which may be meant too.
    """
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


def defaults(schema: type) -> dict[str, Any]:
    """The defaults of a dataclass as mappings, read from its fields: no __post_init__ has filled anything in yet."""
    hints, values = typing.get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        required = field.default is field.default_factory is dataclasses.MISSING
        if dataclasses.is_dataclass(hint) and (required or field.default_factory is hint):
            values[field.name] = defaults(hint)
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = plain(field.default_factory())
        else:
            values[field.name] = MISSING if required else plain(field.default)
    return values


def plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as mappings, lists and strings."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
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
