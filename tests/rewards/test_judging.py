"""The way to the judge: services take over from each other, failure is no verdict, and nothing is judged twice."""

import asyncio
import json
import threading
import time

import pytest

from megatron_nb.client import RequestRefused
from megatron_nb.records import Score
from megatron_nb.rewards import judging
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig, JudgeFailed, judge_row_of, read_verdicts
from megatron_nb.sandbox.execution import Limits
from megatron_nb.sandbox.judge import Verdict
from megatron_nb.sandbox.pool import IsolationMissing
from megatron_nb.sandbox.tests import Program, Test
from tests.rewards.made_groups import group_of, scores
from tests.sandbox.running_service import Running

TESTS = [Test(stdin="1", stdout="2"), Test(call="f", args=[1, [2]], expected={"a": None}), Test(code="assert f(1) == 2")]


class Desk:
    """Work of a service that answers every row by `verdict`, notes it, and can be told to wait."""

    def __init__(self, verdict="accepted"):
        self.rows, self.verdict, self.open = [], verdict, threading.Event()
        self.open.set()

    async def __call__(self, row):
        self.rows.append(row)
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        if row["program"] == "refuse":
            raise ValueError("program is 'refuse'")
        count = len(row["tests"])
        return {"id": row["id"], "verdicts": [self.verdict] * count, "passed": count, "total": count, "cpu_s": [0.5] * count,
                "wall_s": [0.6] * count, "peak_memory_mb": [9.0] * count, "details": ["why"] * count,
                "isolation": "made up"}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("megatron_nb.sandbox.service.PROBE_S", float("inf"))
    monkeypatch.setattr(judging, "PAUSE_S", 0.05)


def config(*urls, **more):
    return JudgeConfig(list(urls), **{"retries": 2, **more})


def ask(judge, *sources, tests=TESTS, limits=None):
    async def all_of():
        return await asyncio.gather(*(judge.verdicts(Program(source), tests, limits or Limits()) for source in sources))

    return asyncio.run(all_of())


def test_verdicts_come_back_from_a_service_as_they_were_given():
    desk = Desk("wrong answer")
    with Running(desk) as one:
        ((first, *rest),) = ask(CodeJudge(config(one.url)), "x", limits=Limits(time_s=3, memory_mb=99))
    assert first == Verdict("wrong answer", 0.5, 0.6, 9.0, "why", "made up") and len(rest) == 2
    (row,) = desk.rows
    assert (row["program"], row["language"], row["time_limit_s"], row["memory_limit_mb"]) == ("x", "python", 3, 99)
    assert [Test.read(test) for test in row["tests"]] == TESTS


def test_rows_survive_json_with_values_that_json_lacks():
    odd = Test(call="f", args=[(1, 2), {3}], expected=b"x")
    row = json.loads(json.dumps(judge_row_of(Program("x", entry="f"), [odd], Limits())))
    assert Test.read(row["tests"][0]) == odd and row["entry"] == "f"


def test_what_was_judged_once_is_not_judged_again_here_nor_twice_at_the_same_time():
    desk = Desk()
    with Running(desk) as one:
        judge = CodeJudge(config(one.url))
        ask(judge, "same", "same", "same", "other")
        again = ask(judge, "same")  # from another event loop
        assert sorted(row["program"] for row in desk.rows) == ["other", "same"]
        again[0][0].verdict = "spoilt"
        assert ask(judge, "same")[0][0].verdict == "accepted"
        ask(judge, "same", limits=Limits(time_s=1))
        ask(judge, "same", tests=TESTS[:1])
        assert len(desk.rows) == 4  # other limits and other tests are other questions


def test_a_measured_class_is_kept_and_an_unknown_one_is_measured_again():
    rows, classes = [], ["unknown", "n log n", "n"]

    async def measure(row):
        rows.append(row)
        return {"id": "", "class": classes[len(rows) - 1], "confidence": 0.9, "reason": "why", "points": [[8, 100.0, 0.1]]}

    with Running(Desk(), measure) as one:
        judge = CodeJudge(config(one.url))
        found = [asyncio.run(judge.complexity("p", "f", "g")) for _ in range(3)]
    assert [estimate.complexity for estimate in found] == ["unknown", "n log n", "n log n"] and len(rows) == 2
    assert {name: rows[0][name] for name in ("program", "function", "generator")} == {"program": "p", "function": "f",
                                                                                     "generator": "g"}  # fmt: skip
    assert (found[1].confidence, found[1].reason, found[1].points) == (0.9, "why", [(8, 100.0, 0.1)])


def test_the_token_is_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with Running(Desk(), token_env="JUDGE_TOKEN") as one:
        assert ask(CodeJudge(config(one.url, token_env="JUDGE_TOKEN")), "x")
        with pytest.raises(RequestRefused, match=r"401.*check the key .\$None"):
            ask(CodeJudge(config(one.url)), "x")
    with pytest.raises(ValueError, match="ABSENT_TOKEN"):
        CodeJudge(config("http://x", token_env="ABSENT_TOKEN"))


def test_work_is_spread_over_the_services():
    desks = Desk(), Desk()
    with Running(desks[0]) as one, Running(desks[1]) as two:
        ask(CodeJudge(config(one.url, two.url)), *map(str, range(20)))
    assert len(desks[0].rows) == len(desks[1].rows) == 10


def test_a_service_that_dies_mid_batch_is_replaced_by_the_others():
    dying, well = Desk(), Desk()
    dying.open.clear()
    with Running(dying) as one, Running(well) as two:

        def die():
            while len(dying.rows) < 2:
                time.sleep(0.01)
            one.kill()

        killer = threading.Thread(target=die)
        killer.start()
        found = ask(CodeJudge(config(one.url, two.url)), *map(str, range(12)))
        killer.join()
    assert all(verdict.verdict == "accepted" for verdicts in found for verdict in verdicts)
    assert {row["program"] for row in well.rows} == set(map(str, range(12)))


