"""A simple walker over the wikispeedia articles: it answers chains of links with the real tools, in words of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
import lzma
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from pathlib import Path
from urllib.parse import unquote

from megatron_nb.rollout.calls import Call
from megatron_nb.rollout.toolbox import Toolbox
from megatron_nb.rollout.tools import ToolsConfig

PAGE_WORDS = 220
BOILERPLATE = r"SOS Children works in .*?SOS Children in [^.\n]*|This is a featured article.*?information\."
NAME = r"(?<=[a-z] )[A-Z][a-z]{4,}(?: [A-Z][a-z]+)*|\b1[0-9]{3}\b"
COMMON = set("""the of and in a to is was it as by for with on from that its are were at an or which this be has have
    not""".split())  # noqa: SIM905


@dataclass
class Hit:
    title: str
    snippet: str
    score: float = 0.0


class Wiki:
    """The articles and those links whose target is named in the article's text; a Search over titles and beginnings."""

    def __init__(self, folder: Path, articles: int = 1500):
        self.pages: dict[str, str] = {}
        with lzma.open(folder / "wikispeedia_articles_8k.jsonl.xz", "rt") as rows:
            for line in rows:
                row = json.loads(line)
                parts = re.split(r"\n\s*\n", row["text"].replace("#copyright", ""))
                text = "\n\n".join(" ".join(part.split()) for part in parts[3:] if len(part.split()) > 12)
                text = re.sub(BOILERPLATE, "", text)
                if len(text) > 2500:
                    self.pages[row["title"].replace("_", " ")] = text
                if len(self.pages) == articles:
                    break
        self.links: dict[str, list[str]] = defaultdict(list)
        with gzip.open(folder / "wikispeedia_links.tsv.gz", "rt") as lines:
            for line in lines:
                if line.startswith("#") or "\t" not in line:
                    continue
                source, target = (unquote(name).replace("_", " ") for name in line.rstrip("\n").split("\t"))
                text = self.pages.get(source, "") if target in self.pages else ""
                if target in text and sentence_with(text, target):
                    self.links[source].append(target)

    @cached_property
    def _index(self) -> dict[str, set[str]]:
        index: dict[str, set[str]] = defaultdict(set)
        for title, text in self.pages.items():
            for word in tokens(title + " " + text[:700]):
                index[word].add(title)
        return index

    async def search(self, query: str, k: int) -> list[Hit]:
        scores: Counter[str] = Counter()
        for word in set(tokens(query)) - COMMON:
            for title in self._index.get(word, ()):
                scores[title] += log(len(self.pages) / len(self._index[word])) * (2 if word in tokens(title) else 1)
        best = sorted(scores, key=lambda title: (-round(scores[title], 6), title))[:k]
        return [Hit(title, self.pages[title][:220], scores[title]) for title in best]

    async def page(self, title: str) -> str | None:
        return self.pages.get(title)


def tokens(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def sentence_with(text: str, name: str) -> str:
    """The first sentence that names it whole; "" for none."""
    for sentence in re.split(r"(?<=[.!?])\s+|\n\n", text):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence) and 40 < len(sentence) < 400:
            return sentence
    return ""


def telling(text: str, rng: random.Random, count: int) -> list[str]:
    """Some words that are not common, in their order."""
    found = [word for word in re.findall(r"[^\W\d_]{4,}", text) if word.lower() not in COMMON]
    return [found[at] for at in sorted(rng.sample(range(len(found)), min(count, len(found))))]


@dataclass
class Turn:
    """What an agent does in one turn. raw: the text of a call that cannot be read."""

    thinking: str
    calls: list[Call] = field(default_factory=list)
    raw: str = ""
    text: str = ""
    kind: str = "good"


@dataclass
class Walk:
    row: dict
    turns: list[Turn]
    wiki: Wiki


def call(name: str, **arguments) -> Call:
    return Call(name, arguments, "")


async def walk_of(wiki: Wiki, rng: random.Random, hops: int) -> Walk | None:
    """A chain of links with a question, and turns that follow it; None where the chance walk ends early."""
    path = [rng.choice(sorted(wiki.links))]
    while len(path) <= hops:
        onward = [title for title in wiki.links.get(path[-1], ()) if title not in path and len(title) > 3]
        if not onward:
            return None
        path.append(rng.choice(onward))
    last = wiki.pages[path[-1]]
    names = [name for name in re.findall(NAME, last) if name not in path[-1]]
    if not names:
        return None
    answer = rng.choice(names[:6])
    proof = sentence_with(last, answer)
    if not proof:
        return None
    head = re.split(r"(?<=[.!?])\s", wiki.pages[path[0]])[0].replace(path[0], "it")
    clues = [f"Something is told of like this: {head[:240]}"]
    clues += [f"From there one comes to what has to do with {', '.join(telling(wiki.pages[title][:300], rng, 3))}."
              for title in path[1:]]  # fmt: skip
    question = " ".join([*clues, f"What fills the gap there? '{proof.replace(answer, '____')}'"])
    evidence = [sentence_with(wiki.pages[a], b) for a, b in zip(path, path[1:])]
    hops_ = [{"title": title, "evidence": quote, "link": following} for title, quote, following in
             zip(path, evidence, path[1:])] + [{"title": path[-1], "evidence": proof}]  # fmt: skip
    row = {"id": "", "question": question, "answer": answer, "hops": hops, "path": hops_, "answer_evidence": proof}
    turns = await _turns(wiki, rng, path, evidence, head, answer, proof)
    return Walk(row, turns, wiki) if turns else None


