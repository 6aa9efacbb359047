"""One turn of the model, sampled by an engine, across aborts.

A completion that was aborted (by a weight update, say) goes on from where it stopped, and every token keeps the version of
the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_nb.rollout.engine import Completion, Engine, Request, Sampling, Stop
from megatron_nb.rollout.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ABORT_S = 5.0  # an engine that hangs may not answer an abort either
WAIT_S = 0.05  # before asking again an engine that is taking new weights


def seed_of(*parts: int | str) -> int:
    """The seed that these parts decide, on every machine and for ever: 48 bits, exact in every reader of JSON."""
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=6).digest())


async def sample_turn(
    engine: Engine, rows: Rows, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, shared: bool = False
) -> Stop:  # fmt: skip
    """Sample one assistant turn of at most sampling.max_tokens after what `rows` hold, and append it there.

    shared: the engine is given the growing list of ids itself, and the name of its session, so that a turn costs its new ids.
    """
    number, row, part = rows.begin(), rows.row, 0
    start = len(row.ids)
    while True:
        # the same seed again would spend the same random numbers on later tokens
        seed = row.seed if (number, part) == (1, 0) else seed_of(row.seed, number, part)
        left = sampling.max_tokens - (len(row.ids) - start)
        name = f"{row.rollout_id}/{number - 1}.{part}"
        ids, session = (rows.ids, row.rollout_id) if shared else (list(rows.ids), None)
        completion = await _generate(engine, Request(name, ids, replace(sampling, max_tokens=left), seed, session))
        rows.sampled(completion)
        if completion.stop is not Stop.ABORT:
            break
        if not completion.ids:
            await asyncio.sleep(WAIT_S)
        part += 1
        if len(row.ids) - start == sampling.max_tokens:
            completion = replace(completion, stop=Stop.LENGTH)
            break
    turn, answer = row.turns[-1], row.ids[start:]
    turn.stop, turn.status = len(row.ids), completion.stop.value
    row.text = tokenizer.decode(answer[:-1] if completion.stop is Stop.EOS else answer)
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


async def end_session(engine: Engine, session: str) -> None:
    """Tell the engine that a stream is over; what goes wrong there is logged."""
    try:
        async with asyncio.timeout(ABORT_S):
            await engine.end_session(session)
    except Exception as error:  # what is kept for it goes when room is needed
        log.warning("the session %s was not ended: %s", session, error)
