"""What a turn says of the results before it, held against them: hits denied, things called missing, quotes and facts invented.

Patterns of English; what is said in other words or languages passes, as everything does that cannot be refuted.
"""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_nb.rewards.critic_memory import Memory, content_words, is_empty, is_error, plain, sentences, words
from megatron_nb.rewards.critic_steps import Step

HITS = r"(?:results?|hits?|match(?:es)?)"
DO_NOT = r"(?:(?:does|did|do) not|(?:does|did|do)n['’]t)"
NO_HITS = re.compile(
    rf"\b(?:(?:found|returned|gave|shows?|brought|yielded|turned up|came (?:back|up) with) (?:me |up )?(?:nothing|no {HITS})"
    rf"|{DO_NOT} (?:bring|find|return|give|yield|show|turn) (?:up )?(?:me )?any(?:thing| {HITS})"
    rf"|no {HITS}|not (?:a single|one|any) {HITS}|nothing (?:was |is |has been |came |turned )?(?:found|returned|up|back|came)"
    r"|(?:was|were|came back|is|are) (?:empty|blank)|empty[- ]handed)\b", re.IGNORECASE,
)  # fmt: skip
TELLS = r"(?:mention|say|name|contain|list|give|tell|stat|speak|includ|refer|describ|show)\w*"
ABSENT = (  # group 1: what is said to be missing from the last result
    re.compile(rf"\b(?:{DO_NOT}|never|fails? to)\s+(?:\w+\s+)?{TELLS}\s+([^.;:!?\n]{{3,90}})", re.IGNORECASE),
    re.compile(r"\b(?:lacks?|silent (?:about|on)|no (?:word|mention|trace|sign) (?:of|on|about)|nothing (?:on|of|about))\s+"
               r"([^.,;:!?\n]{3,90})", re.IGNORECASE),
    re.compile(rf"\bnowhere (?:is|are|does|do) ([^.,;:!?\n]{{3,60}}?) {TELLS}", re.IGNORECASE),
    re.compile(r"([A-Z][^.,;:!?\n]{2,60}?) (?:is|are|was) (?:missing|absent|not (?:there|mentioned|named|listed))\b"),
)  # fmt: skip
NOT_CLAIMED = re.compile(r"\b(?:if|whether|unless|should there be)\b", re.IGNORECASE)
CITES = re.compile(
    r"\b(?:pages?|results?|articles?|texts?|snippets?|passages?|entry|entries|evidence|sources?|hits?)\b|\baccording to\b"
    r"|\b(?:I|we) (?:read|gather|see|learn)\b|\bit (?:is stated|says|states)\b", re.IGNORECASE,
)  # fmt: skip
DENIES = re.compile(
    r"\b(?:not?|never|nor|without|missing|lacks?|nothing|nowhere|might|may|could|perhaps|maybe)\b|n['’]t\b", re.IGNORECASE
)
NAMES = re.compile(r"\b(?:[A-Z][\w'’-]+(?:\s+(?:(?:of|the|de|la|and|von|van)\s+)?[A-Z][\w'’-]+)*|\d{3,})")
QUOTE = re.compile(r"[\"“]([^\"“”\n]{8,300})[\"”]")


def untrue(step: Step, memory: Memory) -> str:
    """What the turn says of results and is not so; "" when nothing is refuted."""
    said = f"{step.thinking}\n{step.text}"
    for quote in QUOTE.findall(said):
        if len(words(quote)) >= 4 and not memory.has(quote):
            return f"cites {quote[:80]!r}, which stands nowhere"
    claims = [sentence for sentence in sentences(said) if not NOT_CLAIMED.search(sentence)]
    return _denied(claims, memory) or _invented(claims, step, memory)


def _denied(claims: list[str], memory: Memory) -> str:
    """Results that are said not to be there, and are."""
    full = [result for result in memory.last if not is_empty(result) and not is_error(result)]
    for claim in claims if full else ():
        if found := NO_HITS.search(claim):
            return f"says {found[0]!r}, but the last call had results"
        for missing in (found[1] for pattern in ABSENT for found in pattern.finditer(claim)):
            if _stands_in(missing, full):
                return f"says that {missing.strip()!r} is missing, but the last result has it"
    return ""


def _stands_in(missing: str, results: list[str]) -> bool:
    """Whether a result has the name that the text begins with, or else all of its telling words in one sentence."""
    telling = content_words(missing)
    if name := NAMES.match(missing.strip()):
        return any(plain(name[0]) in _read(result)[0] for result in results)
    return len(telling) > 1 and any(telling <= said for result in results for said in _read(result)[1])


@lru_cache(maxsize=16)  # a turn may claim thousands of things about the same results
def _read(result: str) -> tuple[str, tuple[set[str], ...]]:
    """plain() of a result, and the telling words of its sentences."""
    return plain(result), tuple(content_words(one) for one in sentences(result))


def _invented(claims: list[str], step: Step, memory: Memory) -> str:
    """Names and numbers that are said to come from the evidence, and stand nowhere. What is asked for next may be a guess."""
    guessed = content_words(" ".join(str(value) for call in step.calls for value in call.arguments.values()))
    for claim in claims if memory.texts else ():
        if not CITES.search(claim) or DENIES.search(claim):
            continue
        _, _, after = QUOTE.sub("", claim).strip().partition(" ")  # the first word is capital for another reason
        for name in NAMES.findall(after):
            if not content_words(name) <= guessed and not memory.has(name) and words(name)[0] not in memory.words:
                return f"says of the evidence {claim.strip()[:100]!r}, but {name!r} stands nowhere in it"
    return ""
