"""The second witness of a program's time complexity: an instruct model behind an OpenAI-compatible endpoint, majority of n.

It is shown the program without comments, docstrings and the rest of long texts, so that no claim in them counts, and ends
each answer with a line `Complexity: O(...)`. n is the length of the input, or its value where the input is a number.
Where this witness and the empirical fit of costs name different classes, or one of them none, the result is unknown.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import logging
import re
from collections import Counter
from dataclasses import dataclass, field

from megatron_nb.client import Client, ClientConfig, RequestFailed
from megatron_nb.rewards.text import final_answer
from megatron_nb.sandbox.ladder import UNKNOWN, parse_class

TEMPLATE = """\
What is the worst-case time complexity of this program in n, the length of its input, or its value where it is a number?

```{language}
{program}
```

Reason briefly and end with the line: Complexity: O(...)"""
ANSWER = re.compile(r"Complexity:[\s*`$]*([^\n]+)", re.IGNORECASE)
LONGEST = 20_000  # characters of a program that is worth asking about
SHOWN = 40  # characters of a text in a program: enough for a format, not for a claim about the program
REMEMBERED = 100_000  # verdicts that are kept in the process

log = logging.getLogger(__name__)


@dataclass
class WitnessConfig:
    """The model that is asked, and how often."""

    endpoint: ClientConfig | None = None  # its cache folder keeps answers over runs, its concurrency bounds the requests
    answers: int = 5  # to each program
    majority: float = 0.5  # a class counts when more than this share of the answers names it
    temperature: float = 0.7  # (own)
    max_tokens: int = 1024  # of one answer
    template: str = TEMPLATE  # {program} and {language}

    def __post_init__(self):
        if self.answers < 1:
            raise ValueError(f"answers={self.answers} must be at least 1")
        if not 0.5 <= self.majority < 1:
            raise ValueError(f"majority={self.majority} must be in [0.5, 1): two classes cannot both have more than half")
        if self.answers > 1 and self.temperature <= 0:
            told = f"temperature={self.temperature} with answers={self.answers}"
            raise ValueError(f"{told}: all answers would be equal; raise it, or ask once")
        if "{program}" not in self.template:
            raise ValueError("template must hold {program}: the model has to see what it judges")


@dataclass
class Told:
    """What the witness says of one program."""

    complexity: str  # a class of the ladder, or unknown
    votes: dict[str, int] = field(default_factory=dict)  # class -> answers; those that were not needed are not in it


class WitnessFailed(RequestFailed):
    """So few answers could be had that the missing ones decide: no verdict, and not the program's fault."""


class Witness:
    """Asks for a class. Usable from any event loop; ValueError when the configuration names no endpoint."""

    def __init__(self, config: WitnessConfig):
        if config.endpoint is None:
            raise ValueError("the witness needs an endpoint: set its endpoint.base_url and endpoint.model")
        self.config, self._client = config, Client(config.endpoint)
        self._told: dict[str, Told] = {}
        self._asking: dict[str, asyncio.Task[Told]] = {}

    async def complexity(self, program: str, language: str = "python") -> Told:
        """The majority of the answers; a tie is unknown. The same program is asked about once, also at the same time.

        An answer without the line is asked for again, like one that failed. Raises WitnessFailed when what could not be had
        might have changed the result.
        """
        if len(program) > LONGEST:
            return Told(UNKNOWN)
        asked = question(program, language, self.config.template)
        key = hashlib.sha256(asked.encode()).hexdigest()
        if key in self._told:
            return self._told[key]
        task = self._asking.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._asking[key] = asyncio.ensure_future(self._ask(asked))
            task.add_done_callback(lambda task: self._finished(key, task))
        return await asyncio.shield(task)  # one that waits no longer does not end it for the others

    async def close(self) -> None:
        """Close this loop's connections."""
        await self._client.close()

    async def _ask(self, asked: str) -> Told:
        config = self.config
        settings = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        messages = [{"role": "user", "content": asked}]
        tasks = [  # the seed makes them different requests, to the server and to the cache
            asyncio.ensure_future(self._client.chat(messages, read_answer, seed=number, **settings))
            for number in range(config.answers)
        ]
        votes, failure = [], None
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    votes.append(await answer)
                except RequestFailed as error:
                    failure = error
                    continue
                found = majority_of(votes, config.answers, config.majority)
                if found is not None:
                    return Told(found, dict(Counter(votes)))
        finally:  # the others are not needed
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        got = f"{config.answers - len(votes)} of {config.answers} answers could not be had, and they decide"
        raise WitnessFailed(f"{got}; last: {failure}", failure.url, failure.status, failure.attempts)

    def _finished(self, key: str, task: asyncio.Task[Told]) -> None:
        if self._asking.get(key) is task:
            del self._asking[key]
        if task.cancelled() or task.exception() is not None:
            return
        if len(self._told) >= REMEMBERED:
            del self._told[next(iter(self._told))]
        self._told[key] = task.result()


