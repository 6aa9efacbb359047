"""An invented wiki for the tiny recipe: pages about places whose every word is one token of the recipe's tokenizer.

A model of two million parameters can learn to search here. In the shortened Wikipedia that the search demo uses it cannot in
minutes: names are cut into many pieces there, and one wrong piece of two hundred ends an episode. A page names three or four
others, each in a sentence of its own, and says some things that can be asked for.
"""

from __future__ import annotations

import random
from typing import Any

FIRSTS = """Amber Birch Copper Dusty Eastern Frozen Golden Hollow Ivory Jade Kindly Lonely Misty Narrow Olive Proud Quiet Rusty
Silver Tidy Upper Velvet Windy Yellow""".split()  # noqa: SIM905
SECONDS = "Abbey Bridge Castle Dale Forge Grove Harbour Island Junction Keep Landing Manor".split()  # noqa: SIM905
PEOPLE = """Agnes Boris Clara Dmitri Edith Fritz Greta Henry Irene Jonas Katya Lukas Martha Nils Olga Peter Quentin Rosa Simon
Tilda Ulrich Vera Walter Xenia Yorick Zelda""".split()  # noqa: SIM905
SEASONS = "spring summer autumn winter".split()  # noqa: SIM905
JOBS = """baker weaver miller smith potter brewer printer tailor fisher shepherd mason painter carver tanner sailor
hunter""".split()  # noqa: SIM905
GOODS = """apples barrels candles dishes eggs feathers grapes hammers jars kettles lanterns mirrors needles onions pearls quilts
ropes saddles tiles urns violins wheels yarns zithers""".split()  # noqa: SIM905
LOOKS = """old red crooked tall blue broken round green wooden painted stone narrow sunny mossy grey iron white hidden busy
empty""".split()  # noqa: SIM905
SPOTS = """gate oak well tower market stable orchard wall chapel pond mill bakery square barn ferry garden quarry cellar hill
fountain""".split()  # noqa: SIM905
DEEDS = "sends carries sells lends brings ships".split()  # noqa: SIM905
LINKS = (
    "Every {season} the {look} {spot} {deed} {count} {goods} to {target} for the {job}.",
    "The {job} by the {look} {spot} {deed} {goods} to {target} each {season}.",
    "In {season} its {job} walks past the {look} {spot} to {target} with {goods}.",
    "A road from the {look} {spot} leads {goods} and {job} to {target} before {season}.",
)
FACTS = (
    "In {season} the {job} who owned the {look} {spot} was {person} with {count} {goods}.",
    "The {goods} of the {look} {spot} were made by {person} the {job}.",
    "Beside the {look} {spot} the {job} once counted {count} {goods} in {season}.",
    "The {look} {spot} keeps {goods} that the {job} bought from {person} in {season}.",
    "Visitors of the {look} {spot} meet {person} who sells {goods} to any {job}.",
)


def _said(form: str, rng: random.Random, **more: str) -> str:
    kinds = {"season": SEASONS, "job": JOBS, "goods": GOODS, "look": LOOKS, "spot": SPOTS, "deed": DEEDS, "person": PEOPLE}
    return form.format(count=rng.randint(10, 99), **{name: rng.choice(words) for name, words in kinds.items()}, **more)


def pages(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Rows as `python -m megatron_nb.search build` reads them. count: at most len(FIRSTS) * len(SECONDS)."""
    titles = rng.sample([f"{first} {second}" for first in FIRSTS for second in SECONDS], count)
    rows = []
    for title in titles:
        links = rng.sample([one for one in titles if one != title], rng.choice((3, 4)))
        body = [_said(rng.choice(LINKS), rng, target=target) for target in links]
        body += [_said(rng.choice(FACTS), rng) for _ in range(5)]
        rng.shuffle(body)
        rows.append({"title": title, "text": f"{title} is a {rng.choice(LOOKS)} place.\n\n{' '.join(body)}", "links": links})
    return rows
