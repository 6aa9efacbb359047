"""Rows in, rows out: the command line, its checks before any work, and going on after a kill."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nb.sandbox import cgroup, processes
from megatron_nb.sandbox.__main__ import main
from megatron_nb.sandbox.batch import BadRow, Progress, done_before, rows, stream
from megatron_nb.sandbox.compare import CompareConfig
from megatron_nb.sandbox.ladder import LADDER
from megatron_nb.sandbox.rows import read_complexity_row, read_judge_row
from megatron_nb.sandbox.tests import Checker, Program, Test

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = {"stdin": "3", "stdout": "6"}, {"stdin": "3", "stdout": "7"}
DOUBLE = {"language": "python", "program": "print(int(input()) * 2)", "time_limit_s": 10, "memory_limit_mb": 256}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, *found):
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def run(*words):
    command = [sys.executable, "-m", "megatron_nb.sandbox", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_judge_writes_one_line_per_row_in_their_order(shared_pool, tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        {"id": "slow", **DOUBLE, "program": "import time\ntime.sleep(0.5)\nprint(6)", "tests": [RIGHT]},
        {"id": 2, **DOUBLE, "tests": [RIGHT, WRONG, {"stdin": "x", "stdout": ""}]},
        {"id": "call", "program": "def f(a): return a", "tests": [{"call": "f", "args": [[1]], "expected": [1]}]},
        {"id": "code", "program": "def f(a): return a", "tests": [{"code": "assert f((1, 2)) == (1, 2)"}]},
    )
    assert main(["judge", str(source), "--out", str(tmp_path / "out.jsonl"), "--workers", "2"]) == 0
    found = lines(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == ["slow", 2, "call", "code"]
    assert [row["passed"] for row in found] == [1, 1, 1, 1] and [row["total"] for row in found] == [1, 3, 1, 1]
    assert found[1]["verdicts"] == ["accepted", "wrong answer", "runtime error"]
    assert found[1]["details"][1] == "line 1: expected '7', found '6'" and found[0]["isolation"].startswith("bubblewrap")
    for row in found:
        assert {len(row[name]) for name in ("cpu_s", "wall_s", "peak_memory_mb", "details")} == {len(row["verdicts"])}
        assert all(seconds > 0 for seconds in row["cpu_s"] + row["wall_s"])


def test_rows_that_are_there_are_not_done_again_and_a_torn_line_is_mended(shared_pool, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", *({"id": i, **DOUBLE, "tests": [RIGHT]} for i in range(4)))
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": 0, "kept": true}\n{"id": 1, "kept": true}\n{"id": 2, "verd')
    assert main(["judge", str(source), "--out", str(out), "--workers", "1"]) == 0
    found = lines(out)
    assert [(row["id"], "kept" in row) for row in found] == [(0, True), (1, True), (2, False), (3, False)]
    before = out.read_bytes()
    assert main(["judge", str(source), "--out", str(out)]) == 0
    assert out.read_bytes() == before and "4 of 4 rows are in" in capsys.readouterr().err


def test_files_that_rows_cannot_be_read_from_twice_nor_answers_resumed_in_are_refused(tmp_path, capsys):
    source, pipe = write(tmp_path / "in.jsonl", {"id": 0, **DOUBLE, "tests": [RIGHT]}), tmp_path / "pipe"
    os.mkfifo(pipe)
    for given, out in ((pipe, tmp_path / "o"), (source, pipe), (source, "/dev/full"), (source, tmp_path), (source, source)):
        before = source.read_bytes()
        assert main(["judge", str(given), "--out", str(out), "--workers", "1"]) == 2
        assert "regular file" in (words := capsys.readouterr().err) or "file of the rows" in words
        assert source.read_bytes() == before


def test_a_terminated_command_leaves_no_process_and_no_control_group(shared_pool, tmp_path):
    row = {"id": 0, "program": "import time; time.sleep(60)", "tests": [RIGHT], "time_limit_s": 60}
    source = write(tmp_path / "in.jsonl", row)
    command = [sys.executable, "-m", "megatron_nb.sandbox", "judge", source, "--out", tmp_path / "out.jsonl", "--workers", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        end = time.monotonic() + 60
        while len(below := processes.descendants(run.pid)[1:]) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        run.terminate()
        assert run.wait(timeout=60) == 130
    parents = {*(cgroup.Version1.parents(cgroup.MOUNT) or []), *(cgroup.Version2.parents(cgroup.MOUNT) or [])}
    assert not [group for parent in parents for group in parent.glob(f"{cgroup.PREFIX}{run.pid}-*")]
    while (alive := [pid for pid in below if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < end:
        time.sleep(0.05)  # orphans of bubblewrap, until process 1 of the machine takes note of their end
    assert not alive


def test_an_input_without_rows_is_refused_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text("\n")
    assert main(["judge", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "holds no row" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_no_workers_at_all_are_refused(tmp_path, workers, capsys):
    source = write(tmp_path / "in.jsonl", {"id": 0, **DOUBLE, "tests": [RIGHT]})
    assert main(["judge", str(source), "--out", str(tmp_path / "out.jsonl"), "--workers", workers]) == 2
    assert f"workers={workers} must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("there", ['{"id": 7}\n', '{"passed": 3}\n', 'not json\n{"id": 0}\n'])
def test_the_output_of_other_rows_is_refused(tmp_path, there):
    out = tmp_path / "out.jsonl"
    out.write_text(there)
    with pytest.raises(ValueError, match=r"out\.jsonl:1: .*move"):
        done_before(out, iter([0, 1]))
    assert out.read_text() == there


BAD = [
    ("{", "Expecting"),
    ("[1]", "a row must be an object"),
    ({}, "program is missing"),
    ({"program": "x"}, "tests is missing"),
    ({"program": 3, "tests": [{"stdin": "", "stdout": ""}]}, "program=3 must be text"),
    ({"program": "x", "tests": []}, "at least one test"),
    ({"program": "x", "tests": {"stdin": ""}}, "must be a list"),
    ({"program": "x", "tests": [{"stdin": "", "stdot": ""}]}, r"tests\[0\]: 'stdot' is no field.* did you mean 'stdout'"),
    ({"program": "x", "tests": [{}]}, "not 0 of them"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": "", "code": "x"}]}, "not 2 of them"),
    ({"program": "x", "tests": [{"stdin": ""}]}, "stdin without stdout"),
    ({"program": "x", "tests": [{"stdin": 3, "stdout": ""}]}, "stdin=3 must be text"),
    ({"program": "x", "tests": [{"call": "f", "args": []}]}, "call without expected"),
    ({"program": "x", "tests": [{"call": "f", "args": 3, "expected": 3}]}, "args=3 must be a list"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": "", "compare": "fuzzy"}]}, "must be one of tokens, lines"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": "", "compare": {"abs": 1}}]}, "must be a mode, or an object"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": "", "checker": 3}]}, "checker=3 must be its source"),
    ({"program": "x", "tests": [{"code": "x", "checker": "x"}]}, "checker judges text"),
    ({"program": "x", "language": "ruby", "tests": [{"stdin": "", "stdout": ""}]}, "language='ruby' must be one of"),
    ({"program": "x", "language": "cpp", "tests": [{"code": "x"}]}, "stdin/stdout tests only"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": ""}], "time_limit_s": 0}, "time_limit_s=0 must be a number above 0"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": ""}], "memory_limit_mb": "1"}, "memory_limit_mb='1' must be"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": ""}], "memory_limit_mb": 0.5}, "memory_mb=0 must be"),
    ({"program": "x", "tests": [{"stdin": "", "stdout": ""}], "time_limit_s": 1e12}, "time_s=1000000000000.0 must be"),
    ({"id": [1], "program": "x", "tests": [{"stdin": "", "stdout": ""}]}, "must be text or a whole number"),
]


@pytest.mark.parametrize(("row", "words"), BAD)
def test_a_bad_row_is_named_with_file_line_value_rule_and_remedy(tmp_path, row, words):
    good = {"program": "x", "tests": [{"stdin": "", "stdout": ""}]}
    path = tmp_path / "in.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{row if isinstance(row, str) else json.dumps(row)}\n{json.dumps(good)}\n")
    with pytest.raises(BadRow, match=rf"in\.jsonl:3: .*{words}.*mend the row, or pass --bad-rows skip"):
        list(rows(path, read_judge_row))
    bad = []
    assert len(list(rows(path, read_judge_row, True, bad))) == 2 and len(bad) == 1


def test_bad_rows_stop_the_command_before_any_program_runs(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"id": 1, **DOUBLE, "tests": [RIGHT]}, {"id": 2, "program": "x"})
    out = tmp_path / "out.jsonl"
    assert main(["judge", str(source), "--out", str(out)]) == 2
    assert "in.jsonl:2: tests is missing" in capsys.readouterr().err and not out.exists()
    assert main(["complexity", str(source), "--out", str(out)]) == 2
    assert "in.jsonl:1: function is missing" in capsys.readouterr().err


def test_bad_rows_can_be_left_out_and_are_counted(shared_pool, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"id": 1, "program": "x"}, {"id": 2, **DOUBLE, "tests": [RIGHT]})
    assert main(["judge", str(source), "--out", str(tmp_path / "out.jsonl"), "--bad-rows", "skip", "--workers", "1"]) == 0
    assert [row["id"] for row in lines(tmp_path / "out.jsonl")] == [2] and "skipped 1 bad row" in capsys.readouterr().err


def test_one_program_against_a_file_of_tests(shared_pool, tmp_path, capsys):
    program = tmp_path / "double.py"
    program.write_text("print(int(input()) * 2)")
    tests = tmp_path / "tests.json"
    tests.write_text(json.dumps([RIGHT, WRONG, {"stdin": "4", "stdout": "8"}]))
    words = ["judge", str(program), "--tests", str(tests), "--workers", "1"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "test 2: wrong answer" in said and "expected '7', found '6'" in said and "2 of 3 tests passed" in said
    assert main([*words, "--stop-at-first"]) == 1 and "test 3" not in capsys.readouterr().out
    tests.write_text('{"stdin": "3", "stdout": "6"}\n{"stdin": "4", "stdout": "8"}\n')
    assert main(words) == 0
    tests.write_text('{"stdin": "3"}')
    assert main(words) == 2 and "stdin without stdout" in capsys.readouterr().err
    assert main(["judge", str(tests), "--tests", str(tests)]) == 2 and "the ending must be one of" in capsys.readouterr().err


def test_isolation_none_is_said_in_every_result(tmp_path):
    source = write(tmp_path / "in.jsonl", {"id": 1, **DOUBLE, "tests": [RIGHT]})
    done = run("judge", source, "--out", tmp_path / "out.jsonl", "--isolation", "none", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "out.jsonl")[0]["isolation"] == "none" and "1 of 1 rows" in done.stderr


def test_complexity_writes_one_line_per_row(shared_pool, tmp_path):
    program, generator = "def f(a):\n    return [b for b in a if b]", "def make(n):\n    return [list(range(n))]"
    source = write(tmp_path / "in.jsonl", {"id": "a", "program": program, "function": "f", "generator": generator})
    assert main(["complexity", str(source), "--out", str(tmp_path / "out.jsonl"), "--workers", "1"]) == 0
    (found,) = lines(tmp_path / "out.jsonl")
    assert found["id"] == "a" and found["class"] in (*LADDER, "unknown") and 0 <= found["confidence"] <= 1 and found["points"]


def test_the_service_s_settings_reach_it(monkeypatch, capsys):
    from megatron_nb.sandbox import service

    seen = []
    monkeypatch.setattr(service, "serve", lambda *given: seen.append(given))
    assert main(["serve", "--port", "0", "--token-env", "TOKEN", "--queue", "9", "--workers", "3", "--isolation", "none"]) == 0
    ((config, workers, isolation),) = seen
    assert (config.port, config.token_env, config.queue, workers, isolation) == (0, "TOKEN", 9, 3, "none")
    assert main(["serve", "--host", "0.0.0.0"]) == 2 and "without_token" in capsys.readouterr().err


def test_the_command_refuses_what_it_does_not_know():
    assert run("judge", "nowhere.jsonl", "--out", "x").returncode == 2
    done = run("judge", "in.jsonl", "--wrokers", "2")
    assert done.returncode == 2 and "--wrokers" in done.stderr


def test_answers_come_in_order_while_later_rows_go_on_and_few_are_under_way(tmp_path):
    under_way, most = set(), 0

    async def work(row):
        nonlocal most
        under_way.add(row["id"])
        most = max(most, len(under_way))
        await asyncio.sleep(0.3 if row["id"] == 0 else 0.001)
        under_way.discard(row["id"])
        return {"id": row["id"]}

    out, said = tmp_path / "out.jsonl", io.StringIO()
    start = time.monotonic()
    asyncio.run(stream(({"id": i} for i in range(100)), work, out, 3, Progress(100, 0, said)))
    assert [row["id"] for row in lines(out)] == list(range(100)) and most == 3
    assert time.monotonic() - start < 3 and "100 of 100 rows" in said.getvalue()


def test_a_failure_of_ours_stops_the_command_and_keeps_what_is_done(tmp_path):
    async def work(row):
        if row["id"] == 3:
            raise KeyError("a bug")
        return {"id": row["id"]}

    with pytest.raises(RuntimeError, match="row 3: KeyError: 'a bug'"):
        asyncio.run(stream(({"id": i} for i in range(10)), work, tmp_path / "out.jsonl", 1, Progress(10, 0, io.StringIO())))
    assert [row["id"] for row in lines(tmp_path / "out.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    "test",
    [
        Test(stdin="a", stdout="b"),
        Test(stdin="a", stdout="b", compare=CompareConfig("numbers", relative=1e-6)),
        Test(stdin="a", checker=Checker("def check(input, output, expected): return True")),
        Test(call="f", args=[1, "a"], expected=None),
        Test(call="f", args=[(1, 2), {3}, 10**5000], expected={1: (2,)}),
        Test(call="f", args=[{"!set": [1]}], expected=float("inf")),
        Test(code="assert f() == 1", entry="f"),
    ],
    ids=["text", "numbers", "checker", "call", "tagged", "looks tagged", "code"],
)
def test_a_test_survives_its_row(test):
    assert Test.read(json.loads(json.dumps(test.row()))) == test


def test_a_row_s_own_fields_reach_the_judge():
    row = {"program": "x", "tests": [{"code": "x"}], "time_limit_s": 2, "memory_limit_mb": 64, "entry": "f", "prompt": "?"}
    program, tests, limits, stop = read_judge_row({**row, "stop_at_first": True})
    assert program == Program("x", "python", "f") and tests == [Test(code="x")] and stop
    assert (limits.time_s, limits.memory_mb) == (2, 64)
    assert read_complexity_row({"program": "a", "function": "b", "generator": "c"}) == ("a", "b", "c")
