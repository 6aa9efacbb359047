"""Text within a number of tokens: cut to them, or split into pages of so many."""

from __future__ import annotations

import asyncio
import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = 4  # of a token, where there is no tokenizer
THREADED = 50_000  # characters from which a text is tokenised beside the event loop


class Budget:
    """Measures text with a tokenizer, or by its characters without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer

    def cut(self, text: str, tokens: int, mark: str = "\n[cut: {left} more tokens]") -> str:
        """At most `tokens` of the text; where it is longer, `mark` follows."""
        if self._surely(text, tokens) or len(ends := self._ends(text)) <= tokens:
            return text
        return text[: ends[tokens - 1]].rstrip() + mark.format(left=len(ends) - tokens)

    async def pages(self, text: str, tokens: int) -> list[str]:
        """The text in parts of at most `tokens` each, broken between paragraphs where possible, else lines, else words."""
        if self._surely(text, tokens):
            return [text.strip()]
        if len(text) > THREADED:
            return await asyncio.to_thread(self._pages, text, tokens)
        return self._pages(text, tokens)

    def _pages(self, text: str, tokens: int) -> list[str]:
        ends, parts, start = self._ends(text), [], 0
        while start < len(text):
            first = bisect.bisect_right(ends, start)
            if first + tokens >= len(ends):
                parts.append(text[start:])
                break
            stop = max(ends[first + tokens - 1], start + 1)
            half = start + (stop - start) // 2  # a break before it would leave the page too empty
            places = ((text.rfind(mark, half, stop), len(mark)) for mark in ("\n\n", "\n", " "))
            stop = next((place + length for place, length in places if place > 0), stop)
            parts.append(text[start:stop])
            start = stop
        return [part.strip() for part in parts if part.strip()] or [""]

    def _surely(self, text: str, tokens: int) -> bool:
        """Whether it has at most so many tokens, since a token has at least a byte; a tokenizer may put a blank before it."""
        return len(text) < tokens and len(text.encode("utf-8", "replace")) < tokens

    def _ends(self, text: str) -> list[int]:
        """Where each token of the text ends, in characters."""
        if self._tokenizer is None:
            return list(range(CHARACTERS, len(text), CHARACTERS)) + [len(text)] * bool(text)
        return [stop for _, stop in self._tokenizer.encode(text, add_special_tokens=False).offsets]
