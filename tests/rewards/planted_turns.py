"""Bad turns planted among the walker's. The critic gets messages only; what was planted where stays with the test.

Each kind has several shapes, worded without regard to how any critic reads. Results come from the real tools.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tests.rewards.wiki_walker import Turn, Walk, act, call, sentence_with, telling, toolbox

# kind -> (criteria that must fail, criteria that may fail as well)
TRUTH = {
    "good": ((), ()),
    "fruitless": ((), ("gain",)),  # the walker's first search, where it does not find the page
    "wrong arguments": (("tools",), ("gain", "logic")),  # an error brings nothing
    "repeated query": (("gain",), ("logic",)),
    "ignored evidence": (("logic",), ("gain", "tools")),
    "irrelevant hop": (("gain",), ("logic",)),
}
KINDS = tuple(TRUTH)[2:]


@dataclass
class Place:
    """Where a turn is planted: what has been done, and what the next good turn goes for."""

    walk: Walk
    done: list[Turn]
    last: str  # the latest result
    target: str  # the page of the path that comes next
    rng: random.Random
    fresh: bool = False  # wordings that were not looked at while the rules were written

    @property
    def source(self) -> str:
        """The page that was opened last; "" for none."""
        opened = [one.arguments.get("title") for turn in self.done for one in turn.calls if one.name == "open_page"]
        known = [title for title in opened if title in self.walk.wiki.pages]
        return known[-1] if known else ""

    def elsewhere(self) -> str:
        """A page that is neither on the path nor in the last result."""
        path = {hop["title"] for hop in self.walk.row["path"]}
        while True:
            title = self.rng.choice(list(self.walk.wiki.pages))
            if title not in path and title not in self.last:
                return title


def wrong_arguments(at: Place) -> Turn:
    target, rng = at.target, at.rng
    thought = rng.choice([f"Next I read {target}.", f"{target} it is.", f"More on {target} would help."])
    shapes = [
        Turn(thought, [call("open_page", page_title=target)]),
        Turn(thought, [call("open_page", title=target, page=rng.choice([40, 0, "last"]))]),
        Turn(thought, [call("search", query=target, k=20)]),
        Turn(thought, [call("search")]),
        Turn(thought, [call("search", query=telling(at.last or target, rng, 3))]),  # a list
        Turn(thought, [call("wikipedia_search", query=target)]),
        Turn(thought, [call("open_page", title=target[:-1] + "xq")]),
        Turn(thought, [call("find_in_page", title="links to " + target, text=target)]),
        Turn(thought, [call("find_in_page", title=target)]),
        Turn(thought, raw='<tool_call>\n{"name": "open_page", "arguments": {"title": "' + target + '"}\n</tool_call>'),
        Turn(thought, raw="<tool_call>\nopen_page(" + target + ")\n</tool_call>"),
        Turn(thought, [call("search", query='{"query": "' + target + '", "site": "wikipedia"}')]),
        Turn(thought, [call("search", query=f"https://en.wikipedia.org/wiki/{target}")]),
    ]
    return rng.choice(shapes)


def repeated_query(at: Place) -> Turn | None:
    rng = at.rng
    answered = [one for turn in at.done for one in turn.calls if turn.kind == "good"]
    if not answered:
        return None
    old = rng.choice(answered)
    subject = old.arguments.get("query") or old.arguments["title"]
    thought = rng.choice([
        f"Perhaps {subject} tells more than I noticed.", f"Let me make sure of {subject} before I go on.",
        f"I should look up {subject}.", f"To be thorough: {subject}.",
    ])  # fmt: skip
    if old.name == "search":
        words = old.arguments["query"].split()
        reworded = rng.choice([old.arguments["query"], " ".join(words[::-1]), old.arguments["query"].upper(),
                               "the " + " ".join(sorted(words))])  # fmt: skip
        return Turn(thought, [call("search", query=reworded)])
    return Turn(thought, [call(old.name, **old.arguments)])


def ignored_evidence(at: Place) -> Turn | None:
    """What the turn says of the last result is not so, and it acts upon that."""
    rng, source, target = at.rng, at.source, at.target
    elsewhere = at.elsewhere()
    if not at.last or at.last.startswith("Error") or not source:
        return None
    quote = sentence_with(at.last, target)
    other = call("search", query=f"{elsewhere} {' '.join(telling(at.walk.wiki.pages[elsewhere][:200], rng, 2))}")
    shapes = [
        Turn(f"There was not a single hit, so I try {elsewhere}.", [other]),
        Turn(f"The last call returned nothing of use; it came back empty. {elsewhere} may be the way.", [other]),
        Turn(f"The page says that it was founded by Theodor Quilliam in Brackenheim. I follow up on {elsewhere}.", [other]),
        Turn(f"As the text has it, \"the matter was settled by the treaty of Ossendorp\". That leads to {elsewhere}.", [other]),
        Turn(f"According to the article it all began in Vellmar-on-Sea, so {elsewhere} is what I want.", [other]),
    ]  # fmt: skip
    if at.fresh:
        shapes = [
            Turn(f"My query did not bring up anything. {elsewhere} may do better.", [other]),
            Turn(f"The results list is blank, so on to {elsewhere}.", [other]),
            Turn(f"The entry tells us that Ambrosius Fenwright invented it; {elsewhere} would confirm that.", [other]),
            Turn(f"It is stated there that \"all of it burned down in the winter of that year\", hence {elsewhere}.", [other]),
            Turn(f"From the snippet I gather the year 2891. {elsewhere} should have it.", [other]),
        ]
    if quote and at.fresh:
        shapes += [
            Turn(f"{target} is missing from this page. Maybe {elsewhere}.", [other]),
            Turn(f"The page is silent about {target}, so {elsewhere}.", [other]),
        ]
    elif quote:
        telling_words = " ".join(telling(quote.replace(target, ""), rng, 3))
        shapes += [
            Turn(f"This does not mention {target} at all, nor {telling_words}. I had better try {elsewhere}.", [other]),
            Turn(f"Nowhere is {target} named in what I got. Then {elsewhere}.", [other]),
            Turn(f"I find no word on {target} there; {elsewhere} then.", [other]),
        ]
    return rng.choice(shapes)


def contrary_answer(walk: Walk, rng: random.Random, last: Turn) -> Turn:
    """The episode's last turn with another answer than the evidence has."""
    names = set(re.findall(r"(?<=[a-z] )[A-Z][a-z]{4,}", walk.wiki.pages[walk.row["path"][0]["title"]])) - {walk.row["answer"]}
    wrong = rng.choice([*sorted(names)[:5], "Theodor Quilliam", "1066", "nobody knows"])
    return Turn(last.thinking if rng.random() < 0.5 else f"I take it to be {wrong}.", text=f"From all this:\nAnswer: {wrong}",
                kind="ignored evidence")  # fmt: skip


