"""Programs: HumanEval against a plain runner of its own tests, what counts as the program of an answer, dates and contests."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from megatron_nb.asking.askers import Answer
from megatron_nb.data.rows import raw_rows
from megatron_nb.evals.code import program_of
from megatron_nb.evals.harness import attempt
from megatron_nb.evals.kinds import make_task
from megatron_nb.rollout.engine import Sampling
from tests.evals.scripted_asker import ScriptedAsker

SAMPLING = Sampling(max_tokens=512, temperature=0.8)
SAMPLES = 4


def attempts(task, asker, items=None) -> list:
    async def every() -> list:
        await task.ready()
        pairs = [(item, index) for item in items or task.items() for index in range(task.samples)]
        return await asyncio.gather(*(attempt(task, item, asker, index) for item, index in pairs))

    try:
        return asyncio.run(every())
    finally:
        task.close()


def test_humaneval_equals_a_plain_run_of_its_tests_and_the_published_estimator(shared_data):
    """Samples of which some are wrong, in every form in which models answer."""
    path = shared_data / "code" / "HumanEval.jsonl.gz"
    settings = {"path": str(path), "samples": SAMPLES, "k": [1, 2, 4], "limit": 8, "judge": {"workers": 2}}
    task = make_task("h", {"kind": "code", **settings}, SAMPLING)
    rows = {row["task_id"]: row for row in (json.loads(raw) for _, raw in raw_rows(path))}
    items, rng = task.items(), np.random.default_rng(0)
    bodies = {(item.id, index): _sample(rows[item.id], rng.integers(4)) for item in items for index in range(SAMPLES)}
    said = {}
    for item in items:
        for index in range(SAMPLES):
            body, row = bodies[item.id, index], rows[item.id]
            whole = row["prompt"] + body
            forms = [f"```python\n{whole}\n```", f"<think>\nhm\n</think>\n\nHere:\n\n```python\n{body}\n```\nDone.", whole]
            said[f"h/{item.id}/{index}/0"] = forms[(index + len(item.id)) % 3]

    class Model:
        told = "model"

        async def ask(self, conversation, name, seed, sampling=None):
            return Answer(said[name], True, 1)

    outcomes = attempts(task, Model(), items)
    told, right = task.summarise(outcomes), {}
    for (name, index), body in bodies.items():
        right.setdefault(name, []).append(_plain_run(rows[name], body))
        assert next(one for one in outcomes if (one.item, one.index) == (name, index)).score == right[name][-1], said
    assert 0 < sum(map(sum, right.values())) < len(bodies)
    for k in (1, 2, 4):
        means = [1.0 if SAMPLES - sum(its) < k else 1 - np.prod(1 - k / np.arange(SAMPLES - sum(its) + 1, SAMPLES + 1))
                 for its in right.values()]  # fmt: skip
        assert abs(told[f"pass@{k}"] - np.mean(means)) < 1e-12


def _sample(row: dict, kind: int) -> str:
    wrong = ["    return None\n", "    raise ValueError\n"]
    return row["canonical_solution"] if kind < 2 else wrong[kind - 2]


def _plain_run(row: dict, body: str) -> float:
    program = f"{row['prompt']}{body}\n{row['test']}\ncheck({row['entry_point']})"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0)


GIVEN = {"function": "f", "starter": "import math\n\ndef f(x):\n    "}


@pytest.mark.parametrize(
    ("text", "gold", "program"),
    [
        ("```python\nprint(1)\n```", {}, "print(1)\n"),
        ("```\nprint(1)\n```\nOr rather:\n```python\nprint(2)\n```", {}, "print(2)\n"),
        ("```python\nprint(1)\n```\nOr rather:\n```python\nprint(2)\n```", {}, "print(2)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", {}, "print(1)\n"),
        ("<think>```python\nprint(0)\n```</think>print(3)", {}, "print(3)"),
        ("I do not know.", {}, ""),
        ("```python\nprint(1)", {}, ""),
        ("```python\ndef f(x):\n    return math.pi\n```", GIVEN, "import math\n\ndef f(x):\n    return math.pi\n"),
        ("```python\n    return x\n```", GIVEN, "import math\n\ndef f(x):\n    return x\n"),
        ("```python\nclass Solution:\n    def f(self):\n        return 1\n```",
         {"function": "f", "starter": "class Solution:\n    def f(self) -> int:\n        "},
         "class Solution:\n    def f(self):\n        return 1\n"),
    ],
    ids=["block", "tagged", "last", "output", "thinking", "prose", "cut off", "imports", "goes on", "method"],
)  # fmt: skip
def test_the_program_of_an_answer(text, gold, program):
    found = program_of(text, gold)
    assert [line for line in found.split("\n") if line.strip()] == [line for line in program.split("\n") if line.strip()]


def livecodebench(tmp_path, **more):
    case = [{"input": "2", "output": "4", "testtype": "stdin"}, {"input": "3", "output": "6", "testtype": "stdin"}]
    rows = [
        {"question_id": f"q{day}", "question_content": "Double it.", "public_test_cases": json.dumps(case),
         "difficulty": "easy" if day < 3 else "hard", "contest_date": f"2025-01-0{day}T00:00:00"} | more
        for day in range(1, 5)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def test_livecodebench_is_cut_by_date_and_told_by_difficulty_with_its_pass_rate(tmp_path):
    path = str(livecodebench(tmp_path))
    settings = {"kind": "code", "path": path, "since": "2025-01-02", "until": "2025-01-04", "judge": {"workers": 1}}
    task = make_task("l", settings, SAMPLING)
    assert [item.id for item in task.items()] == ["q2", "q3"]
    half = "```python\nprint(4)\n```"  # right on one test of two
    asker = ScriptedAsker(lambda messages, tools: half)
    told = task.summarise(attempts(task, asker))
    assert told["pass@1"] == 0 and told["pass_rate"] == 0.5 and told["pass@1_easy"] == told["pass@1_hard"] == 0
    asker = ScriptedAsker(lambda messages, tools: "```python\nprint(2 * int(input()))\n```")
    assert task.summarise(attempts(task, asker))["pass@1_hard"] == 1


def test_a_contest_counts_solved_problems_and_points(tmp_path):
    rows = [
        {"id": name, "prompt": name, "tests": [{"stdin": "", "stdout": out}], "contest": "488", "points": points}
        for name, out, points in (("a", "1", 3), ("b", "2", 5))
    ]  # fmt: skip
    rows.append({"id": "c", "prompt": "c", "tests": [{"stdin": "", "stdout": "1"}], "contest": "489", "points": 7})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"kind": "code", "path": str(tmp_path / "rows.jsonl"), "contest": "488", "judge": {"workers": 1}}
    task = make_task("weekly", settings, SAMPLING)
    told = task.summarise(attempts(task, ScriptedAsker(lambda messages, tools: "```python\nprint(1)\n```")))
    assert (told["contest_solved"], told["contest_problems"]) == (1, 2)
    assert (told["contest_points"], told["contest_points_most"]) == (3, 8)
