"""One episode: a prompt, turns sampled by the engine, a Rollout. Single-turn RL is an agent without tools.

Ids are never decoded and encoded again: what was sampled is what is trained. A completion that was aborted (by a weight
update, say) goes on from where it stopped, and every token keeps the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from megatron_nb.records import Prompt, Rollout, Score, Turn
from megatron_nb.rollout.engine import Completion, Engine, Request, Sampling, Stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ABORT_S = 5.0  # an engine that hangs may not answer an abort either
WAIT_S = 0.05  # before asking again an engine that is taking new weights


def seed_of(*parts: int | str) -> int:
    """The seed that these parts decide, on every machine and for ever: 48 bits, exact in every reader of JSON."""
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=6).digest())


async def episode(
    engine: Engine, prompt: Prompt, sampling: Sampling, *, group_id: str, index: int, seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:  # fmt: skip
    """Sample one answer to `prompt`. Errors of the engine pass through; a cancelled episode aborts its request first."""
    rollout = Rollout(
        list(prompt.ids), [], [], [], [], [], [], "length", recorded(sampling), seed, group_id, index
    )  # fmt: skip
    stop = await sample_turn(engine, rollout, sampling)
    answer = rollout.ids[rollout.turns[-1].start :]
    rollout.text = tokenizer.decode(answer[:-1] if stop is Stop.EOS else answer)
    rollout.status = "done" if stop is Stop.EOS else "length"
    return rollout


async def sample_turn(engine: Engine, rollout: Rollout, sampling: Sampling) -> Stop:
    """Sample one assistant turn of at most sampling.max_tokens after what `rollout` holds, and append it there."""
    start, part = len(rollout.ids), 0
    rollout.turns.append(Turn(start, start, "assistant"))
    while True:
        # the same seed again would spend the same random numbers on later tokens
        seed = rollout.seed if not start + part else seed_of(rollout.seed, len(rollout.turns), part)
        left = sampling.max_tokens - (len(rollout.ids) - start)
        name = f"{rollout.rollout_id}/{len(rollout.turns) - 1}.{part}"
        request = Request(name, rollout.prompt_ids + rollout.ids, replace(sampling, max_tokens=left), seed)
        completion = await _generate(engine, request)
        _append(rollout, completion)
        if completion.stop is not Stop.ABORT:
            break
        if not completion.ids:
            await asyncio.sleep(WAIT_S)
        part += 1
        if len(rollout.ids) - start == sampling.max_tokens:
            completion = replace(completion, stop=Stop.LENGTH)
            break
    rollout.turns[-1].stop, rollout.turns[-1].status = len(rollout.ids), completion.stop.value
    return completion.stop


async def _generate(engine: Engine, request: Request) -> Completion:
    try:
        return await engine.generate(request)
    except asyncio.CancelledError:  # a time-out, or the job is leaving: the engine should not go on for nobody
        try:
            async with asyncio.timeout(ABORT_S):
                await engine.abort(request.request_id)
        except Exception:
            pass
        raise


def _append(rollout: Rollout, completion: Completion) -> None:
    count = len(completion.ids)
    assert len(completion.logprobs) == len(completion.versions) == count, "an engine's completion has one value per token"
    rollout.ids += completion.ids
    rollout.logprob += completion.logprobs
    rollout.weight_version += completion.versions
    rollout.sampled_mask += [True] * count
    rollout.turn_id += [len(rollout.turns) - 1] * count


def recorded(sampling: Sampling) -> dict:
    """The sampling as it is kept with every rollout: plain JSON values."""
    return {**asdict(sampling), "stop_ids": list(sampling.stop_ids)}


def failed(prompt: Prompt, sampling: Sampling, *, group_id: str, index: int, seed: int, reason: str) -> Rollout:
    """What stands for an episode that did not come to its end: invalid, and it says why."""
    return Rollout(
        list(prompt.ids), [], [], [], [], [], [], "invalid", recorded(sampling), seed, group_id, index,
        score=Score(None, reason=reason),
    )  # fmt: skip