def irrelevant_hop(at: Place) -> Turn | None:
    rng, source = at.rng, at.source
    path = {hop["title"] for hop in at.walk.row["path"]}
    if not source:
        return None
    linked = [title for title in at.walk.wiki.links[source] if title not in path and title in at.last]
    elsewhere = at.elsewhere()
    shapes = [
        Turn(f"{elsewhere} could have to do with it.", [call("search", query=f"{elsewhere} history")]),
        Turn(f"What about {elsewhere}?", [call("search", query=" ".join(telling(at.walk.wiki.pages[elsewhere][:300], rng, 4))
                                               + f" {elsewhere}")]),
    ]  # fmt: skip
    for title in linked[:6]:
        shapes.append(Turn(f"{title} is linked here; that looks interesting. {title} first.", [call("open_page", title=title)]))
    return rng.choice(shapes)


PLANT = {
    "wrong arguments": wrong_arguments, "repeated query": repeated_query, "ignored evidence": ignored_evidence,
    "irrelevant hop": irrelevant_hop,
}  # fmt: skip


async def episode_of(walk: Walk, rng: random.Random, share: float, fresh: bool = False) -> tuple[list[dict], list[str]]:
    """(messages, kind of every assistant turn), with bad turns before some of the good ones."""
    tools = toolbox(walk.wiki)
    messages, kinds, done, last = [{"role": "user", "content": walk.row["question"]}], [], [], ""
    titles = [hop["title"] for hop in walk.row["path"]]
    for turn in walk.turns:
        todo = [turn]
        if done and turn.calls and rng.random() < share:
            opened = {one.arguments.get("title") for one_turn in done for one in one_turn.calls if one.name == "open_page"}
            target = next((title for title in titles if title not in opened), titles[-1])
            kind = rng.choice(KINDS)
            bad = PLANT[kind](Place(walk, done, last, target, rng, fresh))
            if bad is not None:
                bad.kind = kind
                todo.insert(0, bad)
        elif turn.text and rng.random() < share:
            todo = [contrary_answer(walk, rng, turn)]
        for one in todo:
            new = await act(one, tools, len(kinds))
            messages += new
            kinds.append(one.kind)
            done.append(one)
            if one.calls and len(new) > 1:
                last = "\n".join(message["content"] for message in new[1:])
    return messages, kinds
