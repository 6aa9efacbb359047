"""Problems of every published form become rows of one form; what is broken is named, and a pickle never runs."""

import base64
import gzip
import json
import pickle
import zlib

import pytest

from megatron_nb.data.code_packed import packed_json, pickled_text
from megatron_nb.data.code_problems import detect, problem_row, read_problem, read_problems
from megatron_nb.data.prompts import read_prompt
from megatron_nb.data.rows import BadRow
from tests.data.data_tokenizers import write_rows


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def lcb(**more):
    case = {"input": "1\n", "output": "2\n", "testtype": "stdin"}
    hidden = {"input": "5\n", "output": "6\n", "testtype": "stdin"}
    return {"question_title": "Next", "question_content": "Print n + 1.", "question_id": "abc_a", "starter_code": "",
            "public_test_cases": json.dumps([case]), "private_test_cases": packed(json.dumps([hidden])), "metadata": "{}",
            **more}  # fmt: skip


def taco(**more):
    given = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["3", "4"]]}
    return {"question": "Print each number plus 1.", "solutions": json.dumps(["print(1)", "print(2)"]), "starter_code": "",
            "input_output": json.dumps(given), "difficulty": "EASY", "name": "plus", "time_limit": "2.5 seconds",
            "memory_limit": "256.0 megabytes", "Expected Time Complexity": "O(N * log(N))", **more}  # fmt: skip


def contest(**more):
    tests = {"input": ["1\n"], "output": ["2\n"]}
    none = {"input": [], "output": []}
    return {"name": "1_A. Plus", "description": "Add one.", "public_tests": tests, "private_tests": none,
            "generated_tests": {"input": ["7\n", "8\n"], "output": ["8\n", "9\n"]},
            "solutions": {"language": [2, 3, 1, 3], "solution": ["int main", "three", "two", "also three"]},
            "time_limit": {"seconds": 2, "nanos": 500_000_000}, "memory_limit_bytes": 268_435_456, **more}  # fmt: skip


def humaneval(**more):
    test = """
METADATA = {'author': 'x'}

def check(candidate):
    assert True, "prints when it works"
    shift = 1
    assert candidate(1) == 1 + shift
    assert candidate(2) == 2 + shift
"""
    return {"task_id": "HumanEval/0", "prompt": 'def plus(n):\n    """Adds one."""\n', "entry_point": "plus", "test": test,
            "canonical_solution": "    return n + 1\n", **more}  # fmt: skip


def mbpp(**more):
    return {"task_id": 2, "prompt": "Write a function to add one.", "test_imports": ["import math"],
            "code": "import math\ndef plus(n, by=1):\n    return n + by",
            "test_list": ["assert plus(1) == 2", "assert set([plus(2)]) == {3}"], **more}  # fmt: skip


def read(row, form="auto"):
    return read_problem(row, "data/file.jsonl:7", form)


ROWS = {"livecodebench": lcb, "input_output": taco, "code_contests": contest, "humaneval": humaneval, "mbpp": mbpp}


@pytest.mark.parametrize("form", ROWS)
def test_the_format_is_told_by_the_keys_and_its_rows_can_be_prompts_and_be_read_again(form):
    assert detect(ROWS[form]()) == form
    row = problem_row(read(ROWS[form]()))
    assert {"id", "prompt", "language", "tests", "time_limit_s", "memory_limit_mb"} <= set(row)
    assert "```python" in row["prompt"].splitlines()[-1]
    conversation, data = read_prompt(json.loads(json.dumps(row)), "x", "s")
    assert conversation.messages == [{"role": "user", "content": row["prompt"]}] and data["tests"] == row["tests"]
    again = problem_row(read(row | {"generator": "def make(n): ..."}))
    assert detect(row) == "problem" and again == row | {"generator": "def make(n): ..."}


def test_livecodebench_tests_are_public_and_private_ones_in_text():
    row = problem_row(read(lcb()))
    assert row["tests"] == [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "5\n", "stdout": "6\n"}]
    assert row["public_tests"] == row["tests"][:1] and row["id"] == "abc_a" and row["time_limit_s"] == 6
    assert row["prompt"].startswith("Next\n\nPrint n + 1.") and "standard input" in row["prompt"]
    plain = lcb(private_test_cases=json.dumps([{"input": "3", "output": "4", "testtype": "stdin"}]))
    assert read(plain).tests[1] == {"stdin": "3", "stdout": "4"}


