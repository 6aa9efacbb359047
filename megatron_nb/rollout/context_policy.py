"""What stays in the context of an episode: everything, the last results of tools, or a summary.

    keep_all    one row; the episode ends by length when it is full
    keep_last   results of tools beyond the last `keep_last` become a fixed line. They are removed when `clear_every` more have
                come, or when the row is full, so a row lasts so many results: 1 cuts at every turn, and makes a row of each
    summarise   before the row is full the model is asked for a summary, a turn like any other; a new row begins with the task
                and that summary

What the model said stays, as the ids that were sampled. Where the template strips thinking from its history and the rows are
to follow it (agent.thinking=strip), every turn is a row of its own, in the context as the template renders it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_nb.records import Prompt
from megatron_nb.rollout.frame import Frame
from megatron_nb.rollout.rows import Rows

REMOVED = "[This result was removed to save room. Call the tool again if it is needed.]"
REQUEST = (
    "[The context is nearly full. Do not call a tool now. Write a summary of the work so far: what was found, with titles and "
    "facts, what was tried in vain, and what to do next. The work goes on with the task and this summary alone.]"
)
SUMMARY = "\n\nSummary of the work so far:\n"


@dataclass
class Piece:
    """A turn as it stands in the context. texts: the results of a tool turn, None for the model's own."""

    ids: list[int]
    content: str = ""  # of the model's turn
    texts: list[str] | None = None
    removed: int = 0  # of the texts, from the first


class Context:
    """The context of one episode, and the cutting of it. One of these for every episode."""

    def __init__(self, prompt: Prompt, rows: Rows, frame: Frame, *, policy: str, keep_last: int, clear_every: int,
                 max_tokens: int, summary_tokens: int, strip: bool):  # fmt: skip
        self.prompt, self.rows, self.frame, self.policy = prompt, rows, frame, policy
        self._task = prompt.conversation  # without any summary: the model has the last one before it when it writes the next
        self.keep_last, self.clear_every, self.max_tokens, self.strip = keep_last, clear_every, max_tokens, strip
        self.pieces: list[Piece] = []  # after the prompt, the last turn included
        self.kept = 0  # results of tools that stand in the context
        self._cleared = 0  # pieces before this one hold no result that could be removed
        request = frame.suffix([REQUEST])
        self.summary_tokens = summary_tokens
        self.reserve = len(request) + 1 + summary_tokens if policy == "summarise" else 0  # 1: an end of turn that may lack

    @property
    def room(self) -> int:
        """Tokens that the model's next turn may have."""
        return self.max_tokens - self.reserve - len(self.rows.ids)

    def said(self, ids: list[int], content: str) -> None:
        """Note the model's turn, which stands in the row already."""
        self.pieces.append(Piece(ids, f"<think>\n{content}" if self.frame.opens else content))

    def answer(self, texts: list[str], status: str) -> bool:
        """Put results into the context, cut where the policy says so. False: there is no room left for a turn."""
        piece = Piece(self._closed(self.frame.suffix(texts)), texts=texts)
        self.pieces.append(piece)
        self.kept += len(texts)
        full = not self._fits(len(self.rows.ids) + len(piece.ids))
        cut = self.policy == "keep_last" and (full or self.kept >= self.keep_last + self.clear_every)
        if cut:
            self._clear()
        if (cut or self.strip) and not self._reopen(self.max_tokens - self.reserve) or full and not (cut or self.strip):
            return False
        self.rows.add_results(piece.ids, status)
        return True

    def _fits(self, length: int) -> bool:
        """Whether a context of this length leaves room for a turn."""
        return length < self.max_tokens - self.reserve

    def wants_summary(self, texts: list[str], turn_tokens: int) -> bool:
        """Whether after these results there is no room for a whole turn and then a summary."""
        return self.policy == "summarise" and self.room - len(self.frame.suffix(texts)) - 1 < turn_tokens

    def ask_summary(self, texts: list[str], status: str) -> None:
        """Put results, where they fit, and the request for a summary into the context."""
        limit = self.max_tokens - self.summary_tokens + 1
        for shown in ([*texts, REQUEST], [REQUEST]):
            piece = Piece(self._closed(self.frame.suffix(shown)), texts=shown)
            if len(self.rows.ids) + len(piece.ids) < limit:
                break
        self.pieces.append(piece)
        if self.strip:
            self._reopen(limit)  # shorter than what stands there, so it fits
        self.rows.add_results(piece.ids, status)

    def restart(self, summary: str) -> bool:
        """Begin a row with the task and the summary. False: they leave no room."""
        messages = [dict(message) for message in self._task.messages]
        if messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": ""})
        messages[-1]["content"] = (messages[-1]["content"] + SUMMARY + summary).strip()
        conversation = replace(self._task, messages=messages)
        self.prompt = Prompt(conversation, self._rendered(messages), self.prompt.data)
        if not self._fits(len(self.prompt.ids)):
            return False
        self.pieces, self.kept, self._cleared = [], 0, 0
        self.rows.open(list(self.prompt.ids))
        return True

    # ------------------------------------------------------------------ cutting
    def _closed(self, suffix: list[int]) -> list[int]:
        """The suffix, after the template's end of turn if the model ended its turn otherwise."""
        return suffix if self.rows.ids[-1] == self.frame.end else [self.frame.end, *suffix]

    def _clear(self) -> None:
        """Replace all results but the last `keep_last`, and those of the last turn."""
        surplus = self.kept - self.keep_last
        for place in range(self._cleared, len(self.pieces) - 1):
            piece = self.pieces[place]
            if surplus <= 0:
                break
            self._cleared = place  # what stands before it has nothing left to remove
            if piece.texts is None or piece.removed == len(piece.texts):
                continue
            now = min(surplus, len(piece.texts) - piece.removed)
            piece.removed += now
            surplus -= now
            self.kept -= now
            suffix = self.frame.suffix(_left(piece))
            piece.ids = [*piece.ids[:1], *suffix] if piece.ids[0] == self.frame.end else suffix

    def _reopen(self, limit: int) -> bool:
        """Begin a row with the context as it is now; the last piece is what is new in it. False: it reaches the limit."""
        last = self.pieces[-1]
        if self.strip:
            messages = [dict(message) for message in self.prompt.conversation.messages]
            for piece in self.pieces:
                own = piece.texts is None
                messages += [_turn(piece.content)] if own else self.frame.messages(_left(piece))
            ids, last.ids = self._rendered(messages), self.frame.suffix(_left(last))
            assert ids[-len(last.ids) :] == last.ids, "the rendering of a history ends with the frame of its last results"
            before = ids[: -len(last.ids)]
        else:
            before = list(self.prompt.ids)
            for piece in self.pieces[:-1]:
                before += piece.ids
        if len(before) + len(last.ids) >= limit:
            return False
        self.rows.open(before)
        return True

    def _rendered(self, messages: list[dict[str, Any]]) -> list[int]:
        """The template's rendering of a conversation up to the next turn."""
        text = self.frame.template.write(self.prompt.conversation, messages, header=True)
        return self.frame.encode(text)


def _left(piece: Piece) -> list[str]:
    """The texts of a tool turn, with a line for each that was removed."""
    return [REMOVED] * piece.removed + piece.texts[piece.removed :]


def _turn(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
