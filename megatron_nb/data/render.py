"""Conversation -> Sample: the tokenizer's own chat template, and a loss mask that is exact.

The ids are those of `apply_chat_template` of the whole conversation. The mask is found in the text: an assistant turn
begins where the generation header ends and stops with its end-of-turn token; character offsets carry it to tokens.
Nothing is guessed: a row whose turns cannot be located is refused, never trained whole.

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
from megatron_nb.records import Conversation, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HISTORY = ("full", "per_turn")


@dataclass
class Span:
    """text[start:stop] is what the model writes in one assistant turn, its end-of-turn token included."""

    start: int
    stop: int
    turn: int  # number of the assistant turn in the conversation
    weight: int  # 0 or 1


@dataclass
class Row:
    """One training row as text."""

    text: str
    spans: list[Span]
    sample_id: str
    stripped: int = 0  # assistant turns whose reasoning the template left out


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
    """Renders many rows with one tokenizer.

    keep_all_think is passed to the template; a template that does not know it is refused.
    """

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
        if self.history == "per_turn" and any(item.messages[index]["loss"] for index in self._turns(item)):
            rows = self._rows_per_turn(item)
        else:
            text = self.write(item, item.messages)
            spans = self._scan(item, text) or [self._locate(item, text, index) for index in self._turns(item)]
            rows = [Row(text, spans, item.sample_id)]
        turns = [item.messages[index] for index in self._turns(item)]
        for row in rows:
            self._check(item, row, turns)
        return rows

    def write(self, item: Conversation, messages: list[dict[str, Any]], header: bool = False) -> str:
        """The template's text of these messages, with the generation header when asked. Raises BadRow."""
        options = {"keep_all_think": True} if self.keep_all_think else {}
        try:
            return self._apply(messages, tools=item.tools, add_generation_prompt=header, **options)
        except Exception as error:  # templates raise jinja2's errors, and TypeError where a message lacks what they expect
            raise BadRow.at(
                _name(item), f"the chat template refuses it ({error})", "the template must render the conversation"
            ) from error

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    # -- what the template looks like

    @cached_property
    def _marks(self) -> tuple[str, str]:
        """(generation header, end-of-turn token) of the template, learned from a two-message probe; the header may be ""."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template: conversations need one; set data.chat_template to a file or to chatml"
            )
        if self.keep_all_think and "keep_all_think" not in self.tokenizer.chat_template:
            raise ValueError(
                "data.keep_all_think is set but the chat template does not know it: "
                "use data.history=per_turn, or data.chat_template=chatml"
            )
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

    @cached_property
    def _text_start(self) -> str:
        """The token this tokenizer begins every plain text with, if it does."""
        ids = self.tokenizer("text").input_ids
        return self.tokenizer.bos_token if ids and ids[0] == self.tokenizer.bos_token_id else ""

    @staticmethod
    def _turns(item: Conversation) -> list[int]:
        return [index for index, message in enumerate(item.messages) if message["role"] == "assistant"]

    # -- where the assistant turns are

    def _scan(self, item: Conversation, text: str) -> list[Span] | None:
        """Spans by the headers that stand in the text: linear, and right even where the template rewrites earlier turns.

        None when that proves nothing: no header known, a message that itself contains header or end, or counts that differ.
        """
        header, end = self._marks
        turns = self._turns(item)
        if not header or text.count(header) != len(turns):
            return None
        if any(header.strip() in part or end in part for part in _strings([item.messages, item.tools])):
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
                _name(item),
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
        _, end = self._marks
        stop = after.rfind(end)
        if stop < len(before):
            return None
        return Span(len(before), stop + len(end), self._turns(item).index(index), item.messages[index]["loss"])

    def _rows_per_turn(self, item: Conversation) -> list[Row]:
        """Rows from the last trained turn backwards: an earlier turn joins the first row whose text continues its own."""
        rows: list[Row] = []
        for index in reversed([index for index in self._turns(item) if item.messages[index]["loss"]]):
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

    def _check(self, item: Conversation, row: Row, turns: list[dict[str, Any]]) -> None:
        """Refuses a rendering that lost something: tools, calls, an answer, or the thinking of the row's last turn."""
        remedy = "choose a template that renders it with data.chat_template (chatml is built in)"
        for tool in item.tools or []:
            if not _word(tool["function"]["name"], row.text):
                raise BadRow.at(
                    _name(item),
                    f"the chat template leaves out tool {tool['function']['name']!r}",
                    "tools must be rendered",
                    remedy,
                )
        for span in row.spans:
            turn, written = turns[span.turn], row.text[span.start : span.stop]
            if lost := next(
                (call for call in turn.get("tool_calls", []) if not _word(call["function"]["name"], written)), None
            ):
                raise BadRow.at(
                    _name(item),
                    f"the chat template leaves out the call of {lost['function']['name']!r}",
                    "calls must be rendered",
                    remedy,
                )
            if turn["content"].rpartition("</think>")[2].strip() not in written:
                raise BadRow.at(
                    _name(item), f"the chat template leaves out {turn['content'][:40]!r}", "answers must be rendered", remedy
                )
            thought = turn.get("reasoning_content", "").strip()
            if thought and thought not in written:
                if span.turn == len(turns) - 1 or self.history == "per_turn":
                    raise BadRow.at(
                        _name(item),
                        f"the chat template leaves out the thinking {thought[:40]!r}",
                        "it must be rendered",
                        remedy,
                    )
                row.stripped += 1

    # -- tokens

    def _tokenise(self, rows: list[Row]) -> Iterator[Rendered | BadRow]:
        if not rows:
            return
        encoded = self.tokenizer(
            [row.text for row in rows], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for row, encoding in zip(rows, encoded.encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            spans = np.array([self._token_span(span, encoding) for span in row.spans], np.int64).reshape(-1, 4)
            lost = [
                number
                for number, (start, stop, turn, _) in enumerate(spans)
                if stop <= start or (turn >= 0 and not self._ends(ids[stop - 1]))
            ]
            if lost:
                text = row.text[row.spans[lost[0]].start : row.spans[lost[0]].stop]
                yield BadRow.at(
                    row.sample_id,
                    f"the turn {text[:40]!r} does not end with a token of its own",
                    "the end of turn is one token",
                )
                continue
            yield Rendered(ids, spans, row.sample_id, row.stripped)

    def _ends(self, token: int) -> bool:
        return self.tokenizer.convert_ids_to_tokens(int(token)) == self._marks[1]

    @staticmethod
    def _token_span(span: Span, encoding: Any) -> tuple[int, int, int, int]:
        """The tokens that begin inside the span. One that began in the header cannot be generated and stays untrained."""
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
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.keys()))
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _name(item: Conversation) -> str:
    return f"{item.source}/{item.sample_id}"
