"""Episodes of many turns: the rows are what the engine saw, at every limit, under every context policy."""

import pytest

from megatron_nb.rollout.context_policy import REMOVED, REQUEST
from tests.data.data_tokenizers import tiny
from tests.rollout.agent_setup import agent_of, call, check_rows, play, prompt_of

TOKENIZER = tiny()
POLICIES = {
    "keep_all": {"context": "keep_all"},
    "keep_last_1": {"context": "keep_last", "keep_last": 1, "clear_every": 1},
    "keep_last_3": {"context": "keep_last", "keep_last": 3, "clear_every": 4},
    "summarise": {"context": "summarise", "summary_tokens": 60, "max_tokens": 1600},
}
THOUGHT = "<think>\nThe page may tell.\n</think>\n\n"


def script(agent, calls: int, answer: str = "The Atlantic.") -> list[str]:
    """So many turns that call, then the answer."""
    return [f"{THOUGHT}Look.\n{call(query=f'river {n}', wire=agent.config.wire)}" for n in range(calls)] + [answer]


def sampled_turns(rows) -> int:
    return sum(turn.kind == "assistant" for row in rows for turn in row.turns)


@pytest.mark.parametrize(("policy", "max_turns"), [("keep_all", 600), ("keep_all", 601), ("keep_last_3", 601)])
def test_the_cap_of_turns_ends_an_episode_that_still_calls_and_every_stream_is_equally_long(policy, max_turns):
    agent = agent_of(max_turns=max_turns, **POLICIES[policy])
    engine, rows = play(agent, [call(query=str(n)) for n in range(700)])
    check_rows(engine, rows)
    assert rows[-1].status == "turns" and sampled_turns(rows) == max_turns and len(engine.requests) == max_turns
    assert rows[-1].turns[-1].kind == "assistant"  # calls of the last turn are not answered


def test_an_answer_in_the_last_permitted_turn_is_an_answer():
    engine, rows = play(agent := agent_of(max_turns=600), script(agent, 599))
    check_rows(engine, rows)
    assert rows[0].status == "done" and sampled_turns(rows) == 600 and rows[0].text == "The Atlantic."


@pytest.mark.parametrize(("spare", "status"), [(0, "done"), (-1, "length"), (1, "done")])
def test_a_row_is_filled_to_its_last_token_and_not_beyond(spare, status):
    """Its last token is the 262144th. spare: tokens that are left behind it, or lacking."""
    agent = agent_of(max_tokens=262144)
    said = TOKENIZER(call()).input_ids
    engine, rows = play(agent, [said, said, "x"], max_tokens=300_000)
    used = len(rows[0].prompt_ids) + len(rows[0].ids) - 2  # without "x" and its end
    last = [TOKENIZER("x").input_ids[0]] * (262144 - used - 1 - spare)
    engine, rows = play(agent, [said, said, last], max_tokens=300_000)
    check_rows(engine, rows)
    assert rows[0].status == status and len(rows[0].prompt_ids) + len(rows[0].ids) == min(262144 - spare, 262144)
    assert engine.requests[-1].sampling.max_tokens == 262144 - used  # min(turn cap, what is left)


@pytest.mark.parametrize("spare", [0, 1])
def test_results_that_leave_no_token_for_a_turn_end_the_episode_by_length_before_them(spare):
    _, whole = play(agent_of(), [call(), "x"])
    until = len(whole[0].prompt_ids) + whole[0].turns[2].start  # the second turn would begin here
    engine, rows = play(agent_of(max_tokens=until + spare), [call(), "x"])
    check_rows(engine, rows, until + spare)
    assert rows[0].status == "length" and len(rows[0].turns) == (3 if spare else 1)


def test_a_turn_that_meets_its_cap_ends_by_length():
    engine, rows = play(agent_of(), [call(), "a long answer " * 40], max_tokens=100)
    check_rows(engine, rows)
    assert rows[0].status == "length" and rows[0].turns[-1].status == "length"
    assert [request.sampling.max_tokens for request in engine.requests] == [100, 100]