def test_a_full_queue_is_waited_for_and_is_no_failure():
    desk = Desk()
    desk.open.clear()
    with Running(desk, queue=2) as one:
        threading.Timer(0.5, desk.open.set).start()
        assert len(ask(CodeJudge(config(one.url, retries=0)), *map(str, range(6)))) == 6
        desk.open.clear()
        threading.Timer(1.5, desk.open.set).start()
        with pytest.raises(JudgeFailed, match="every queue was full for patience_s=0.2"):
            ask(CodeJudge(config(one.url, patience_s=0.2)), "a", "b", "c")


def test_when_no_service_answers_it_raises_and_names_them():
    with Running(Desk()) as one:
        url = one.url
    began = time.monotonic()
    with pytest.raises(JudgeFailed, match=f"none of the judge services {url}"):
        ask(CodeJudge(config(url)), "x")
    assert time.monotonic() - began < 10


def test_many_failures_at_once_are_one_failure_of_the_service():
    with Running(Desk()) as one:
        url = one.url
    judge = CodeJudge(config(url, retries=0))

    async def many():
        asked = (judge.verdicts(Program(str(number)), TESTS, Limits()) for number in range(20))
        return await asyncio.gather(*asked, return_exceptions=True)

    assert all(isinstance(found, JudgeFailed) for found in asyncio.run(many()))
    (service,) = judge._services
    assert service.failures == 1 and service.rest_until - time.monotonic() < 0.1


def test_a_broken_sandbox_is_asked_for_elsewhere_and_never_told_as_a_verdict():
    broken, well = Desk("infrastructure"), Desk()
    with Running(broken) as one, Running(well) as two:
        judge = CodeJudge(config(one.url, two.url))
        assert all(verdicts[0].verdict == "accepted" for verdicts in ask(judge, *map(str, range(6))))
        well.verdict = "infrastructure"
        with pytest.raises(JudgeFailed, match="failed in 3 of 3 tests: why"):
            ask(judge, "new")
        assert len([row for row in broken.rows + well.rows if row["program"] == "new"]) == 2  # bounded
        broken.verdict = well.verdict = "accepted"
        assert ask(judge, "new")[0][0].verdict == "accepted"  # the failure was not kept


def test_those_who_look_for_broken_tests_are_told():
    with Running(Desk("infrastructure")) as one:
        judge = CodeJudge(config(one.url))
        found = asyncio.run(judge.verdicts(Program("x"), TESTS, Limits(), broken=True))
        assert [verdict.verdict for verdict in found] == ["infrastructure"] * 3
        with pytest.raises(JudgeFailed):
            asyncio.run(judge.check())


def test_a_wrong_row_is_not_sent_again():
    desk = Desk()
    with Running(desk) as one, pytest.raises(RequestRefused, match="program is 'refuse'"):
        ask(CodeJudge(config(one.url)), "refuse")
    assert len(desk.rows) == 1


def test_when_all_who_ask_have_gone_the_question_ends_and_not_before():
    desk = Desk()
    desk.open.clear()
    with Running(desk) as one:

        async def two_ask_and_leave():
            judge = CodeJudge(config(one.url))
            tasks = [asyncio.create_task(judge.verdicts(Program("x"), TESTS, Limits())) for _ in range(2)]
            while not desk.rows:
                await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.sleep(0.3)
            assert one.service._rows == 1  # the other still waits
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while one.service._rows:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(two_ask_and_leave(), 10))


class Passing:
    """A reward of the share of tests passed, as one's own code would write it."""

    def __init__(self, urls: list[str]):
        self.judge = CodeJudge(config(*urls, retries=0))

    async def score_rollout(self, prompt, rollout):
        verdicts = await self.judge.verdicts(Program(rollout.text), TESTS[:1], Limits())
        return Score(sum(verdict.verdict == "accepted" for verdict in verdicts) / len(verdicts))


def test_a_judge_that_is_gone_makes_rollouts_invalid_and_never_zero():
    with Running(Desk()) as one:
        terms = {"tests": {"kind": f"{__name__}.Passing", "settings": {"urls": [one.url]}}}
        assert [score.reward for score in scores(terms, group_of("a", "b"))] == [1.0, 1.0]
    found = scores(terms, group_of("a", "b"), retries=3)
    assert [score.reward for score in found] == [None, None] and "none of the judge services" in found[0].reason


def test_answers_of_another_shape_are_not_taken():
    with pytest.raises(ValueError, match="for 2 tests"):
        names = ("verdicts", "cpu_s", "wall_s", "peak_memory_mb", "details")
        read_verdicts({name: [] for name in names} | {"isolation": ""}, 2)


@pytest.mark.parametrize("settings", [{"retries": -1}, {"attempt_s": 0}, {"workers": 0}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        JudgeConfig(**settings)


def test_a_pool_here_starts_with_the_first_question_serves_every_loop_and_ends():
    judge = CodeJudge(JudgeConfig(workers=1))
    assert judge._judge is None
    increment, stdin = "def f(n):\n    return n + 1\nif __name__ == '__main__':\n    print(f(int(input())))", TESTS[0]
    called, asserted = Test(call="f", args=[1], expected=3), TESTS[2]
    try:
        for _ in range(2):  # one event loop after another
            (found,) = ask(judge, increment, tests=[stdin, called, asserted])
            assert [verdict.verdict for verdict in found] == ["accepted", "wrong answer", "accepted"], found
        asyncio.run(judge.check())
    except IsolationMissing as missing:
        pytest.skip(str(missing))
    finally:
        judge.close()
    assert judge._judge is None
