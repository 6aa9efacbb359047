"""Preference pairs of a strong and a weak model's answers to the same prompts: judged, ties dropped, length balanced.

A pair takes the side with the higher score as chosen, whichever model wrote it. Then pairs are dropped until length
says nothing: among pairs whose answers differ by about as much, the chosen one is the longer as often as the shorter. All pairs
of a prompt lie in one part, so parts share no prompt and reward models trained on two of them judge each other's work.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nb.data.preferences import final_answer
from megatron_nb.data.prompts import PromptSource, read_prompt
from megatron_nb.data.rows import data_files, decode, raw_rows
from megatron_nb.records import Score
from megatron_nb.run import write_atomic
from megatron_nb.synthesis.adversarial import KINDS, adversarial
from megatron_nb.synthesis.answers import Question

RESIDUE = 0.01  # of the mean |difference|: what may be left of the mean difference


@dataclass
class QuestionConfig:
    """The prompts, and how many of them are made difficult."""

    sources: dict[str, PromptSource] = field(default_factory=dict)
    limit: int | None = None  # prompts that are taken at most: the first ones of each source
    adversarial_share: float = 0.1  # of prompts whose last user turn is transformed, see adversarial.py
    adversarial_kinds: list[str] = field(default_factory=lambda: list(KINDS))

    def validate(self) -> None:
        """Raises ValueError for what no job could use."""
        if not self.sources:
            raise ValueError("prompts.sources is empty: pairs need prompts; set prompts.sources.NAME.path=FILE")
        if not 0 <= self.adversarial_share <= 1:
            raise ValueError(f"prompts.adversarial_share={self.adversarial_share} must be in [0, 1]")
        unknown = sorted(set(self.adversarial_kinds) - set(KINDS))
        if unknown or (self.adversarial_share and not self.adversarial_kinds):
            raise ValueError(f"prompts.adversarial_kinds={self.adversarial_kinds} must be some of {', '.join(KINDS)}")


@dataclass
class PairsConfig:
    """From judged answers to pairs."""

    margin: float = 0.0  # scores that differ by no more are a tie, and ties are dropped
    balance_length: bool = True
    parts: dict[str, float] = field(default_factory=dict)  # file name: share of prompts; empty: one file, pairs.jsonl

    def validate(self) -> None:
        """Raises ValueError for what no job could use."""
        if self.margin < 0:
            raise ValueError(f"pairs.margin={self.margin} must not be negative")
        if self.parts and (min(self.parts.values()) <= 0 or abs(sum(self.parts.values()) - 1) > 1e-6):
            raise ValueError(f"pairs.parts={self.parts} must be shares above 0 that sum to 1")


# ------------------------------------------------------------------ prompts
def read_questions(config: QuestionConfig, seed: int) -> tuple[list[Question], Counter]:
    """(questions in the order of the files, what was left out). Raises ValueError and BadRow."""
    questions: dict[str, Question] = {}
    dropped: Counter = Counter()
    for source, given in config.sources.items():
        taken = 0
        for file in data_files(given.path):
            for where, raw in raw_rows(file):
                if config.limit is not None and taken >= config.limit:
                    break
                conversation, data = read_prompt(decode(where, raw), where, source)
                told = json.dumps([conversation.messages, conversation.tools], sort_keys=True)
                name = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
                taken += 1
                if name in questions:
                    dropped["duplicate"] += 1
                    continue
                questions[name] = _transformed(Question(name, conversation, data), config, seed)
    return list(questions.values()), dropped


def _transformed(question: Question, config: QuestionConfig, seed: int) -> Question:
    """The question, or by chance its adversarial version; the id stays that of the original."""
    rng = random.Random(f"{seed}/{question.id}")
    asked = any(message["role"] == "user" for message in question.conversation.messages)
    if not asked or rng.random() >= config.adversarial_share:
        return question
    kind = rng.choice(config.adversarial_kinds)
    changed = question.with_messages(adversarial(question.conversation.messages, kind, rng))
    changed.adversarial = kind
    return changed


# ------------------------------------------------------------------ pairs
@dataclass
class Judged:
    """The answers to one question with their scores, alike in number on both sides."""

    question: Question  # with its history complete
    answers: dict[str, list[dict[str, Any]]]  # strong, weak -> rows of Answer
    scores: dict[str, list[Score]]


@dataclass
class Pair:
    """chosen and rejected: {"text", "by": strong|weak, "score"}."""

    question: Question
    chosen: dict[str, Any]
    rejected: dict[str, Any]

    @property
    def longer(self) -> int:
        """Characters by which the chosen answer is longer."""
        return len(self.chosen["text"]) - len(self.rejected["text"])


def pairs_of(judged: Judged, margin: float, dropped: Counter) -> Iterator[Pair]:
    """The pairs of one question, the n-th strong with the n-th weak answer; what gives none is counted in `dropped`."""
    for number in range(min(len(answers) for answers in judged.answers.values())):
        sides = []
        for by in ("strong", "weak"):
            answer, score = judged.answers[by][number], judged.scores[by][number]
            sides.append({"text": final_answer(answer["text"]), "by": by, "score": score.reward, "whole": answer["whole"]})
        sides.sort(key=lambda side: -float("inf") if side["score"] is None else -side["score"])
        chosen, rejected = sides
        if None in (chosen["score"], rejected["score"]):
            dropped["not_judged"] += 1
        elif not chosen["text"] or not rejected["text"]:
            dropped["empty"] += 1
        elif chosen["text"] == rejected["text"]:
            dropped["same"] += 1
        elif chosen["score"] - rejected["score"] <= margin:
            dropped["tie"] += 1
        elif not chosen.pop("whole"):
            dropped["chosen_cut_off"] += 1
        else:
            rejected.pop("whole")
            yield Pair(judged.question, chosen, rejected)


def part_of(question: Question, parts: dict[str, float]) -> str:
    """The part of a question: a fixed choice by its id, whatever else is in the file."""
    place = int(question.id, 16) / 16 ** len(question.id)
    edge = 0.0
    for name, share in parts.items():
        edge += share
        if place < edge:
            return name
    return name


# ------------------------------------------------------------------ length
def length_bias(pairs: list[Pair]) -> dict[str, float]:
    """How much length tells: mean difference in characters, and the correlation of being chosen with length."""
    if not pairs:
        return {"length_difference": 0.0, "length_correlation": 0.0}
    lengths = np.array([len(side["text"]) for pair in pairs for side in (pair.chosen, pair.rejected)], float)
    won = np.tile([1.0, 0.0], len(pairs))
    correlation = float(np.corrcoef(lengths, won)[0, 1]) if lengths.std() > 0 else 0.0
    return {"length_difference": float(np.mean([pair.longer for pair in pairs])), "length_correlation": correlation}


def balanced(pairs: list[Pair], seed: int) -> list[Pair]:
    """The pairs without those by which a longer (or shorter) answer would win more often; order kept.

    Strata by |difference|, an octave each: in every one as many pairs are kept where chosen is longer as where it is shorter.
    What a stratum's width leaves of the mean is then taken out pair by pair.
    """
    rng = random.Random(seed)
    strata: dict[int, list[list[int]]] = {}
    for number, pair in enumerate(pairs):
        if pair.longer:
            strata.setdefault(abs(pair.longer).bit_length(), [[], []])[pair.longer > 0].append(number)
    kept = {number for number, pair in enumerate(pairs) if not pair.longer}
    for shorter, longer in strata.values():
        fewest = min(len(shorter), len(longer))
        for side in (shorter, longer):
            kept.update(rng.sample(side, fewest))
    total = sum(pairs[number].longer for number in kept)
    size = sum(abs(pairs[number].longer) for number in kept)
    while abs(total) > RESIDUE * size:  # the one that brings the mean nearest to 0
        worst = min(sorted(kept), key=lambda number: abs(total - pairs[number].longer))
        kept.remove(worst)
        total, size = total - pairs[worst].longer, size - abs(pairs[worst].longer)
    return [pair for number, pair in enumerate(pairs) if number in kept]


# ------------------------------------------------------------------ files
def write_pairs(folder: Path, judged: list[Judged], config: PairsConfig, models: dict[str, str], seed: int) -> dict[str, float]:
    """folder/PART.jsonl for every part, rows as data/preferences.py reads them; what was kept, dropped and why."""
    dropped: Counter = Counter()
    found = [pair for one in judged for pair in pairs_of(one, config.margin, dropped)]
    kept = balanced(found, seed) if config.balance_length else found
    measured: dict[str, float] = {}
    folder.mkdir(parents=True, exist_ok=True)
    parts = config.parts or {"pairs": 1.0}
    for name in parts:
        part = [pair for pair in kept if part_of(pair.question, parts) == name]
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(_row(pair, models)) + "\n" for pair in part))
        measured |= {f"pairs_{name}": len(part)} if config.parts else {}
    dropped["length_balance"] = len(found) - len(kept)
    before, after = length_bias(found), length_bias(kept)
    measured |= {f"{key}_before": value for key, value in before.items()} | {f"{key}_after": v for key, v in after.items()}
    measured["pairs"] = len(kept)
    measured["strong_chosen"] = sum(pair.chosen["by"] == "strong" for pair in kept) / max(len(kept), 1)
    measured["adversarial"] = sum(bool(pair.question.adversarial) for pair in kept)
    measured["multi_turn"] = sum(_turns(pair) > 1 for pair in kept)
    return measured | {f"dropped_{reason}": count for reason, count in sorted(dropped.items())}


def _turns(pair: Pair) -> int:
    return sum(message["role"] == "user" for message in pair.question.conversation.messages)


def _row(pair: Pair, models: dict[str, str]) -> dict[str, Any]:
    """One pair as JSON; its provenance says who wrote what and how it was judged."""
    question = pair.question
    sides = {"chosen": pair.chosen, "rejected": pair.rejected}
    provenance = {name: {"by": side["by"], "model": models[side["by"]], "score": side["score"]} for name, side in sides.items()}
    row = {
        "id": question.id, "prompt": question.conversation.messages, "chosen": pair.chosen["text"],
        "rejected": pair.rejected["text"], "source": question.conversation.source,
        "provenance": provenance | {"adversarial": question.adversarial, "user_turns": _turns(pair)},
    }  # fmt: skip
    return row | ({"tools": question.conversation.tools} if question.conversation.tools else {})
