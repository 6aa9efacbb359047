"""One episode: what the engine sampled is what the rollout holds, across aborts too."""

import asyncio

import pytest

from megatron_nb.records import Conversation, Prompt
from megatron_nb.rollout.agent import episode, seed_of
from megatron_nb.rollout.engine import Completion, Sampling, Stop
from tests.data.data_tokenizers import tiny
from tests.rollout.agent_setup import agent_of, call, prompt_of

TOKENIZER = tiny()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PROMPT = Prompt(Conversation([{"role": "user", "content": "say"}], "p", "s"), TOKENIZER("say").input_ids)
SAID = TOKENIZER("some words of an answer").input_ids


class Script:
    """An engine that plays what it is given."""

    def __init__(self, *parts):
        self.parts, self.requests, self.aborted = list(parts), [], []

    async def generate(self, request):
        self.requests.append(request)
        ids, version, stop = self.parts.pop(0)
        if stop is None:
            await asyncio.sleep(3600)
        return Completion(ids, [-0.5] * len(ids), [version] * len(ids), stop)

    async def abort(self, request_id):
        self.aborted.append(request_id)


def play(*parts, max_tokens=20):
    engine = Script(*parts)
    work = episode(engine, PROMPT, Sampling(max_tokens, stop_ids=(END,)), group_id="g", index=3, seed=11, tokenizer=TOKENIZER)
    return engine, asyncio.run(work)[0]


def test_an_answer_is_kept_as_its_ids_and_its_text_has_no_end_of_turn():
    engine, rollout = play(([*SAID, END], 4, Stop.EOS))
    assert rollout.ids == [*SAID, END] and rollout.text == "some words of an answer" and rollout.status == "done"
    assert rollout.weight_version == [4] * len(rollout.ids) and rollout.sampled_mask == [True] * len(rollout.ids)
    (turn,) = rollout.turns
    assert (turn.start, turn.stop, turn.kind, turn.status) == (0, len(rollout.ids), "assistant", "eos")
    assert (engine.requests[0].ids, engine.requests[0].seed) == (PROMPT.ids, 11)
    assert rollout.sampling == {"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_ids": [END]}


def test_an_answer_that_meets_its_cap_ends_by_length_and_keeps_its_last_token_in_the_text():
    _, rollout = play((SAID, 0, Stop.LENGTH), max_tokens=len(SAID))
    assert rollout.status == "length" and rollout.text == "some words of an answer"


def test_an_aborted_answer_goes_on_with_its_prefix_and_every_token_has_its_version():
    aborted = [(SAID[:2], 4, Stop.ABORT), ([], 4, Stop.ABORT), (SAID[2:3], 5, Stop.ABORT)]
    engine, rollout = play(*aborted, ([*SAID[3:], END], 6, Stop.EOS))
    assert rollout.ids == [*SAID, END] and rollout.status == "done" and len(rollout.turns) == 1
    assert rollout.weight_version == [4, 4, 5] + [6] * (len(SAID) - 2)
    lengths = [len(request.ids) - len(PROMPT.ids) for request in engine.requests]
    assert lengths == [0, 2, 2, 3] and [request.sampling.max_tokens for request in engine.requests] == [20, 18, 18, 17]
    assert len({request.seed for request in engine.requests}) == 4  # the same seed would spend the same random numbers again
    assert len({request.request_id for request in engine.requests}) == 4


def test_an_abort_at_the_cap_asks_for_nothing_more():
    engine, rollout = play((SAID, 1, Stop.ABORT), max_tokens=len(SAID))
    assert rollout.status == "length" and rollout.turns[0].status == "length" and len(engine.requests) == 1


def test_a_cancelled_episode_aborts_its_request():
    engine = Script(([], 0, None))

    async def main():
        work = episode(engine, PROMPT, Sampling(5), group_id="g", index=0, seed=1, tokenizer=TOKENIZER)
        async with asyncio.timeout(0.05):
            await work

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert engine.aborted == [engine.requests[0].request_id]


def test_seeds_are_fixed_for_ever_and_their_parts_do_not_run_together():
    assert seed_of(1234, 7, 3, "source", "row-1", 0) == SEED and seed_of("a", "bc") != seed_of("ab", "c")


SEED = 204456241673900


class Sessions(Script):
    """Also notes the sessions that were ended, and how many ids it was given."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.lengths, self.ended = [], []

    async def generate(self, request):
        self.lengths.append(len(request.ids))
        return await super().generate(request)

    async def end_session(self, session):
        self.ended.append(session)


def test_an_aborted_turn_of_an_agent_goes_on_within_its_turn_and_session():
    agent, said = agent_of(TOKENIZER), [*TOKENIZER(call()).input_ids, END]
    prompt, parts = prompt_of(TOKENIZER), [(said[:3], 4, Stop.ABORT), ([], 5, Stop.ABORT), (said[3:], 6, Stop.EOS)]
    engine = Sessions(*parts, ([*SAID, END], 6, Stop.EOS))
    names = {"group_id": "g", "index": 3, "seed": 11, "tokenizer": TOKENIZER, "agent": agent}
    (row,) = asyncio.run(episode(engine, prompt, Sampling(200, stop_ids=(END,)), **names))
    assert row.status == "done" and row.text == "some words of an answer" and [turn.calls for turn in row.turns] == [1, 0, 0]
    assert row.ids[: len(said)] == said and row.weight_version[: len(said)] == [4] * 3 + [6] * (len(said) - 3)
    start, before = len(prompt.ids), row.turns[2].start
    assert engine.lengths == [start, start + 3, start + 3, start + before] and len({r.seed for r in engine.requests}) == 4
    assert {r.session for r in engine.requests} == {"g/3"} and engine.ended == ["g/3"]


def test_an_engine_out_of_reach_ends_the_session_and_is_told_in_the_trace():
    engine, notes = Sessions(), []
    engine.generate = lambda request: (_ for _ in ()).throw(OSError("gone"))
    names = {"group_id": "g", "index": 0, "seed": 1, "tokenizer": TOKENIZER, "agent": agent_of(TOKENIZER)}
    with pytest.raises(OSError, match="gone"):
        asyncio.run(episode(engine, prompt_of(TOKENIZER), Sampling(5), **names, trace=notes.append))
    assert engine.ended == ["g/0"] and notes[0]["status"] == "invalid" and "gone" in notes[0]["reason"]


def test_an_agent_that_is_cancelled_is_traced_as_stopped():
    engine, notes = Sessions(([], 0, None)), []
    names = {"group_id": "g", "index": 0, "seed": 1, "tokenizer": TOKENIZER, "agent": agent_of(TOKENIZER)}

    async def main():
        async with asyncio.timeout(0.05):
            await episode(engine, prompt_of(TOKENIZER), Sampling(5), **names, trace=notes.append)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert notes[0]["status"] == "stopped" and engine.aborted and engine.ended == ["g/0"]
