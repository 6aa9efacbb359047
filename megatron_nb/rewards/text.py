"""What rewards look at in a text: the part that is said, its n-grams, its scripts."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from megatron_nb.data.preferences import final_answer
from megatron_nb.records import Prompt

__all__ = ["final_answer", "reference_of", "references_of", "repeated_share", "scripts_of", "spellings"]

IDEOGRAPHIC = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")  # a letter says about as much as a word of the others
NOT_PROSE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|https?://\S+", re.DOTALL)


def repeated_share(items: Sequence[Hashable], n: int) -> float:
    """Share of the n-grams that have occurred before, in [0, 1); 0 for fewer than n items."""
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def scripts_of(text: str) -> Counter[str]:
    """Script -> how much of the prose is in it: words, or letters of East Asian scripts. Code, formulas and links are cut.

    A script is the first word of its letters' Unicode names: LATIN, CYRILLIC, ARABIC, CJK, HIRAGANA, ...
    """
    found: Counter[str] = Counter()
    before = ""
    for letter in NOT_PROSE.sub(" ", text):
        script = unicodedata.name(letter, "").split(" ")[0].split("-")[0] if letter.isalpha() else ""
        found[script] += bool(script) and (script in IDEOGRAPHIC or script != before)
        if not unicodedata.combining(letter):
            before = script
    return +found


def reference_of(prompt: Prompt, field: str) -> Any:
    """The field of the prompt's data. ValueError when it is not there, naming what is."""
    if prompt.data.get(field) is None:
        raise ValueError(f"the prompt's data has no {field!r}; it has {', '.join(prompt.data) or 'nothing'}")
    return prompt.data[field]


def references_of(prompt: Prompt, field: str) -> list[str]:
    """The field of the prompt's data, and its aliases. ValueError when there is none, or only empty ones."""
    reference_of(prompt, field)
    if not (found := spellings(prompt.data, field)):
        raise ValueError(f"the prompt's {field!r} is empty: a reference must say something; leave such a row out")
    return found


def spellings(row: dict[str, Any], field: str = "answer") -> list[str]:
    """What a row's field and its `aliases` say, each a text (or number), a list of them, or nothing."""
    found = []
    for value in (row.get(field), row.get("aliases")):
        found += value if isinstance(value, (list, tuple)) else [value]
    return [str(one) for one in found if one is not None and str(one).strip()]
