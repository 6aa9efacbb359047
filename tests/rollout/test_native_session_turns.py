"""600 turns in one session of the native engine, at both extremes of what an agent keeps in its context."""

import time
from pathlib import Path
from statistics import median

import pytest

from megatron_nb.rollout.engine import Request, Sampling
from tests.model.hf_folders import save_random
from tests.rollout.native_setup import engine_of, prompts_of
from tests.rollout.test_native_session import TEMPERATURE, Stream, gap, read, trainer_of

# isort: split
import megatron.core.inference.inference_request as core_requests  # the CPU layer is installed by now

TURNS, LAST, GONE = 600, 3, [5]  # tool results that a restarting context keeps, and what stands for the others
SAMPLING = Sampling(2, temperature=TEMPERATURE)


class Watch:
    """Seconds of CPU of each turn outside the model."""

    def __init__(self, engine):
        self.model, self.turns = 0.0, []
        wrapped = engine.core.controller.inference_wrapped_model
        forward = wrapped._forward

        def timed(*args):
            began = time.thread_time()
            result = forward(*args)
            self.model += time.thread_time() - began
            return result

        wrapped._forward = timed

    def begin(self) -> None:
        self.model, self._began = 0.0, time.thread_time()

    def end(self) -> None:
        self.turns.append(time.thread_time() - self._began - self.model)


def _row(prompt: list[int], turns: list[tuple[list[int], list[float], list[int]]]) -> Stream:
    """The context after `turns` of (sampled ids, log-probs, tool result) with the last results in it."""
    row = Stream("s", prompt)
    for number, (ids, logprobs, result) in enumerate(turns):
        row.add(ids, logprobs)
        row.add(result if number >= len(turns) - LAST else GONE)
    return row


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


def _talk(folder: Path, restarting: bool):
    engine, source = engine_of(folder)
    hashed, hashes = [], core_requests.compute_block_hashes_batched
    core_requests.compute_block_hashes_batched = lambda ids, size: hashed.append(len(ids)) or hashes(ids, size)
    trainer, watch = trainer_of(engine, source), Watch(engine)
    prompt = prompts_of([20])[0]
    results = prompts_of([3] * TURNS, seed=1)
    stream, done, rows = Stream("s", prompt), [], []
    appended, held = 0, []

    async def main():
        nonlocal stream, appended, held
        for turn in range(TURNS):
            if restarting:
                stream = _row(prompt, done)
            elif turn:
                stream.add(results[turn - 1])
            appended += len(stream.ids) - _shared(held, stream.ids)
            watch.begin()
            completion = await engine.generate(Request(str(turn), stream.ids, SAMPLING, 7, "s"))
            watch.end()
            stream.add(completion.ids, completion.logprobs)
            appended, held = appended + len(completion.ids) - 1, stream.ids[:-1]
            done.append((completion.ids, completion.logprobs, results[turn]))
            if turn % 100 == 99:
                rows.append(stream)

    engine.run(main)
    if not restarting:
        assert appended == len(stream.ids) - 1 == 20 + TURNS * 5 - 3 - 1
    assert read(engine) == appended, engine.stats
    assert engine.stats.lost == 0
    core_requests.compute_block_hashes_batched = hashes
    assert hashed == [20]  # the first turn's prompt, which others may share; no history is hashed again
    if restarting:  # what an earlier row sampled, this row only repeats
        for row in rows:
            row.sampled = [False] * (len(row.ids) - 2) + [True] * 2
    assert max(gap(trainer, [row]) for row in rows[-1:] + rows * restarting) < 1e-3
    return median(watch.turns[5:105]), median(watch.turns[-100:])


@pytest.mark.parametrize("restarting", [False, True], ids=["keep-everything", "keep-last"])
def test_600_turns_read_every_id_once_and_bookkeeping_does_not_grow(ranks, tmp_path, restarting):
    ((first, last),) = ranks.run(1, _talk, save_random(tmp_path, "llama", context=4096), restarting)
    print(f"CPU outside the model: {first * 1e3:.2f} ms a turn at first, {last * 1e3:.2f} ms at last")
    assert last < 2 * first  # other work on the machine makes it vary by a third
