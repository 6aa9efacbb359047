"""Conversation -> Sample: the tokenizer's own chat template, and a loss mask that is exact.

The ids are those of `apply_chat_template` of the whole conversation. The mask is found in the text (turns.py) and carried
to tokens by character offsets. Nothing is guessed: a row whose turns cannot be located is refused, never trained whole.

A template may strip thinking from earlier turns. history="full" takes the text as the template writes it, stripped
turns included (they are counted). history="per_turn" trains every turn in the context the model would see when it
writes that turn: turns that agree on their context share a row, the others get rows of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_nb.data.formats import Text
from megatron_nb.data.rows import BadRow
from megatron_nb.data.turns import Row, Span, Template, assistant_turns, conversation_name
from megatron_nb.records import Conversation, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HISTORY = ("full", "per_turn")


@dataclass
class Rendered:
    """One training row as tokens: what the cache stores."""

    ids: np.ndarray  # [L] int64
    spans: np.ndarray  # [n, 4] int64: first token, one past the last, turn, weight
    sample_id: str
    stripped: int = 0

    def sample(self, source: str) -> Sample:
        """The row with its streams written out."""
        weight = np.zeros(len(self.ids), np.float32)
        turns = np.full(len(self.ids), -1, np.int32)
        for start, stop, turn, trained in self.spans:
            weight[start:stop] = trained
            turns[start:stop] = turn
        return Sample(np.asarray(self.ids, np.int64), weight, self.sample_id, source, turn_id=turns)


def render(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[Sample]:
    """The training rows of one conversation (one, or several with history="per_turn"). Raises BadRow and ValueError."""
    (rows,) = Renderer(tokenizer, **options)([conversation])
    if isinstance(rows, BadRow):
        raise rows
    return [row.sample(conversation.source) for row in rows]


class Renderer:
    """Renders many rows with one tokenizer. history: one of HISTORY; keep_all_think: see turns.Template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, history: str = "full", keep_all_think: bool = False):
        if history not in HISTORY:
            raise ValueError(f"data.history={history!r} must be one of {', '.join(HISTORY)}")
        self.tokenizer, self.history, self.keep_all_think = tokenizer, history, keep_all_think

    def __call__(self, items: list[Conversation | Text]) -> list[list[Rendered] | BadRow]:
        """For every item its rows as tokens, or the rule it breaks."""
        texts: list[list[Row] | BadRow] = []
        for item in items:
            try:
                texts.append(self.rows(item))
            except BadRow as error:
                texts.append(error)
        flat = [row for rows in texts if not isinstance(rows, BadRow) for row in rows]
        tokens = iter(self._tokenise(flat))
        done: list[list[Rendered] | BadRow] = []
        for rows in texts:
            found = rows if isinstance(rows, BadRow) else [next(tokens) for _ in rows]
            broken = next((row for row in found if isinstance(row, BadRow)), None) if isinstance(found, list) else None
            done.append(broken or found)
        return done

    def rows(self, item: Conversation | Text) -> list[Row]:
        """The training rows as text with the spans of the assistant turns."""
        if isinstance(item, Text):
            text = self._text_start + item.text + (self.tokenizer.eos_token or "")
            return [Row(text, [Span(0, len(text), -1, 1)], item.sample_id)]
        rows = self.template.rows(item, self.history)
        for row in rows:
            if lost := self._lost(item, row):
                raise BadRow.at(
                    conversation_name(item),
                    f"the chat template leaves out {lost}",
                    "all of a conversation must be rendered",
                    "set data.chat_template to one that renders it (chatml is built in)",
                )
        return rows

    @cached_property
    def template(self) -> Template:
        """The chat template, which plain text can do without."""
        return Template(self.tokenizer, self.keep_all_think)

    @cached_property
    def _text_start(self) -> str:
        """The token this tokenizer begins every plain text with, if it does."""
        ids = self.tokenizer("text").input_ids
        return self.tokenizer.bos_token if ids and ids[0] == self.tokenizer.bos_token_id else ""

    def _lost(self, item: Conversation, row: Row) -> str:
        """What the rendering leaves out: tools, calls, an answer, or the thinking of the last turn; "" when it is complete.

        Thinking that is missing from earlier turns is what some templates do on purpose: it is counted.
        """
        turns = [item.messages[index] for index in assistant_turns(item)]
        for tool in item.tools or []:
            if not _word(tool["function"]["name"], row.text):
                return f"tool {tool['function']['name']!r}"
        for span in row.spans:
            turn, written = turns[span.turn], row.text[span.start : span.stop]
            for call in turn.get("tool_calls", []):
                if not _word(call["function"]["name"], written):
                    return f"the call of {call['function']['name']!r}"
            if turn["content"].rpartition("</think>")[2].strip() not in written:
                return f"the answer {turn['content'][:40]!r}"
            thought = turn.get("reasoning_content", "").strip()
            if thought not in written:
                if span.turn == len(turns) - 1 or self.history == "per_turn":
                    return f"the thinking {thought[:40]!r}"
                row.stripped += 1
        return ""

    def _tokenise(self, rows: list[Row]) -> Iterator[Rendered | BadRow]:
        if not rows:
            return
        encoded = self.tokenizer(
            [row.text for row in rows], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for row, encoding in zip(rows, encoded.encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            spans = [self._token_span(span, encoding) for span in row.spans]
            if broken := [span for span, at in zip(row.spans, spans) if not self._whole(at, ids)]:
                text = row.text[broken[0].start : broken[0].stop]
                yield BadRow.at(row.sample_id, f"the turn {text[:40]!r} does not end with its end-of-turn token", "it must")
                continue
            yield Rendered(ids, np.array(spans, np.int64), row.sample_id, row.stripped)

    def _whole(self, span: tuple[int, int, int, int], ids: np.ndarray) -> bool:
        """Whether the span has tokens and, unless it is plain text, ends with the end-of-turn token itself."""
        start, stop, turn, _ = span
        end = None if turn < 0 else self.template.end
        return start < stop and (end is None or self.tokenizer.convert_ids_to_tokens(int(ids[stop - 1])) == end)

    @staticmethod
    def _token_span(span: Span, encoding: Any) -> tuple[int, int, int, int]:
        """The tokens that begin inside the span. One that began in the header cannot be generated and stays untrained."""
        if span.turn < 0:
            return 0, len(encoding.ids), span.turn, span.weight
        first = _token_at(encoding, range(span.start, span.stop))
        last = _token_at(encoding, range(span.stop - 1, span.start - 1, -1))
        if first is None or last is None:
            return 0, 0, span.turn, span.weight
        if encoding.token_to_chars(first)[0] < span.start:
            first += 1
        return first, last + 1, span.turn, span.weight


def _token_at(encoding: Any, places: range) -> int | None:
    """The token of the first of these characters that has one: offsets may leave out blanks."""
    return next((token for place in places if (token := encoding.char_to_token(place)) is not None), None)


def _word(name: str, text: str) -> bool:
    """Whether the name stands in the text by itself."""
    return f'"{name}"' in text or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
