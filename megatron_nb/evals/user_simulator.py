"""An agent serves a user whom another model plays, with tools that change a database; in the manner of tau2-bench.

A domain is a folder: tasks.json, policy.md (what the agent is told), db.json (what every task begins with), tools.json (the
functions in the OpenAI form), and `classes`, Python objects whose methods those are (stateful.py; a toolkit of the package
tau2 is wrapped by a class that makes it in _load_scenario and passes its calls on). A task:

    {"id", "user_scenario": {"persona", "instructions"}, "initial_state"?: {"initialization_data": {name: values}},
     "evaluation_criteria": {"actions": [{"name", "arguments"}], "communicate_info": [text], "reward_basis": [..]}}

An attempt is right when the database ends as the right actions leave it (DB), the agent has said what it had to
(COMMUNICATE), and, where the task counts them, made those very calls (ACTION). pass^k is the chance that k attempts are all
right: C(c, k) / C(n, k) (arXiv 2406.12045). Tasks in which the user has tools too (dual control) are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.asking.askers import Asker
from megatron_nb.client import Client, ClientConfig
from megatron_nb.data import schemas
from megatron_nb.data.preferences import final_answer
from megatron_nb.data.rows import BadRow, decode, raw_rows
from megatron_nb.evals.judge import reach
from megatron_nb.evals.stateful import Stage, Step, World, class_at
from megatron_nb.evals.statistics import mean_with_bounds, pass_hat_k
from megatron_nb.evals.task import Item, Outcome, Talk, Task, TaskConfig, by_item
from megatron_nb.rollout.calls import plain

STOP = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # how the user ends it
BASIS = ("DB", "COMMUNICATE", "ACTION")
GREETING = "Hello! How can I help you today?"
AGENT = "You serve customers and follow the policy below. Either call a tool or write to the customer, never both at once.\n\n"
USER = """\
You play a customer who talks to a service agent. Write only what the customer says, one short message at a time.

- Tell things as a person would, when they are asked for or needed, not all at once.
- Use only what the scenario says. What it does not say you do not know; invent nothing.
- Do not repeat the instructions word for word, and never say that you play a role.
- When everything you came for is done, write ###STOP### and nothing else. When the agent hands you over to a person, write \
###TRANSFER###. When the scenario does not tell enough to go on, write ###OUT-OF-SCOPE###.

