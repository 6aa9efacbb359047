"""Programs and their tests, as values and as rows of JSON."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_nb.sandbox.compare import CompareConfig
from megatron_nb.sandbox.harness_wire import decode, plain

LANGUAGES = ("python", "cpp")


@dataclass(frozen=True)
class Program:
    """What is judged."""

    source: str
    language: str = "python"  # python | cpp
    entry: str | None = None  # the function that assertion tests are about; methods of a class Solution are found by name

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ValueError(f"language={self.language!r} must be one of {', '.join(LANGUAGES)}")


@dataclass(frozen=True)
class Checker:
    """A program that says whether an output is right, where several are."""

    source: str  # Python that defines check(input, output, expected) -> bool; or a whole program: it finds the files `input`,
    #              `output`, `expected`, and ends with 0 for right, 1 or 2 for wrong (its first line of output says why)
    language: str = "python"


@dataclass(frozen=True)
class Test:
    """One test, of exactly one kind; `read` and `row` are its JSON."""

    __test__ = False  # not one of pytest's

    stdin: str | None = None  # kind 1: text in, text out
    stdout: str | None = None
    call: str | None = None  # kind 2: a function by name, its arguments, the value it must return
    args: list = field(default_factory=list)
    expected: Any = None
    code: str | None = None  # kind 3: statements that assert; names they do not define are the program's
    entry: str | None = None  # of kind 3: the function under test; `check(candidate)` of the code is called with it
    compare: CompareConfig | None = None  # else the judge's
    checker: Checker | None = None  # of kind 1

    def __post_init__(self) -> None:
        kinds = [self.stdin is not None or self.stdout is not None, self.call is not None, self.code is not None]
        if sum(kinds) != 1:
            raise ValueError(f"a test is one of stdin/stdout, call/args/expected or code, not {sum(kinds)} of them")
        for name in ("stdin", "stdout", "call", "code", "entry"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ValueError(f"{name}={value!r:.80} must be text")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name} cannot be written as UTF-8: {error}") from None
        if kinds[0] and self.stdout is None and self.checker is None:
            raise ValueError("stdin without stdout: nothing to compare with; add stdout or a checker")
        if self.checker and not kinds[0]:
            raise ValueError("checker judges text: it needs a stdin/stdout test")
        if not isinstance(self.args, list):
            raise ValueError(f"args={self.args!r:.80} must be a list, one element per argument")

    @property
    def kind(self) -> str:
        return "call" if self.call is not None else "code" if self.code is not None else "stdin"

    @staticmethod
    def read(row: dict) -> Test:
        """The test that a row of JSON stands for; ValueError naming field and rule."""
        if not isinstance(row, dict):
            raise ValueError(f"a test must be an object, not {row!r:.80}")
        known = [*(one.name for one in fields(Test)), "tagged"]
        for name in row:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ValueError(f"{name!r} is no field of a test" + (f": did you mean {near[0]!r}?" if near else ""))
        if row.get("call") is not None and "expected" not in row:
            raise ValueError("call without expected: nothing to compare with")
        values = {name: value for name, value in row.items() if name != "tagged" and value is not None or name == "expected"}
        if values.get("compare") is not None:
            values["compare"] = read_compare(values["compare"])
        if isinstance(values.get("checker"), str):
            values["checker"] = Checker(values["checker"])
        elif values.get("checker") is not None:
            values["checker"] = _checker(values["checker"])
        if row.get("tagged"):
            values |= {name: decode(json.dumps(row.get(name))) for name in ("args", "expected")}
        return Test(**values)

    def row(self) -> dict:
        """The JSON that `read` makes this test of."""
        row = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) not in (None, [])}
        if self.kind == "call":
            row |= {"args": self.args, "expected": self.expected}
            written = plain(row["args"]), plain(row["expected"])
            if written != (row["args"], row["expected"]):
                row |= {"args": written[0], "expected": written[1], "tagged": True}
        for name in ("compare", "checker"):
            if name in row:
                row[name] = asdict(row[name])
        return row


def read_compare(row: object) -> CompareConfig:
    """{"mode", "absolute", "relative"}, or the mode alone; ValueError naming field and rule."""
    if isinstance(row, str):
        return CompareConfig(row)
    known = [one.name for one in fields(CompareConfig)]
    if not isinstance(row, dict) or set(row) - set(known):
        raise ValueError(f"compare={row!r:.80} must be a mode, or an object of {', '.join(known)}")
    return CompareConfig(**row)


def _checker(row: object) -> Checker:
    if not isinstance(row, dict) or set(row) - {"source", "language"} or not isinstance(row.get("source"), str):
        raise ValueError(f"checker={row!r:.80} must be its source, or an object of source and language")
    if row.get("language", "python") not in LANGUAGES:
        raise ValueError(f"checker.language={row['language']!r} must be one of {', '.join(LANGUAGES)}")
    return Checker(**row)
