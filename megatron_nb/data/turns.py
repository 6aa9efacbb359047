"""The chat template at the level of text: what it writes, and where in it the assistant turns are.

A turn begins where the generation header ends and stops with its end-of-turn token. Both are learned from the template;
a conversation whose turns cannot be located is refused.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_nb.data.rows import BadRow
from megatron_nb.records import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Span:
    """text[start:stop] is what the model writes in one assistant turn, its end-of-turn token included."""

    start: int
    stop: int
    turn: int  # number of the assistant turn in the conversation; -1 for plain text
    weight: int  # 0 or 1


@dataclass
class Row:
    """One training row as text."""

    text: str
    spans: list[Span]
    sample_id: str
    stripped: int = 0  # assistant turns whose thinking the template left out


class Template:
    """A tokenizer's chat template.

    keep_all_think: passed to it. Raises ValueError when there is no template, when it does not know that option, or when
    its turns have no end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep_all_think: bool = False):
        self.tokenizer = tokenizer
        self._options = {"keep_all_think": True} if keep_all_think else {}
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: conversations need one; set data.chat_template to a file or to chatml"
            )
        if keep_all_think and "keep_all_think" not in tokenizer.chat_template:
            raise ValueError(
                "data.keep_all_think is set but the chat template does not know it: "
                "use data.history=per_turn, or data.chat_template=chatml"
            )
        self.header, self.end = self._learn()

    def rows(self, item: Conversation, history: str) -> list[Row]:
        """The training rows of a conversation: the whole of it, or (history="per_turn") a row for every context."""
        if history == "per_turn" and any(item.messages[index]["loss"] for index in assistant_turns(item)):
            return self._rows_per_turn(item)
        text = self.write(item, item.messages)
        spans = self._scan(item, text) or [self._locate(item, text, index) for index in assistant_turns(item)]
        return [Row(text, spans, item.sample_id)]

    def write(self, item: Conversation, messages: list[dict[str, Any]], header: bool = False) -> str:
        """The template's text of these messages, with the generation header when asked. Raises BadRow."""
        try:
            return self._apply(messages, tools=item.tools, add_generation_prompt=header)
        except Exception as error:  # templates raise jinja2's errors, and TypeError where a message lacks what they expect
            raise BadRow.at(
                conversation_name(item), f"the chat template refuses it ({error})", "the template must render the conversation"
            ) from error

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self._options, **options)

    def _learn(self) -> tuple[str, str]:
        """(generation header, end-of-turn token), from a question and an answer; the header may be ""."""
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "ANSWER"}]
        try:
            whole, bare, asked = self._apply(probe), self._apply(probe[:1]), self._apply(probe[:1], add_generation_prompt=True)
        except Exception as error:
            raise ValueError(
                f"the chat template cannot render one question and answer ({error}): mend it or set data.chat_template"
            ) from error
        _, _, tail = whole.rpartition("ANSWER")
        known = {str(token) for token in self.tokenizer.added_tokens_decoder.values()} | set(self.tokenizer.all_special_tokens)
        ends = [(at, -len(token), token) for token in known if token and (at := tail.find(token)) >= 0]
        if not ends:
            raise ValueError(
                f"the chat template writes {tail!r} after an assistant turn: a turn must end with a special token, "
                "else the model never learns to stop; mend the template or set data.chat_template"
            )
        return (asked[len(bare) :] if asked.startswith(bare) else ""), min(ends)[2]

    def _scan(self, item: Conversation, text: str) -> list[Span] | None:
        """Spans by the headers that stand in the text: linear, and right even where the template rewrites earlier turns.

        None when that proves nothing: no header known, a message that itself contains header or end, or counts that differ.
        """
        header, end = self.header, self.end
        turns = assistant_turns(item)
        if not header or text.count(header) != len(turns):
            return None
        said = pickle.dumps([item.messages, item.tools])  # every string in it, unescaped; a walk over them is slow
        if header.strip().encode() in said or end.encode() in said:
            return None
        spans, at = [], 0
        for number, index in enumerate(turns):
            start = text.index(header, at) + len(header)
            stop = text.find(end, start)
            following = text.find(header, start)
            if stop < 0 or 0 <= following < stop:
                return None
            at = stop + len(end)
            spans.append(Span(start, at, number, item.messages[index]["loss"]))
        return spans

    def _locate(self, item: Conversation, text: str, index: int) -> Span:
        """The span of message `index` by rendering: the conversation before it with the header, and up to it."""
        span = self._between(item, text, index, *self._views(item, index))
        if span is None:
            raise BadRow.at(
                conversation_name(item),
                f"the template writes assistant message {index + 1} otherwise in the conversation than when it is generated",
                "the mask needs the exact place of every turn",
                "use data.history=per_turn, another data.chat_template, or data.bad_rows=skip",
            )
        return span

    def _views(self, item: Conversation, index: int) -> tuple[str | None, str]:
        """What the model is shown before it writes message `index`, and that followed by what it writes."""
        before = self.write(item, item.messages[:index], header=True) if index else None
        return before, self.write(item, item.messages[: index + 1])

    def _between(self, item: Conversation, text: str, index: int, before: str | None, after: str) -> Span | None:
        """From the end of `before` to the last end of turn in `after`; None unless both are prefixes of the text."""
        if before is None or not text.startswith(after) or not after.startswith(before):
            return None
        stop = after.rfind(self.end)
        if stop < len(before):
            return None
        return Span(len(before), stop + len(self.end), assistant_turns(item).index(index), item.messages[index]["loss"])

    def _rows_per_turn(self, item: Conversation) -> list[Row]:
        """Rows from the last trained turn backwards: an earlier turn joins the first row whose text continues its own."""
        rows: list[Row] = []
        for index in reversed([index for index in assistant_turns(item) if item.messages[index]["loss"]]):
            views = self._views(item, index)
            for row in rows:
                if span := self._between(item, row.text, index, *views):
                    row.spans.insert(0, span)
                    break
            else:
                rows.append(Row(views[1], [self._locate(item, views[1], index)], f"{item.sample_id}#{index}"))
        if len(rows) == 1:
            rows[0].sample_id = item.sample_id
        return rows[::-1]


def assistant_turns(item: Conversation) -> list[int]:
    """Places of the assistant messages."""
    return [index for index, message in enumerate(item.messages) if message["role"] == "assistant"]


def conversation_name(item: Conversation) -> str:
    """How messages to the user name it."""
    return f"{item.source}/{item.sample_id}"