def test_livecodebench_functions_are_called_with_one_json_value_a_line():
    case = {"input": '[1, 2]\n"a\u2028b"\n', "output": "[3]", "testtype": "functional"}
    more = {"private_test_cases": "[]", "metadata": '{"func_name": "add"}', "starter_code": "class Solution:\n    ..."}
    row = problem_row(read(lcb(public_test_cases=json.dumps([case]), **more)))
    assert row["tests"] == [{"call": "add", "args": [[1, 2], "a\u2028b"], "expected": [3]}] and row["function"] == "add"
    assert "class Solution" in row["prompt"] and "`add`" in row["prompt"]
    with pytest.raises(BadRow, match="metadata has no func_name"):
        read(lcb(public_test_cases=[case]))


def test_apps_and_taco_tests_are_texts_or_lists_of_lines_with_limits_and_the_optimal_class():
    row = problem_row(read(taco()))
    assert row["tests"] == [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "2\n3", "stdout": "3\n4"}]
    assert (row["time_limit_s"], row["memory_limit_mb"], row["optimal"], row["reference"]) == (2.5, 256, "n log n", "print(1)")
    given = json.loads(taco()["input_output"])
    assert read(taco(input_output=given, solutions=["a"])).references == ["a"]  # objects in place of their texts
    assert "optimal" not in problem_row(read(taco(**{"Expected Time Complexity": "as fast as you can"})))


@pytest.mark.parametrize(
    ("inputs", "outputs", "calls"),
    [
        ([[1, 2], [3, 4]], [3, 7], [([1, 2], 3), ([3, 4], 7)]),
        ([[1], [2]], [[2], [3]], [([1], 2), ([2], 3)]),  # results wrapped
        ([[1], [2]], [[2], [3, 4]], [([1], [2]), ([2], [3, 4])]),  # lists themselves
        ([['"ab"', 1]], ['"ba"'], [(["ab", 1], "ba")]),  # texts as JSON texts
        ([5], [6], [([5], 6)]),
    ],
)
def test_apps_functions_are_called_with_what_their_rows_mean(inputs, outputs, calls):
    problem = read(taco(input_output={"fn_name": "f", "inputs": inputs, "outputs": outputs}))
    assert problem.tests == [{"call": "f", "args": args, "expected": expected} for args, expected in calls]


def test_code_contests_joins_its_three_kinds_of_tests_and_takes_python_solutions():
    problem = read(contest())
    assert [test["stdin"] for test in problem.tests] == ["1\n", "7\n", "8\n"] and problem.public_tests == problem.tests[:1]
    assert problem.references == ["three", "also three"] and (problem.time_limit_s, problem.memory_limit_mb) == (2.5, 256)
    assert read(contest(time_limit=None, memory_limit_bytes=0)).time_limit_s == 4


def test_each_assertion_of_humaneval_is_a_test_and_constant_ones_are_none():
    problem = read(humaneval())
    assert len(problem.tests) == 2 and all(test["entry"] == "plus" for test in problem.tests)
    for test, number in zip(problem.tests, (1, 2)):
        space = {}
        exec(test["code"], space)
        space["check"](lambda n: n + 1)
        assert f"candidate({number})" in test["code"] and test["code"].count("assert") == 1
        with pytest.raises(AssertionError):
            space["check"](lambda n: n + 2 if n == number else n + 1)  # noqa: B023
    assert problem.references[0].endswith("return n + 1\n")


def test_a_humaneval_test_with_assertions_in_a_loop_stays_whole():
    looped = "def check(candidate):\n    assert candidate(1) == 2\n    for n in [3]:\n        assert candidate(n) == n + 1\n"
    (test,) = read(humaneval(test=looped)).tests
    assert test["code"].count("assert") == 2


def test_mbpp_names_the_function_with_its_arguments_in_both_of_its_forms():
    row = problem_row(read(mbpp()))
    assert row["tests"][0] == {"code": "import math\nassert plus(1) == 2", "entry": "plus"}
    assert row["tests"][1]["entry"] == row["function"] == "plus" and "def plus(n, by=1):" in row["prompt"]
    full = mbpp(text="Add one.", test_setup_code="x = 1", challenge_test_list=["assert plus(x) == 2"])
    del full["prompt"], full["test_imports"]
    assert [test["code"] for test in read(full).tests][2] == "x = 1\nassert plus(x) == 2"


