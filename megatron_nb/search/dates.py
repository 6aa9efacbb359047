"""The days that a text names (English), for the age of the thing that a page is about."""

from __future__ import annotations

import re
from collections.abc import Iterable

MONTHS = ("January", "February", "March", "April", "May", "June",
          "July", "August", "September", "October", "November", "December")  # fmt: skip
MONTH, YEAR, DAY = "|".join(MONTHS), r"(1\d{3}|20\d{2})", r"(\d{1,2})(?:st|nd|rd|th)?"
DAY_FIRST = re.compile(rf"\b{DAY}(?: of)? ({MONTH}),? {YEAR}\b")
MONTH_FIRST = re.compile(rf"\b({MONTH}) {DAY},? {YEAR}\b")
MONTH_ONLY = re.compile(rf"\b({MONTH}),? {YEAR}\b")
ISO = re.compile(rf"\b{YEAR}-(\d\d)-(\d\d)\b")
CUES = "in|since|by|from|until|till|during|after|before|circa|early|late|mid|and|to|of|year|born|died|season"
YEAR_ONLY = re.compile(
    rf"(?:\b(?:{CUES})\s|[(–—/])(?:the )?{YEAR}(?=[\s,.;:)–—/-](?!\d))(?! ?(?:km|m|ft|people|°))", re.IGNORECASE
)
IN_CATEGORY = re.compile(rf"\b{YEAR}\b(?! and before)")


def days_named(lead: str, categories: Iterable[str] = ()) -> list[str]:
    """ISO days; the first of the month or year where no more is said. Years 1000 to 2099."""
    found = [(y, MONTHS.index(m) + 1, d) for d, m, y in DAY_FIRST.findall(lead)]
    found += [(y, MONTHS.index(m) + 1, d) for m, d, y in MONTH_FIRST.findall(lead)]
    found += [(y, m, d) for y, m, d in ISO.findall(lead)]
    found += [(y, MONTHS.index(m) + 1, 1) for m, y in MONTH_ONLY.findall(lead)]
    found += [(y, 1, 1) for y in YEAR_ONLY.findall(lead)]
    found += [(y, 1, 1) for name in categories for y in IN_CATEGORY.findall(name)]
    days = ((int(y), int(m), int(d)) for y, m, d in found)
    return [f"{y:04d}-{m:02d}-{d:02d}" for y, m, d in days if 1 <= m <= 12 and 1 <= d <= 31]


def date_of(lead: str, categories: Iterable[str], revised: str | None) -> str | None:
    """The latest day named that is not later than the revision; the revision's where none is named."""
    days = [day for day in days_named(lead, categories) if revised is None or day <= revised]
    return max(days, default=revised)
