"""What the tests of the agent share: an engine that plays a script, pages to search in, prompts, and checks of rows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from megatron_nb.data.prompts import prompt_ids
from megatron_nb.records import Conversation, Prompt, Rollout
from megatron_nb.rollout.agent import Agent, AgentConfig, episode
from megatron_nb.rollout.calls import Call, describe, write
from megatron_nb.rollout.context_policy import REQUEST
from megatron_nb.rollout.engine import Completion, Request, Sampling, Stop
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import SCHEMAS, ToolLimits, ToolsConfig
from tests.data.data_tokenizers import tiny

PATIENT = ToolLimits(pause_s=0.0, retries=2)


@dataclass(frozen=True)
class Hit:
    title: str
    snippet: str
    score: float = 0.0


class Pages:
    """A Search over a few pages. broken: queries that raise what they are mapped to."""

    def __init__(self, pages: dict[str, str] | None = None, broken: dict[str, Exception] | None = None):
        self.pages = pages if pages is not None else {"Loire": "The Loire is a river.\n\nIt ends in the Atlantic."}
        self.broken, self.asked = broken or {}, []

    async def search(self, query: str, k: int) -> list[Hit]:
        self.asked.append(query)
        if query in self.broken:
            raise self.broken[query]
        return [Hit(title, text[:80]) for title, text in self.pages.items()][:k]

    async def page(self, title: str) -> str | None:
        self.asked.append(title)
        return self.pages.get(title)


class ScriptedEngine:
    """Says what it is told, turn by turn; a turn is a text, or ids. Keeps copies of what it was given.

    A turn is cut at what the request permits. summaries: said, instead of the next turn, when one is asked for; the last
    one again and again.
    """

    version = 0

    def __init__(self, turns, end: int, tokenizer=None, summaries=()):
        self.turns, self.end, self.tokenizer, self.summaries = list(turns), end, tokenizer, list(summaries)
        self.requests: list[Request] = []
        self.saw: list[list[int]] = []
        self.ended: list[str] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.saw.append(list(request.ids))
        if self.summaries and REQUEST in self.tokenizer.decode(request.ids[-len(REQUEST) :]):
            turn = self.summaries.pop(0) if len(self.summaries) > 1 else self.summaries[0]
        else:
            turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        ids = self.tokenizer(turn, add_special_tokens=False).input_ids if isinstance(turn, str) else list(turn)
        ids, stop = [*ids, self.end], Stop.EOS
        if len(ids) > request.sampling.max_tokens:
            ids, stop = ids[: request.sampling.max_tokens], Stop.LENGTH
        number = len(self.requests)
        return Completion(ids, [-number - place / 1024 for place in range(len(ids))], [number] * len(ids), stop)

    async def abort(self, request_id: str) -> None: ...

    async def end_session(self, session: str) -> None:
        self.ended.append(session)


def call(name: str = "search", wire: str = "hermes", **arguments) -> str:
    return write(Call(name, arguments or {"query": "river"}, ""), wire)


def prompt_of(tokenizer, wire: str = "hermes", text: str = "Where does it end?", keep_all_think: bool = False) -> Prompt:
    from megatron_nb.data.turns import Template

    schemas = [SCHEMAS[name] for name in ("search", "open_page")]
    messages = [{"role": "user", "content": text}]
    if wire == "mcp":
        messages.insert(0, {"role": "system", "content": describe(schemas, wire)})
    conversation = Conversation(messages, "q", "s", schemas if wire == "hermes" else None)
    return Prompt(conversation, prompt_ids(conversation, Template(tokenizer, keep_all_think)))


def agent_of(tokenizer=None, search: Pages | None = None, keep_all_think: bool = False, tools: dict | None = None, **settings):
    tokenizer = tokenizer or tiny()
    names = {"names": ["search", "open_page", "find_in_page"], "limits": dict.fromkeys(("search", "open_page"), PATIENT)}
    config = AgentConfig(**settings, tools=ToolsConfig(**names | (tools or {})))
    return Agent(config, tokenizer, Toolbox(config.tools, tokenizer, search or Pages()), keep_all_think)


def play(agent: Agent, turns, prompt: Prompt | None = None, max_tokens: int = 4096, trace=None, summaries=()):
    """(engine, rows) of one episode."""
    wire = agent.config.wire
    engine = ScriptedEngine(turns, agent.frame.end, agent.tokenizer, summaries)
    work = episode(
        engine, prompt or prompt_of(agent.tokenizer, wire), Sampling(max_tokens, stop_ids=(agent.frame.end,)),
        group_id="g", index=0, seed=7, tokenizer=agent.tokenizer, agent=agent, trace=trace,
    )  # fmt: skip
    return engine, asyncio.run(work)


def check_rows(engine: ScriptedEngine, rows: list[Rollout], max_tokens: int = 262144) -> None:
    """Rows are what the engine saw and said: equal lengths, an exact prefix or a new row, every sampled token once."""
    seen = iter(engine.saw)
    sampled, said = [], 0
    for number, row in enumerate(rows):
        assert row.segment == number and (row.group_id, row.index) == ("g", 0) and row.status == rows[-1].status
        streams = (row.ids, row.sampled_mask, row.logprob, row.weight_version, row.turn_id)
        assert len({len(stream) for stream in streams}) == 1
        whole = row.prompt_ids + row.ids
        assert len(whole) <= max_tokens
        at = 0
        for place, turn in enumerate(row.turns):
            assert turn.start == at and turn.stop >= turn.start
            at = turn.stop
            span = slice(turn.start, turn.stop)
            assert set(row.turn_id[span]) <= {place} and set(row.sampled_mask[span]) <= {turn.kind == "assistant"}
            if turn.kind == "assistant":
                said += 1
                assert next(seen) == whole[: len(row.prompt_ids) + turn.start], "the engine saw exactly this prefix"
                assert row.logprob[span] == [-said - i / 1024 for i in range(turn.stop - turn.start)]
                assert set(row.weight_version[span]) <= {said}
                sampled.append(row.ids[span])
            else:
                assert set(row.logprob[span]) <= {0.0} and set(row.weight_version[span]) <= {-1}
        assert at == len(row.ids)
    assert next(seen, None) is None and engine.ended == ["g/0"]
