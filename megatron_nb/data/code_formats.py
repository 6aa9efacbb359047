"""One reader for each published form of programming problems: a row in, a Problem out.

    livecodebench  {"question_content", "public_test_cases", "private_test_cases", "metadata", "starter_code"}
    input_output   APPS, TACO: {"question", "input_output": {"inputs", "outputs", "fn_name"?}, "solutions", "starter_code", ...}
    code_contests  {"description", "public_tests", "private_tests", "generated_tests", "solutions", "time_limit", ...}
    humaneval      {"prompt", "canonical_solution", "test", "entry_point"}
    mbpp           {"text", "code", "test_list", "test_setup_code"}, sanitized: {"prompt", "code", "test_list", "test_imports"}
    problem        what tools/prepare_code.py writes: {"prompt", "tests", ...}
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.data.code_packed import packed_json

TIME_S, MEMORY_MB = 4.0, 512  # where a row says nothing; LiveCodeBench's own runner allows 6 s
LIVECODEBENCH_S = 6.0
PYTHON3 = 3  # the language of a solution in CodeContests
UNITS_S = {"ms": 0.001, "mi": 0.001, "s": 1.0, "": 1.0}  # by their first letters
UNITS_MB = {"b": 2**-20, "k": 2**-10, "m": 1.0, "g": 2.0**10, "": 1.0}
COMPLEXITY = ("optimal", "Expected Time Complexity", "expected_time_complexity", "time_complexity")


class WrongField(ValueError):
    """A field of a row breaks a rule."""

    def __init__(self, name: str, found: str, rule: str):
        super().__init__(f"{name} {found}: {rule}")
        self.name, self.found, self.rule = name, found, rule


@dataclass
class Problem:
    """A programming problem, whatever data set it is from."""

    name: str
    statement: str
    tests: list[dict[str, Any]]  # rows of the judge
    public_tests: list[dict[str, Any]] = field(default_factory=list)  # those of `tests` that the statement shows
    starter: str = ""  # code that the solution begins with or has to fit
    function: str | None = None  # what the tests call; None: a program over stdin and stdout
    references: list[str] = field(default_factory=list)  # solutions in Python
    time_limit_s: float = TIME_S
    memory_limit_mb: int = MEMORY_MB
    complexity: str | None = None  # of the best solution, as the data write it
    prompt: str | None = None  # of a row that is one of ours already
    other: dict[str, Any] = field(default_factory=dict)  # its other fields, such as a generator: passed on as they are

    @property
    def text(self) -> str:
        """What tells it from other problems."""
        return f"{self.statement}\n{self.starter}"


def livecodebench(row: dict[str, Any]) -> Problem:
    function = (parsed(row, "metadata") or {}).get("func_name")

    def tests(name: str, cases: Any) -> list[dict[str, Any]]:
        if not isinstance(cases, list):
            raise WrongField(name, f"is {shown(cases)}", "it is a list of {input, output, testtype}")
        return [_livecodebench_test(case, function, f"{name}[{place}]") for place, case in enumerate(cases)]

    public = tests("public_test_cases", parsed(row, "public_test_cases"))
    private = tests("private_test_cases", parsed(row, "private_test_cases", packed_json) or [])
    title, content = row.get("question_title"), text_of(row, "question_content")
    return Problem(
        str(row.get("question_id") or row.get("id") or ""), f"{title}\n\n{content}" if title else content,
        public + private, public, row.get("starter_code") or "", function, time_limit_s=LIVECODEBENCH_S,
    )  # fmt: skip


def _livecodebench_test(case: Any, function: str | None, name: str) -> dict[str, Any]:
    if not (isinstance(case, dict) and isinstance(case.get("input"), str) and isinstance(case.get("output"), str)):
        raise WrongField(name, f"is {shown(case)}", "a test is {input, output, testtype}, both texts")
    if case.get("testtype", "stdin") == "stdin":
        return {"stdin": case["input"], "stdout": case["output"]}
    if not function:
        raise WrongField("metadata", "has no func_name", f"{name} calls a function")
    try:
        arguments = [json.loads(line) for line in case["input"].split("\n") if line.strip()]
        return {"call": function, "args": arguments, "expected": json.loads(case["output"])}
    except ValueError as error:
        raise WrongField(name, f"is {shown(case)}", f"arguments and output are JSON, one value a line ({error})") from None


def input_output(row: dict[str, Any]) -> Problem:
    given = parsed(row, "input_output")
    lists = [given.get(key) for key in ("inputs", "outputs")] if isinstance(given, dict) else []
    if not (lists and all(isinstance(one, list) for one in lists) and len(lists[0]) == len(lists[1])):
        raise WrongField("input_output", f"is {shown(given)}", "it holds lists `inputs` and `outputs` of the same length")
    function = given.get("fn_name") or None
    if function:
        inputs, outputs = [_unquoted(one) for one in lists[0]], [_unquoted(one) for one in lists[1]]
        if all(isinstance(one, list) and len(one) == 1 for one in outputs):
            outputs = [one[0] for one in outputs]  # most problems wrap what the function returns
        tests = [{"call": function, "args": one if isinstance(one, list) else [one], "expected": expected}
                 for one, expected in zip(inputs, outputs)]  # fmt: skip
    else:
        tests = [{"stdin": _lines(one, "inputs"), "stdout": _lines(expected, "outputs")} for one, expected in zip(*lists)]
    name = next((str(row[key]) for key in ("id", "problem_id", "task_id", "name", "url") if row.get(key) not in (None, "")), "")
    asked = text_of(row, "question" if row.get("question") else "problem")
    return Problem(
        name, asked, tests, [], row.get("starter_code") or "", function, _solutions(row),
        amount(row.get("time_limit"), "time_limit", UNITS_S) or TIME_S,
        int(amount(row.get("memory_limit"), "memory_limit", UNITS_MB) or MEMORY_MB),
    )  # fmt: skip


def _unquoted(value: Any) -> Any:
    """Some call-style rows hold their texts as JSON texts: "\\"ab\\"" means "ab"."""
    if isinstance(value, list):
        return [_unquoted(one) for one in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _lines(value: Any, name: str) -> str:
    if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value):
        value = "\n".join(map(str, value))
    if not isinstance(value, str):
        raise WrongField(f"input_output.{name}", f"holds {shown(value)}", "without fn_name each is a text or a list of lines")
    return value


def _solutions(row: dict[str, Any]) -> list[str]:
    found = parsed(row, "solutions") if row.get("solutions") else []
    if not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        raise WrongField("solutions", f"is {shown(found)}", "it is a list of programs")
    return found


def code_contests(row: dict[str, Any]) -> Problem:
    parts = {name: _paired(row.get(name), name, "input", "output")
             for name in ("public_tests", "private_tests", "generated_tests")}  # fmt: skip
    tests = {name: [{"stdin": given, "stdout": wanted} for given, wanted in pairs] for name, pairs in parts.items()}
    limit = row.get("time_limit") or {}
    seconds = limit.get("seconds", 0) + limit.get("nanos", 0) / 1e9 if isinstance(limit, dict) else limit
    solutions = _paired(row.get("solutions"), "solutions", "language", "solution")
    return Problem(
        str(row.get("name") or row.get("id") or ""), text_of(row, "description"), sum(tests.values(), []),
        tests["public_tests"],
        references=[source for language, source in solutions if language == PYTHON3],
        time_limit_s=amount(seconds, "time_limit", UNITS_S) or TIME_S,
        memory_limit_mb=int((row.get("memory_limit_bytes") or 0) / 2**20) or MEMORY_MB,
    )  # fmt: skip


def _paired(value: Any, name: str, *keys: str) -> list[tuple[Any, Any]]:
    if not value:
        return []
    lists = [value.get(key) for key in keys] if isinstance(value, dict) else []
    if not lists or not all(isinstance(one, list) for one in lists) or len({len(one) for one in lists}) != 1:
        raise WrongField(name, f"is {shown(value)}", f"it is an object of lists of the same length: {', '.join(keys)}")
    return list(zip(*lists))


def humaneval(row: dict[str, Any]) -> Problem:
    prompt, test, entry = (text_of(row, key) for key in ("prompt", "test", "entry_point"))
    # The prompt stands before the test, so that what else it defines is the test's own and not the candidate's.
    tests = [{"code": f"{prompt}    pass\n{part}", "entry": entry} for part in _checks(test)]
    return Problem(
        str(row.get("task_id") or ""), f"Complete the function `{entry}`.", tests, [], prompt, entry,
        [prompt + row["canonical_solution"]] if row.get("canonical_solution") else [],
    )  # fmt: skip


def _checks(test: str) -> list[str]:
    """The test as one for each of its assertions, so that a share of them can be passed; what else it does stays in each.

    Assertions of a constant would be passed by anything: they go. A test of another shape stays whole.
    """
    try:
        module = _code(test)
    except SyntaxError as error:
        raise WrongField("test", f"is {shown(test)}", f"it is Python code ({error})") from None
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None:
        raise WrongField("test", f"is {shown(test)}", "it defines check(candidate)")
    body = [node for node in check.body if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant))]
    asserted = [node for node in body if isinstance(node, ast.Assert)]
    others = [node for node in body if not isinstance(node, ast.Assert)]
    if any(isinstance(inner, ast.Assert) for node in others for inner in ast.walk(node)):
        asserted = []  # those in loops would be run again with each of the rest
    parts = []
    for one in asserted or [None]:
        check.body = [node for node in body if one is None or node is one or not isinstance(node, ast.Assert)]
        parts.append(ast.unparse(module))
    return parts


def mbpp(row: dict[str, Any]) -> Problem:
    asserted = row.get("test_list")
    if not (isinstance(asserted, list) and asserted and all(isinstance(one, str) for one in asserted)):
        raise WrongField("test_list", f"is {shown(asserted)}", "it is a list of assertions that is not empty")
    before = [*(row.get("test_imports") or []), *filter(None, [row.get("test_setup_code")])]
    asserted = [*asserted, *(row.get("challenge_test_list") or [])]
    code = row.get("code") or ""
    try:
        defined = {node.name: node for node in _code(code).body if isinstance(node, ast.FunctionDef)}
        called = [node.func.id for node in ast.walk(_code(asserted[0])) if isinstance(node, ast.Call)
                  and isinstance(node.func, ast.Name) and (node.func.id in defined or not hasattr(builtins, node.func.id))]
    except SyntaxError as error:
        raise WrongField("code", f"or test_list cannot be parsed ({error})", "both are Python code") from None
    function = next((name for name in called if name in defined), next(iter(called), None))
    starter = f"def {function}({ast.unparse(defined[function].args)}):" if function in defined else ""
    tests = [{"code": "\n".join([*before, one]), **({"entry": function} if function else {})} for one in asserted]
    return Problem(
        str(row.get("task_id", row.get("id", ""))), text_of(row, "prompt" if row.get("prompt") else "text"), tests, [], starter,
        function, [code] if code else [],
    )  # fmt: skip


def problem(row: dict[str, Any]) -> Problem:
    tests = parsed(row, "tests")
    if not isinstance(tests, list):
        raise WrongField("tests", f"is {shown(tests)}", "it is a list of tests")
    known = {"id", "prompt", "tests", "function", "reference", "time_limit_s", "memory_limit_mb", "public_tests", "language"}
    other = {key: value for key, value in row.items() if key not in known and key not in COMPLEXITY}
    return Problem(
        str(row.get("id") or ""), text_of(row, "prompt"), tests, parsed(row, "public_tests") or [], "", row.get("function"),
        [row["reference"]] if row.get("reference") else [],
        amount(row.get("time_limit_s"), "time_limit_s", UNITS_S) or TIME_S,
        int(amount(row.get("memory_limit_mb"), "memory_limit_mb", UNITS_MB) or MEMORY_MB), prompt=row["prompt"], other=other,
    )  # fmt: skip


READERS = {  # format -> (keys that only its rows have, its reader); the first that fits is taken
    "livecodebench": (("public_test_cases",), livecodebench),
    "humaneval": (("test", "entry_point"), humaneval),
    "mbpp": (("test_list",), mbpp),
    "input_output": (("input_output",), input_output),
    "code_contests": (("description", "public_tests"), code_contests),
    "problem": (("prompt", "tests"), problem),
}


def _code(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the data, not ours
        return ast.parse(text)


# ------------------------------------------------------------------ fields
def parsed(row: dict[str, Any], name: str, otherwise: Any = None) -> Any:
    """A field that may be JSON or its text; `otherwise` reads a text that is no JSON."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if otherwise is None:
            raise WrongField(name, f"is {shown(value)}", f"it is JSON or its text ({error})") from None
    try:
        return otherwise(value)
    except (ValueError, RecursionError) as error:
        raise WrongField(name, f"is {shown(value)}", str(error)) from None


def text_of(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise WrongField(name, f"is {shown(value)}", "it is a text that is not empty")
    return value


def amount(value: Any, name: str, units: dict[str, float]) -> float | None:
    """A number, or a text such as "2.5 seconds"; None for nothing or 0."""
    if value in (None, "", 0):
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*(?:per test)?\s*", str(value))
    unit = found and next((one for one in units if found[2].lower().startswith(one)), None)
    if unit is None or isinstance(value, bool):
        raise WrongField(name, f"is {shown(value)}", "it is a number with or without its unit")
    return float(found[1]) * units[unit] or None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


def complexity_of(row: dict[str, Any], names: Iterable[str] = COMPLEXITY) -> str | None:
    """What the row says of the best solution's time, as it stands there."""
    return next((row[name] for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