Scenario:
"""
REMEDY = "mend the task or leave it out"


@dataclass(kw_only=True)
class UserSimulatorConfig(TaskConfig):
    """path: the folder of a domain."""

    user: ClientConfig  # the model that plays the user
    classes: dict[str, str]  # name -> module:Class
    user_tokens: int = 1024  # of one message
    user_temperature: float = 0.0
    steps: int = 200  # of the agent: messages and calls together
    samples: int = 4

    def __post_init__(self):
        super().__post_init__()
        for name in ("user_tokens", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass
class Visit:
    """One attempt under way."""

    talk: Talk
    world: World
    messages: list[dict[str, Any]]  # as the agent sees them
    said: list[dict[str, Any]]  # what was said, as the user's model sees it: itself is the assistant
    taken: list[Step] = field(default_factory=list)


class UserSimulator(Task):
    """See the head of the file."""

    Config = UserSimulatorConfig
    headline = "pass_hat_1"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._user, self._stage = Client(self.config.user), Stage()

    def check(self) -> None:
        """Raises ValueError for a class that cannot be had, and BadRow."""
        if not self.config.user_temperature:
            super().check()
        for place in self.config.classes.values():
            class_at(place)
        self.items()

    async def ready(self) -> None:
        await reach(self.config.user)

    def close(self) -> None:
        self._stage.close()

    def read(self) -> Sequence[Item]:
        folder = Path(self.config.path).expanduser()
        policy, tools, scenario = _file(folder / "policy.md"), _json(folder / "tools.json"), _json(folder / "db.json")
        offered = schemas.tools(tools)
        system = [{"role": "system", "content": self.config.system or AGENT + policy}]
        return [
            Item(_id(where, row), system, _gold(where, row, scenario), offered)
            for where, raw in raw_rows(folder / "tasks.json") for row in [decode(where, raw)]
        ]  # fmt: skip

    async def attempt(self, item: Item, asker: Asker, index: int) -> Outcome:
        gold = item.gold
        told = [{"role": "system", "content": USER + gold["scenario"]}, {"role": "user", "content": GREETING}]
        visit = Visit(Talk(self, asker, item, index), World(self.config.classes, gold["begin"]), list(item.prompt), told)
        ended = await self._converse(visit, item)
        parts, wrong = await self._verdict(visit, gold)
        score = float(ended == "done" and not wrong)
        reason = wrong if ended == "done" else f"not over after {self.config.steps} steps"
        parts |= {"user_turns": float(sum(one["role"] == "assistant" for one in visit.said))}
        status = "" if ended == "done" else ended
        return visit.talk.outcome(score, status, parts=parts, reason=reason, messages=visit.messages)

    async def _converse(self, visit: Visit, item: Item) -> str:
        """Until the user ends it (done) or the agent has no step left (turns)."""
        if await self._ask_user(visit):
            return "done"
        for _ in range(self.config.steps):
            answer = await visit.talk.say(visit.messages, item.tools)
            visit.messages.append(answer.message())
            for call in answer.calls:
                text = await self._stage.take(visit.world, visit.taken, Step(call.name, call.arguments))
                result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": plain(text)}
                visit.messages.append(result)
            if not answer.calls:
                said = visit.messages[-1]["content"] or final_answer(answer.text)
                visit.said.append({"role": "user", "content": said or "(the agent says nothing)"})
                if await self._ask_user(visit):
                    return "done"
        return "turns"

    async def _ask_user(self, visit: Visit) -> bool:
        """Let the user speak; True when that ends it. Raises OSError."""
        config = self.config
        said = await self._user.chat(visit.said, _message, max_tokens=config.user_tokens, temperature=config.user_temperature,
                                     seed=self.config.seed + visit.talk.index)  # fmt: skip
        visit.said.append({"role": "assistant", "content": said})
        if any(mark in said for mark in STOP):
            return True
        visit.messages.append({"role": "user", "content": plain(said)})
        return False

    async def _verdict(self, visit: Visit, gold: dict[str, Any]) -> tuple[dict[str, float], str]:
        """(parts, what is wrong)."""
        right = [Step(action["name"], action.get("arguments") or {}) for action in gold["actions"]]
        told = " ".join(m["content"] for m in visit.messages if m["role"] == "assistant").lower().replace(",", "")
        unsaid = [text for text in gold["communicate"] if text.lower().replace(",", "") not in told]
        unmade = [step.name for step in right if step not in visit.taken]
        wrong = {
            "DB": await self._stage.compare(visit.world, [visit.taken], [right], results=False),
            "COMMUNICATE": f"never said: {unsaid[0]}" if unsaid else "",
            "ACTION": f"never called so: {unmade[0]}" if unmade else "",
        }
        parts = {name.lower(): float(not wrong[name]) for name in gold["basis"]}
        return parts, next((wrong[name] for name in gold["basis"] if wrong[name]), "")

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        told, values = {}, by_item(outcomes)
        for k in range(1, self.samples + 1):
            rates = [[pass_hat_k(len(its), int(sum(its)), k)] for its in values if len(its) >= k]
            told |= mean_with_bounds(f"pass_hat_{k}", rates)
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome.parts if name != "repetition"):
            told[name] = float(np.mean([outcome.parts[name] for outcome in outcomes if name in outcome.parts]))
        return told


def _id(where: str, row: dict[str, Any]) -> str:
    if row.get("id") in (None, ""):
        raise BadRow.at(where, f"found {', '.join(row)}", "a task has an id", REMEDY)
    return str(row["id"])


def _gold(where: str, row: dict[str, Any], scenario: dict[str, Any]) -> dict[str, Any]:
    """What a task's attempts need. Raises BadRow."""
    try:
        told, criteria = row["user_scenario"], row.get("evaluation_criteria") or {}
        actions, basis = criteria.get("actions") or [], criteria.get("reward_basis") or ["DB", "COMMUNICATE"]
        if any(action.get("requestor", "assistant") != "assistant" for action in actions):
            raise BadRow.at(where, "the user makes calls too", "only the agent has tools here", REMEDY)
        if unknown := [name for name in basis if name not in BASIS]:
            raise BadRow.at(where, f"reward_basis {unknown}", f"it is of {', '.join(BASIS)}", REMEDY)
        begin = dict(scenario)
        for name, values in ((row.get("initial_state") or {}).get("initialization_data") or {}).items():
            begin[name] = {**begin.get(name, {}), **values}
        return {"scenario": _told(told), "begin": begin, "actions": actions, "basis": basis,
                "communicate": [str(text) for text in criteria.get("communicate_info") or []]}  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRow.at(where, f"{type(error).__name__}: {error}", "a task has id, user_scenario and evaluation_criteria",
                        REMEDY) from error  # fmt: skip


def _told(value: Any, name: str = "") -> str:
    """A scenario as lines, whatever its nesting."""
    if isinstance(value, dict):
        return "\n".join(_told(inner, key.replace("_", " ")) for key, inner in value.items() if inner)
    return f"{name}: {value}" if name else str(value)


def _message(said: str) -> str:
    text = final_answer(said)
    if not text:
        raise ValueError("the user says nothing")
    return text


def _file(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a domain's folder has tasks.json, policy.md, db.json and tools.json")
    return path.read_text()


def _json(path: Path) -> Any:
    text = _file(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): mend the file") from error
