"""An invented wiki of a few dozen pages whose every fact is known, built into a corpus."""

import json
import random
from pathlib import Path

from megatron_nb.search.build import build
from megatron_nb.search.corpus import Corpus

SYLLABLES = ("Bran", "Tol", "Ver", "Mik", "Ost", "Kal", "Dun", "Per", "Sil", "Gor", "Lan", "Fen")
ENDINGS = ("dor", "mere", "vik", "stan", "berg", "lund")
NOUNS = ("harbour", "monastery", "glacier", "observatory", "orchard", "fortress", "lighthouse", "market", "canal", "theatre",
         "quarry", "vineyard")  # fmt: skip
MANNERS = ("coastal", "walled", "terraced", "volcanic", "floating", "abandoned")
REASONS = ("sends barley every autumn to", "buried its founders beside", "borrowed its bells from",
           "quarrels about fishing with", "takes its drinking water from", "copied its statutes from",
           "marries its daughters into")  # fmt: skip
CRAFTS = ("weaving", "pottery", "brewing", "smithing", "printing", "falconry", "carving", "tanning")


def rows(pages: int = 48, links: int = 6, seed: int = 0) -> list[dict]:
    """Pages that each say what they are, when they were founded, and name some others, each in a sentence of its own."""
    rng = random.Random(seed)
    names = [first + end for end in ENDINGS for first in SYLLABLES][:pages]
    found = []
    for number, name in enumerate(names):
        others = rng.sample([other for other in names if other != name], links)
        craft = CRAFTS[number % len(CRAFTS)]
        lead = f"{name} is a {MANNERS[number // len(NOUNS) % len(MANNERS)]} {NOUNS[number % len(NOUNS)]} with {craft} sheds."
        body = [f"The {craft} guild of the valley was founded in {1200 + 7 * number} by {number + 11} stubborn sisters.",
                f"Travellers praise the {rng.choice(CRAFTS)} fair under the crooked oak beside the {craft} gate."]  # fmt: skip
        body += [f"The settlement {reason} {other}." for reason, other in zip(rng.sample(REASONS, links), others)]
        found.append({"title": name, "text": f"{lead}\n\n{' '.join(body)}", "links": others,
                      "date": f"{2000 + number % 20}-{1 + number % 12:02d}-10"})  # fmt: skip
    return found


def small_corpus(folder: Path, **more) -> Corpus:
    """Built once per folder."""
    source = folder / "small.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(**more)))
    build(source, folder / "corpus", workers=1)
    return Corpus.open(folder / "corpus")
