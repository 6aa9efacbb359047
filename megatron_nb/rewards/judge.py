"""A model behind an OpenAI-compatible endpoint grades each answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_nb.client import Client, ClientConfig
from megatron_nb.records import Prompt, Rollout, Score
from megatron_nb.rewards.text import final_answer

TEMPLATE = """\
Grade the answer to the conversation below from {low} (useless or wrong) to {high} (could not be better).

[Conversation]
{conversation}

[Answer]
{answer}

End your reply with: Grade: <number>"""


@dataclass
class Judge:
    """The grade, moved to [0, 1]. No reply that can be read, after all retries, makes the rollout invalid."""

    url: str  # such as http://host:8000
    model: str
    template: str = TEMPLATE  # {conversation}, {answer}, {low}, {high}, and {NAME} for fields of the prompt's data
    pattern: str = r"Grade:\s*\**\s*(-?\d+(?:\.\d+)?)"  # the last match counts
    low: float = 1.0
    high: float = 10.0
    max_tokens: int = 1024
    temperature: float = 0.0
    api_key_env: str | None = None
    attempt_s: float = 30.0  # of one request; the term's timeout_s bounds all of them
    retries: int = 3
    cache: Path | None = None

    def __post_init__(self):
        if self.high <= self.low:
            raise ValueError(f"high={self.high} must be more than low={self.low}")
        if re.compile(self.pattern).groups != 1:
            raise ValueError(f"pattern={self.pattern!r} must have one group, the grade")
        self._client = Client(
            ClientConfig(
                self.url, self.model, self.api_key_env, timeout_s=self.attempt_s, retries=self.retries, cache=self.cache
            )
        )

    async def score_rollout(self, prompt: Prompt, rollout: Rollout) -> Score:
        question = [{"role": "user", "content": self._question(prompt, final_answer(rollout.text))}]
        grade = await self._client.chat(question, self._grade, max_tokens=self.max_tokens, temperature=self.temperature)
        return Score((grade - self.low) / (self.high - self.low), reason=f"grade {grade:g}")

    def _question(self, prompt: Prompt, answer: str) -> str:
        said = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.conversation.messages)
        fields = {**prompt.data, "conversation": said, "answer": answer, "low": f"{self.low:g}", "high": f"{self.high:g}"}
        # in one pass: an answer that writes {reference} does not get it
        return re.sub(r"\{(\w+)\}", lambda found: str(fields.get(found[1], found[0])), self.template)

    def _grade(self, reply: str) -> float:
        found = re.findall(self.pattern, final_answer(reply))
        if not found:
            raise ValueError(f"no grade in {reply[-80:]!r}")
        grade = float(found[-1])
        if not self.low <= grade <= self.high:
            raise ValueError(f"grade {grade:g} is not within {self.low:g} and {self.high:g}")
        return grade