async def _turns(wiki, rng, path, evidence, head, answer, proof) -> list[Turn]:
    """What the walker does; it looks at what the tools show, and asks only for what it has not read. [] when it is lost."""
    tools, words = toolbox(wiki), telling(head, rng, 6)
    if len(words) < 3:
        return []

    async def read(title: str) -> str:
        return (await tools.call(call("open_page", title=title))).text

    found = (await tools.call(call("search", query=" ".join(words)))).text
    turns = [Turn(rng.choice([
        f"The beginning speaks of {' '.join(words)}; those are good words to start from.",
        f"First I want the thing with {' '.join(words)}.",
        f"Clue one: {head[:240]}",
    ]), [call("search", query=" ".join(words))])]  # fmt: skip
    if f"] {path[0]}\n" not in found:
        turns[0].kind = "fruitless"
        turns.append(Turn(f"None of these is it. It might be {path[0]}, as far as I know.", [call("search", query=path[0])]))
    turns.append(Turn(rng.choice([f"{path[0]} fits the first clue.", f"That sounds like {path[0]}. I read about {path[0]}."]),
                      [call("open_page", title=path[0])]))  # fmt: skip
    for source, target, quote in zip(path, path[1:], evidence):
        part, text = " ".join(quote.split()[:9]), await read(source)
        seen = " ".join(quote.split()) in " ".join(text.split())
        thought = rng.choice([
            f"Under {source} I read \"{part}\", so {target} comes next." if seen else f"So it was {target}.",
            f"{source} leads on to {target}.",
            f"The link to follow is {target}, as the page on {source} mentions it.",
            f"Good: {target} is named. On to {target}.",
        ])  # fmt: skip
        if not re.search(rf"(?<!\w){re.escape(target)}(?!\w)", text, re.IGNORECASE):
            turns.append(Turn(rng.choice([
                f"Somewhere in {source} there must be a link about {target}.",
                f"What I have read of {source} does not mention {target}; I look for the name in all of it.",
                f"The first part says nothing of {target}, so I look further down in {source}.",
            ]), [call("find_in_page", title=source, text=target)]))  # fmt: skip
        if rng.random() < 0.35:
            more = " ".join(telling(wiki.pages[target][:200], rng, 2))
            turns.append(Turn(thought, [call("search", query=f"{target} {more}")]))
            thought = f"{target} is there among them."
        turns.append(Turn(thought, [call("open_page", title=target)]))
    if answer not in await read(path[-1]):
        near = " ".join(proof.replace(answer, "____").split("____")[0].split()[-3:]) or answer
        turns.append(Turn(f"The sentence with the gap has the words {near}; where are they in {path[-1]}?",
                          [call("find_in_page", title=path[-1], text=near)]))  # fmt: skip
    turns.append(Turn(f"The sentence reads: {proof}", text=f"The gap in the sentence is filled by it.\nAnswer: {answer}"))
    return turns


def toolbox(wiki: Wiki) -> Toolbox:
    config = ToolsConfig(names=["search", "open_page", "find_in_page"], page_tokens=PAGE_WORDS * 2, result_tokens=1200)
    return Toolbox(config, search=wiki)


async def act(turn: Turn, tools: Toolbox, number: int) -> list[dict]:
    """The messages of a turn: what was said, and what the tools answered."""
    message: dict = {"role": "assistant", "reasoning_content": turn.thinking, "content": turn.text + turn.raw}
    results = await asyncio.gather(*(tools.call(one) for one in turn.calls))
    if turn.calls:
        message["tool_calls"] = [{"id": f"c{number}.{at}", "type": "function",
                                  "function": {"name": one.name, "arguments": one.arguments}}
                                 for at, one in enumerate(turn.calls)]  # fmt: skip
    found = [message, *({"role": "tool", "tool_call_id": f"c{number}.{at}", "content": result.text}
                        for at, result in enumerate(results))]  # fmt: skip
    if turn.raw:
        found.append({"role": "tool", "content": "Error: the call cannot be read."})
    return found