def test_every_row_of_the_real_files_is_read(shared_data):
    human = [problem for _, problem in read_problems(str(shared_data / "code/HumanEval.jsonl.gz"))]
    assert len(human) == 164 and sum(len(problem.tests) for problem in human) > 900
    assert all(problem.references and problem.function for problem in human)
    basic = [problem for _, problem in read_problems(str(shared_data / "code/sanitized-mbpp.json"))]
    assert len(basic) == 427 and all(problem.starter.startswith(f"def {problem.function}(") for problem in basic)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "label": 1}, "keys are text, label"),
        (lcb(public_test_cases="[{"), "public_test_cases is '[{'"),
        (lcb(private_test_cases="neither!"), "private_test_cases is 'neither!'"),
        (lcb(public_test_cases=[{"input": 1}]), "public_test_cases[0] is {'input': 1}"),
        (lcb(question_content=" "), "question_content is ' '"),
        (taco(input_output=""), "input_output is None"),
        (taco(input_output={"inputs": ["1"], "outputs": []}), "of the same length"),
        (taco(input_output={"inputs": [], "outputs": []}), "it has no tests"),
        (taco(input_output={"inputs": [{"a": 1}], "outputs": ["1"]}), "input_output.inputs holds {'a': 1}"),
        (taco(time_limit="soon"), "time_limit is 'soon'"),
        (taco(solutions="{}"), "solutions is {}"),
        (contest(public_tests={"input": ["1"], "output": []}), "public_tests is {'input'"),
        (humaneval(test="def other(): pass"), "it defines check(candidate)"),
        (humaneval(test="def"), "it is Python code"),
        (mbpp(test_list=[]), "test_list is []"),
        ({"prompt": "x", "tests": [{"stdin": "1"}]}, "tests[0]"),
        ({"prompt": "x", "tests": [{"call": "f", "args": 1, "expected": 2}]}, "args=1 must be a list"),
        ({"prompt": "x", "tests": 5}, "tests is 5"),
    ],
)
def test_a_broken_row_is_named_with_file_line_field_value_and_rule(row, words):
    with pytest.raises(BadRow) as caught:
        read(row)
    assert str(caught.value).startswith("data/file.jsonl:7: ") and words in str(caught.value)


def test_rows_of_files_know_their_line(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(json.dumps(lcb()) + "\n\n" + json.dumps(taco(input_output="")) + "\n")
    found = read_problems(str(tmp_path))
    assert next(found)[0].endswith("rows.jsonl.gz:1")
    with pytest.raises(BadRow, match="rows.jsonl.gz:3: input_output"):
        next(found)
    named = write_rows(tmp_path / "x.jsonl", [lcb(question_id=None)])
    assert next(read_problems(str(named)))[1].name == "x.jsonl:1"  # a row without a name is called after its place


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def wicked(path):
    """Pickles that would write `path` or eat memory, each in another way."""
    name = path.encode()
    yield pickle.dumps(Malicious(path), 0)
    yield pickle.dumps(Malicious(path), 4)
    yield pickle.dumps(["[]", Malicious(path)], 5)
    yield b"cbuiltins\nopen\n(S'" + name + b"'\nS'w'\ntR."  # GLOBAL
    yield b"(S'" + name + b"'\nS'w'\nibuiltins\nopen\n."  # INST
    yield b"\x80\x04\x8c\x02[]\x82\x01."  # EXT1
    yield b"\x80\x02U\x02[]P1\n."  # PERSID
    yield pickle.dumps("[]", 2)[:-1] + b"0" + pickle.dumps(Malicious(path), 2)[2:]


@pytest.mark.parametrize("number", range(8))
def test_a_pickle_that_would_do_anything_is_refused_before_it_does(tmp_path, number):
    target = tmp_path / "written"
    pickled = list(wicked(str(target)))[number]
    with pytest.raises(ValueError, match="instruction"):
        pickled_text(pickled)
    with pytest.raises(BadRow, match="private_test_cases is .*instruction"):
        read(lcb(private_test_cases=base64.b64encode(zlib.compress(pickled)).decode()))
    assert not target.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_text_is_read_whatever_the_protocol_of_its_pickle(protocol):
    text = json.dumps([{"input": "ä" * 300, "output": "\u2028"}], ensure_ascii=False)
    assert pickled_text(pickle.dumps(text, protocol)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (base64.b64encode(zlib.compress(b"a" * 10_000_000)).decode(), "unpack to more than 1000000"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(), "cut off"),
        (base64.b64encode(b"not of zlib").decode(), "not of zlib"),
        (packed(["[]"]), "instruction"),
        (packed("no json"), "Expecting value"),
        (base64.b64encode(zlib.compress(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0fabc.")).decode(), "expected .* bytes"),
        ("%%%", "neither JSON nor base64"),
    ],
)
def test_what_unpacks_too_large_or_is_damaged_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        packed_json(text, max_bytes=1_000_000)
