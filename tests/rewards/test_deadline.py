"""Case 24: what hangs gets a verdict at its deadline, the others go on, and the log says what is waited for."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_nb.config import build
from megatron_nb.rewards.reward import RewardConfig, build_reward
from tests.rewards.made_groups import group_of

KIND = "tests.rewards.own_rewards.ByText"


@pytest.fixture(scope="module")
def reward():
    """With three workers that have started: what a start takes on a busy machine is not counted against a deadline."""
    terms = {"mine": {"kind": KIND, "timeout_s": 1.5}}
    made = build_reward(build(RewardConfig, {"terms": terms, "workers": 3, "retries": 1}), None, "cpu")
    warm(made)
    yield made
    made.close()


def warm(reward):
    async def started():
        workers, target = reward._workers, reward.terms["mine"]._pickled
        group = group_of("ok 0")
        calls = [workers.call(target, 60, 0, group.prompt, group.rollouts[0]) for _ in range(30)]
        await asyncio.gather(*calls)

    asyncio.run(started())


def is_gone(pid: int) -> bool:
    """Whether the process ends within seconds; one that only its new parent has yet to collect has ended."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def timed(reward, *texts):
    """(scores, seconds until each was known)"""

    async def each(text):
        began = time.monotonic()
        (score,) = await reward.score(group_of(text, group_id=text))
        return score, time.monotonic() - began

    async def together():
        return await asyncio.gather(*map(each, texts))

    return zip(*asyncio.run(together()))


@pytest.mark.parametrize("hang", ["loop", "regex", "sleep"])
def test_a_scorer_that_hangs_is_invalid_by_its_deadline_and_the_others_are_not_held_up(reward, hang, caplog):
    warm(reward)
    with caplog.at_level(logging.WARNING):
        scores, seconds = timed(reward, hang, *[f"ok {i}" for i in range(6)])
    assert scores[0].reward is None and scores[0].reason.startswith("mine: TimeoutError: no answer in 1.5 s; its worker")
    assert 1.5 <= seconds[0] < 2.5
    assert [score.reward for score in scores[1:]] == [0, 1, 2, 3, 4, 5] and max(seconds[1:]) < 1.5
    assert f"reward.terms.mine: waiting for {hang}/0 since" in caplog.text


def test_what_is_killed_is_gone_from_the_machine(reward):
    warm(reward)
    before = {worker.process.pid for worker in reward._workers._idle}
    timed(reward, "sleep")  # it ignores SIGTERM
    killed = before - {worker.process.pid for worker in reward._workers._idle}
    assert len(killed) == 1
    assert is_gone(killed.pop())


def test_what_it_has_started_is_killed_with_it(reward, tmp_path):
    warm(reward)
    timed(reward, f"child {tmp_path / 'pid'}")
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_lost_worker_is_replaced_a_bounded_number_of_times(reward):
    scores, _ = timed(reward, "lost", "ok 5")
    assert scores[0].reward is None and "mine: WorkerLost: its worker process was lost (exit code -9)" in scores[0].reason
    assert scores[1].reward == 5.0


def test_a_worker_that_was_lost_while_idle_costs_nothing(reward, caplog):
    warm(reward)
    for worker in list(reward._workers._idle):
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.join()
    scores, _ = timed(reward, "ok 1", "ok 2")
    assert [score.reward for score in scores] == [1.0, 2.0] and "was lost while idle" in caplog.text


def test_a_coroutine_that_ignores_its_cancellation_is_invalid_by_its_deadline():
    terms = {"mine": {"kind": KIND + "Async", "timeout_s": 0.5}}
    reward = build_reward(build(RewardConfig, {"terms": terms}), None, "cpu")

    async def both():
        began = time.monotonic()
        scores = await reward.score(group_of("sleep", "ok 2"))
        took = time.monotonic() - began
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the second time it obeys
        return scores, took

    scores, took = asyncio.run(both())
    assert scores[0].reason == "mine: TimeoutError: no answer in 0.5 s" and scores[1].reward == 2.0
    assert took < 1.5


def test_the_rewards_of_a_job_that_is_killed_leave_no_worker(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import asyncio\n"
        "from tests.rewards.made_groups import group_of, build, RewardConfig, build_reward\n"
        "if __name__ == '__main__':\n"
        f"    reward = build_reward(build(RewardConfig, {{'terms': {{'a': {{'kind': '{KIND}'}}}}}}), None, 'cpu')\n"
        "    asyncio.run(reward.score(group_of('ok 1')))\n"
        "    print(reward._workers._idle[0].process.pid, flush=True)\n"
        "    asyncio.run(reward.score(group_of('loop')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    job = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(job.stdout.readline())
    job.kill()
    job.wait()
    assert is_gone(worker), "the worker outlived its job"