# ------------------------------------------------------------------ question and answer
def question(program: str, language: str = "python", template: str = TEMPLATE) -> str:
    """What the model is asked, in one pass: a program that writes {language} gets none."""
    fields = {"program": without_claims(program) if language == "python" else program, "language": language}
    return re.sub(r"\{(program|language)\}", lambda found: fields[found[1]].strip("\n"), template)


def without_claims(program: str) -> str:
    """The Python program without comments and docstrings, long texts cut, in one layout; as it is when it cannot be read."""
    try:
        tree = ast.parse(program)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = node.value[:SHOWN]
            if isinstance(body, list):
                kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
                node.body = kept or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def read_answer(reply: str) -> str:
    """The class on the last `Complexity:` line; unknown for one that is not on the ladder. ValueError without such a line."""
    found = ANSWER.findall(final_answer(reply))
    if not found:
        raise ValueError(f"no line `Complexity: O(...)` in {reply[-80:]!r}")
    return parse_class(found[-1].strip(" .*`$")) or UNKNOWN


def majority_of(votes: list[str], answers: int, majority: float) -> str | None:
    """The class that more than `majority` of all answers name; unknown when none can; None while the missing ones decide."""
    needed = int(majority * answers) + 1
    best, count = Counter(votes).most_common(1)[0] if votes else (UNKNOWN, 0)
    if count >= needed:
        return best
    return None if count + answers - len(votes) >= needed else UNKNOWN


# ------------------------------------------------------------------ both witnesses
class Agreement:
    """The rule for two witnesses, and how often they agree."""

    def __init__(self):
        self.pairs: Counter[tuple[str, str]] = Counter()  # (empirical, told)

    def agree(self, empirical: str, told: str, name: str = "") -> str:
        """The class that both name, else unknown; two different classes are logged under `name`."""
        self.pairs[empirical, told] += 1
        if empirical == told:
            return told
        if UNKNOWN not in (empirical, told):
            log.warning("%s: the costs say %s, the model says %s: unknown", name or "complexity", empirical, told)
        return UNKNOWN

    def metrics(self) -> dict[str, float]:
        """Shares of all programs so far: both name one class, two classes, or one of them names none."""
        total = max(self.pairs.total(), 1)
        agreed = sum(count for (a, b), count in self.pairs.items() if a == b != UNKNOWN)
        silent = {side: sum(count for pair, count in self.pairs.items() if pair[at] == UNKNOWN)
                  for at, side in enumerate(("empirical", "witness"))}  # fmt: skip
        split = sum(count for (a, b), count in self.pairs.items() if a != b and UNKNOWN not in (a, b))
        return {
            "witnesses_agree": agreed / total, "witnesses_differ": split / total,
            "empirical_unknown": silent["empirical"] / total, "witness_unknown": silent["witness"] / total,
            "witnessed": float(self.pairs.total()),
        }  # fmt: skip
