"""What stands between two assistant turns of a token stream: the results of tools in the template's own frame.

The frame is learned from the tokenizer's chat template once and checked against its full rendering, so that a turn costs the
tokens of its new text only. A suffix begins after the end-of-turn token and ends with the generation header.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_nb.data.turns import Template
from megatron_nb.records import Conversation
from megatron_nb.rollout.calls import joined
from megatron_nb.rollout.toolbox import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED = {"role": "user", "content": "question"}
MARKS = ("RESULT-A", "RESULT-B")
PROBES = (["one"], ["one", "two", "three"], ['a "b" <c>\n\n  {"d": 1}\n- é'])  # what a template might quote, trim or escape
UNSHOWN = "Error: this result holds what the tokenizer takes for structure, so it cannot be shown."


class Frame:
    """The frame of one template and one wire format.

    Raises ValueError for a template that cannot render tool results, or rewrites them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, wire: str, keep_all_think: bool = False):
        self.template, self.wire = Template(tokenizer, keep_all_think), wire
        self._tokenizer = tokenizer.backend_tokenizer
        self.end = tokenizer.convert_tokens_to_ids(self.template.end)
        structure = special_tokens(tokenizer) - {tokenizer.unk_token}  # any strange word may become the unknown token
        self._special = set(tokenizer.convert_tokens_to_ids(sorted(structure)))
        self._expected: dict[int, int] = {}  # results -> special ids of their suffix
        self.opens = "<think>" in self.template.header  # the header opens the thinking, so a turn's text does not
        one, two = self._rendered([MARKS[0]]), self._rendered([*MARKS])
        self._lead, found, self._tail = one.partition(MARKS[0])
        self._between = two.partition(MARKS[0])[2].partition(MARKS[1])[0]
        as_said = self._apply([ASKED, {"role": "assistant", "content": "ANSWER"}, {"role": "assistant", "content": MARKS[0]}])
        known = found and not as_said.endswith(self._lead + found + self._tail)  # a template may take every role for the model
        if not known or any(self.text(texts) != self._rendered(texts) for texts in PROBES):
            raise ValueError(
                f"the chat template does not write tool results of agent.wire={wire} word for word: the stream would differ "
                "from its rendering; set prompts.chat_template=chatml, or the other wire"
            )

    @cached_property
    def strips(self) -> bool:
        """Whether the template leaves thinking out of a history, so that its rendering is not what was sampled."""
        thought = {"role": "assistant", "content": "<think>\nTHOUGHT\n</think>\n\nANSWER"}
        return "THOUGHT" not in self._apply([ASKED, thought, *self.messages(["result"])])

    def messages(self, texts: list[str]) -> list[dict[str, Any]]:
        """The results of one turn as messages."""
        if self.wire == "mcp":
            return [{"role": "user", "content": joined(texts)}]
        return [{"role": "tool", "content": text} for text in texts]

    def text(self, texts: list[str]) -> str:
        """What the template writes of these results, from the end of the turn before to the header of the next."""
        return self._lead + (joined(texts) if self.wire == "mcp" else self._between.join(texts)) + self._tail

    def suffix(self, texts: list[str]) -> list[int]:
        """The ids of `text`. A result that comes out with special tokens in it is replaced by a line that says so."""
        ids = self.encode(self.text(texts))
        if self._count(ids) == self._of(len(texts)):
            return ids
        shown = [UNSHOWN if self._count(self.encode(self.text([text]))) != self._of(1) else text for text in texts]
        return self.encode(self.text(shown))

    def encode(self, text: str) -> list[int]:
        """The ids of a text that the template wrote."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _of(self, count: int) -> int:
        if count not in self._expected:
            self._expected[count] = self._count(self.encode(self.text(["x"] * count)))
        return self._expected[count]

    def _count(self, ids: list[int]) -> int:
        return sum(id_ in self._special for id_ in ids)

    def _rendered(self, texts: list[str]) -> str:
        """The template's own rendering of a question, an answer and these results, after the answer's end."""
        whole = self._apply([ASKED, {"role": "assistant", "content": "ANSWER"}, *self.messages(texts)])
        return whole.partition("ANSWER")[2].partition(self.template.end)[2]

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        return self.template.write(Conversation(messages, "probe", f"agent.wire={self.wire}"), messages, header=True)