@pytest.mark.parametrize("wire", ["hermes", "mcp"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_an_exact_prefix_or_begins_a_row(policy, wire):
    agent = agent_of(wire=wire, thinking="keep", **POLICIES[policy])
    limit = agent.config.max_tokens
    engine, rows = play(agent, script(agent, 24), max_tokens=240, summaries=[f"{THOUGHT}Found nothing yet."])
    check_rows(engine, rows, limit)
    assert rows[-1].status == "done" and (len(rows) == 1) == (policy == "keep_all")
    text = TOKENIZER.decode(rows[-1].prompt_ids + rows[-1].ids)
    if policy == "keep_last_1":
        assert len(rows) == 24 and text.count(REMOVED) == 23 and text.count("It ends in the Atlantic") == 1
    if policy == "keep_last_3":
        assert 3 <= text.count("It ends in the Atlantic") <= 3 + 4
    if policy == "summarise":
        assert len(rows) > 3 and text.count("Found nothing yet.") == 1
    assert text.count("Where does it end?") == 1 and rows[-1].text == "The Atlantic."


def test_removed_results_are_those_of_the_oldest_calls_also_within_a_turn():
    agent = agent_of(context="keep_last", keep_last=3, clear_every=1)
    turns = [call(query="a") + call(query="b") + call(query="c"), call(query="d"), call(query="e"), "Done."]
    engine, rows = play(agent, turns)
    check_rows(engine, rows)
    text = TOKENIZER.decode(rows[-1].prompt_ids + rows[-1].ids)
    first, second, third = text.split("<|im_start|>user\n")[2:]
    assert (first.count(REMOVED), first.count("[1] Loire"), second.count("[1] Loire"), third.count("[1] Loire")) == (2, 1, 1, 1)


def test_the_model_is_asked_for_the_summary_which_is_trained_and_all_that_the_next_row_has():
    agent = agent_of(context="summarise", summary_tokens=100, max_tokens=1200)
    summary = f"{THOUGHT}Loire is a river <|im_end|> </tool_response> <tool_call>. Next: open its page."
    turns = [call(query="river one"), call(query="river two"), call(query="river three"), "The Atlantic."]
    engine, rows = play(agent, turns, max_tokens=80, summaries=[summary])
    check_rows(engine, rows, 1200)
    assert [row.status for row in rows] == ["done", "done"] and rows[0].turns[-1].kind == "assistant"
    start, stop = rows[0].turns[-1].start, rows[0].turns[-1].stop
    assert TOKENIZER.decode(rows[0].ids[start : stop - 1]) == summary and all(rows[0].sampled_mask[start:stop])
    assert TOKENIZER.decode(rows[0].ids).count(REQUEST) == 1
    told = TOKENIZER.decode(rows[1].prompt_ids)
    kept = "Loire is a river < |im_end|> < /tool_response> < tool_call>."
    assert f"Where does it end?\n\nSummary of the work so far:\n{kept}" in told
    assert "The page may tell" not in told and "river one" not in told
    assert rows[1].prompt_ids.count(agent.frame.end) == prompt_of(TOKENIZER).ids.count(agent.frame.end)


def test_a_second_summary_takes_the_place_of_the_first():
    agent = agent_of(context="summarise", summary_tokens=60, max_tokens=1000)
    turns = [call(query="one"), call(query="two"), call(query="three"), "The Atlantic."]
    engine, rows = play(agent, turns, max_tokens=80, summaries=["First summary.", "Second summary."])
    check_rows(engine, rows, 1000)
    told = TOKENIZER.decode(rows[-1].prompt_ids)
    assert rows[-1].status == "done" and "Second summary." in told and "First summary." not in told


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_ids_that_no_tokenizer_would_write_survive_unchanged(policy):
    """One id a byte: tokenising the decoded text again would give fewer."""
    agent = agent_of(**POLICIES[policy])
    spelled = [id_ for letter in call(query="aa bb") for id_ in TOKENIZER(letter).input_ids]
    assert spelled != TOKENIZER(call(query="aa bb")).input_ids
    turns = [spelled, spelled, spelled, spelled, spelled, "The Atlantic."]
    engine, rows = play(agent, turns, max_tokens=len(spelled) + 40, summaries=["Nothing."])
    check_rows(engine, rows, agent.config.max_tokens)
    said = [row.ids[turn.start : turn.stop - 1] for row in rows for turn in row.turns if turn.kind == "assistant"]
    assert said.count(spelled) == 5 and rows[-1].status == "done"
    for row in rows if policy != "summarise" else ():  # and as the context of later rows
        earlier = sum(turn.kind == "assistant" for other in rows[: row.segment] for turn in other.turns)
        text = ",".join(map(str, row.prompt_ids))
        assert text.count(",".join(map(str, spelled))) == earlier


def test_prompts_that_leave_no_room_are_refused_by_name():
    with pytest.raises(ValueError, match="leaves no room for a turn in agent.max_tokens=300"):
        play(agent_of(max_tokens=300), ["x"])
