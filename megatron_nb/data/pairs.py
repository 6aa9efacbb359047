"""Preference rows -> packs of scored documents, for reward models: what is compared with each other shares a pack.

A *unit* is what the loss needs together: the two answers of a pair (point-wise), the two orders of a pair (pair-wise), or
one graded answer. A step takes `batch` units and lays them into as few equally long packs as hold them. Everything is
a function of the step, so the saved state is a number. Units are kept in memory as tokens, 4 bytes each.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_nb.data.fingerprint import same_data
from megatron_nb.data.mixture import Mixture, check_weights
from megatron_nb.data.packing import pack
from megatron_nb.data.preferences import Grade, Preference, answer_text, pair_text, read
from megatron_nb.data.rows import BadRow
from megatron_nb.data.split import held_out
from megatron_nb.data.tokenizer import tokenizer_digest
from megatron_nb.records import Batch, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
SHOWN = 5  # bad rows named in one message


@dataclass
class Unit:
    """samples: of a pair the better answer (or order) and then the other, with one pair_id; else one graded answer."""

    samples: list[Sample]
    lengths: tuple[int, ...]  # characters of the answers, the better one first

    @property
    def tokens(self) -> int:
        return sum(map(len, self.samples))


@dataclass
class PairSource:
    """One file, folder or glob of preference rows."""

    path: str
    weight: float | None = None  # share of the draws; None on every source: each row once per epoch


@dataclass
class PairConfig:
    """The data section of a reward model."""

    sources: dict[str, PairSource] = field(default_factory=dict)
    validation: dict[str, PairSource] = field(default_factory=dict)  # held-out rows; empty: heldout_share of the sources
    heldout_share: float = 0.05  # of the prompts of every source, by their hash: the same in every run
    tokenizer: str | None = None  # folder of a Hugging Face model or checkpoint; None: that of init_from
    chat_template: str | None = None  # a Jinja file, or chatml (built in); None: the tokenizer's own
    bad_rows: str = "error"  # a row that breaks a rule: error | skip
    shuffle: bool = True
    changed: str = "error"  # data other than that of the checkpoint: error | restart (the order begins anew)

    def validate(self) -> None:
        """Raises ValueError for a setting that no run could use."""
        for name, allowed in (("bad_rows", ("error", "skip")), ("changed", ("error", "restart"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"data.{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not self.sources:
            raise ValueError("data.sources is empty: training needs at least one source; set data.sources.NAME.path")
        if not 0 <= self.heldout_share < 1:
            raise ValueError(
                f"data.heldout_share={self.heldout_share} must be at least 0 and below 1: it is a share of the prompts"
            )
        check_weights({name: source.weight for name, source in self.sources.items()}, list(self.sources))


def open_pairs(
    config: PairConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, pairwise: bool, vocab_size: int | None = None
) -> tuple[dict[str, list[Unit]], list[Unit]]:
    """({source: training units}, held-out units). ValueError for rows and tokens that cannot be used, and for none left."""
    config.validate()
    share = 0.0 if config.validation else config.heldout_share
    training, heldout = {}, []
    for name, source in config.sources.items():
        rows = _checked(name, source.path, config.bad_rows == "skip", pairwise)
        split = {side: [row for row in rows if held_out(_prompt(row), share) == side] for side in (False, True)}
        training[name] = _fitting(name, _tokenised(split[False], tokenizer, pairwise), seq_len)
        heldout += _fitting(f"held-out {name}", _tokenised(split[True], tokenizer, pairwise), seq_len)
        if not training[name]:
            raise ValueError(f"data source {name}: none of its {len(rows)} rows is left to train on; raise seq_len or add rows")
    for name, source in config.validation.items():
        rows = _checked(name, source.path, config.bad_rows == "skip", pairwise)
        heldout += _fitting(name, _tokenised(rows, tokenizer, pairwise), seq_len)
    for unit in (unit for units in (*training.values(), heldout) for unit in units):
        for sample in unit.samples:
            if vocab_size is not None and sample.ids.max() >= vocab_size:
                raise ValueError(
                    f"{sample.sample_id} holds token {sample.ids.max()}, beyond model.vocab_size={vocab_size}: every id needs "
                    "an embedding; use the model's own tokenizer"
                )
    return training, heldout


def _checked(name: str, path: str, skip: bool, pairwise: bool) -> list[Preference | Grade]:
    rows, bad = [], []
    for where, row in read(path, name):
        if isinstance(row, Grade) and pairwise:
            row = BadRow.at(where, "a graded answer", "a pair-wise model compares two: rows have chosen and rejected")
        (bad if isinstance(row, BadRow) else rows).append(row)
    if bad and (not skip or not rows):
        more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise ValueError(
            f"data source {name}: {len(bad)} of {len(bad) + len(rows)} rows cannot be used:\n  "
            + "\n  ".join(map(str, bad[:SHOWN])) + more
        )  # fmt: skip
    if bad:
        log.warning("%s: %d bad rows left out, first: %s", name, len(bad), bad[0])
    return rows


def _prompt(row: Preference | Grade) -> str:
    """What rows with the same conversation share, so that none of them is on both sides of the split."""
    return json.dumps([(message["role"], message["content"]) for message in row.conversation.messages])


def _tokenised(rows: list[Preference | Grade], tokenizer: PreTrainedTokenizerBase, pairwise: bool) -> list[Unit]:
    texts = []
    for row in rows:
        x = row.conversation
        if isinstance(row, Grade):
            texts.append(answer_text(x, row.answer, tokenizer))
        elif pairwise:
            texts += [pair_text(x, a, b, tokenizer) for a, b in ((row.chosen, row.rejected), (row.rejected, row.chosen))]
        else:
            texts += [answer_text(x, answer, tokenizer) for answer in (row.chosen, row.rejected)]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids if texts else []
    tokens, units = iter(encoded), []
    for row in rows:
        name = f"{row.conversation.source}/{row.conversation.sample_id}"
        if isinstance(row, Grade):
            units.append(Unit([_sample(next(tokens), name, row.score)], (len(row.answer),)))
        else:
            samples = [_sample(next(tokens), name, 0.5 if row.tie else 1.0, name) for _ in range(2)]
            units.append(Unit(samples, (len(row.chosen), len(row.rejected))))
    return units


def _sample(ids: list[int], name: str, label: float, pair: str = "") -> Sample:
    weight = np.broadcast_to(np.float32(0), len(ids))  # no token is a target
    return Sample(np.array(ids, np.int32), weight, name, pair_id=pair, label=label)


def _fitting(name: str, units: list[Unit], seq_len: int) -> list[Unit]:
    """The units that a pack can hold whole; the others are counted and left out."""
    kept = [unit for unit in units if unit.tokens <= seq_len]
    if left := len(units) - len(kept):
        longest = max(unit.tokens for unit in units)
        log.warning(
            "%s: %d of %d rows are dropped, their documents together are longer than seq_len=%d (longest %d)",
            name, left, len(units), seq_len, longest,
        )  # fmt: skip
    log.info("%s: %d rows, %d tokens", name, len(kept), sum(unit.tokens for unit in kept))
    return kept


# ------------------------------------------------------------------ packs
def score_pack(units: Sequence[tuple[int, Unit]], length: int, multiple: int = 1) -> Batch:
    """One pack of numbered units, with `documents` as losses/reward.py reads them and `unit`, [S] the number (fill -1)."""
    packed = pack([sample for _, unit in units for sample in unit.samples], length, multiple)
    rows = []
    for place, (number, unit) in enumerate(units):
        pair, signs = (place, (1, -1)) if len(unit.samples) == 2 else (-1, (0,))
        rows += [(pair, sign, sample.label, number) for sign, sample in zip(signs, unit.samples)]
    rows += [(-1, 0, np.nan, -1)] * (len(packed.sample_ids) - len(rows))
    import torch

    pair, sign, label, unit = (torch.tensor(column) for column in zip(*rows))
    packed.documents = {"pair": pair, "sign": sign, "label": label.float(), "unit": unit}
    packed.count = len(units)
    return packed


def lay_out(sizes: Sequence[int], capacity: int, groups: int) -> list[list[int]]:
    """Numbers of the units of each pack: the fewest packs that first fit needs, rounded up to a multiple of `groups`.

    Spread evenly (longest first onto the emptiest pack) when that fits, so that packs can be short.
    """
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    first_fit: list[list[int]] = []
    room: list[int] = []
    for number in order:
        place = next((at for at, left in enumerate(room) if left >= sizes[number]), len(room))
        if place == len(room):
            room.append(capacity)
            first_fit.append([])
        room[place] -= sizes[number]
        first_fit[place].append(number)
    count = -(-max(len(first_fit), 1) // groups) * groups
    spread, load = [[] for _ in range(count)], [0] * count
    for number in order:
        place = load.index(min(load))
        load[place] += sizes[number]
        spread[place].append(number)
    return spread if max(load) <= capacity else first_fit + [[] for _ in range(count - len(first_fit))]


def packs_of(
    units: Sequence[Unit], seq_len: int, data_rank: int, data_size: int, multiple: int, micro_multiple: int
) -> list[Batch]:
    """This data rank's packs of these units; every rank gets equally many, all of one length that `multiple` divides."""
    sizes = [unit.tokens for unit in units]
    bins = lay_out(sizes, seq_len, data_size * micro_multiple)
    longest = max(sum(sizes[number] for number in numbers) for numbers in bins)
    length = -(-longest // multiple) * multiple
    return [
        score_pack([(number, units[number]) for number in numbers], length, multiple) for numbers in bins[data_rank::data_size]
    ]


class PairLoader:
    """Iterator over the training steps: `next(loader)` is this data rank's packs of `batch` units.

    state: of `state()`, to continue right after the step it was taken at. Raises ValueError when the data changed since,
    unless `changed` is "restart".
    """

    def __init__(
        self, training: dict[str, list[Unit]], config: PairConfig, tokenizer: PreTrainedTokenizerBase, *, batch: int,
        seq_len: int, seed: int, data_rank: int = 0, data_size: int = 1, multiple: int = 1, micro_multiple: int = 1,
        state: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.batch, self.units = batch, list(training.values())
        self.layout = (seq_len, data_rank, data_size, multiple, micro_multiple)
        weights = {name: config.sources[name].weight for name in training}
        self.mixture = Mixture({name: len(units) for name, units in training.items()}, weights, seed, config.shuffle)
        self.fingerprint = {"batch": str(batch), "seq_len": str(seq_len), "seed": str(seed), "shuffle": str(config.shuffle)}
        self.fingerprint |= {"tokenizer": tokenizer_digest(tokenizer)[:16], "weights": json.dumps(weights)}
        self.fingerprint |= {f"source {name}": _digest(units) for name, units in training.items()}
        self.step = self.origin = 0
        if state:
            self._restore(state, config.changed)

    def _restore(self, state: dict[str, Any], changed: str) -> None:
        self.step, self.origin = state["step"], state["origin"]
        if not same_data(self.step, state["data"], self.fingerprint, changed):
            self.origin = self.step

    def state(self) -> dict[str, Any]:
        """The consumed position, as plain values."""
        return {"step": self.step, "origin": self.origin, "data": self.fingerprint}

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        units = self.drawn()
        self.step += 1
        return packs_of(units, *self.layout)

    def drawn(self) -> list[Unit]:
        """The units of the next step, over all data ranks."""
        begin = (self.step - self.origin) * self.batch
        return [self.units[source][row] for source, row in zip(*self.mixture.draws(begin, begin + self.batch))]


def _digest(units: list[Unit]) -> str:
    digest = hashlib.sha256()
    for sample in (sample for unit in units for sample in unit.samples):
        digest.update(sample.ids.tobytes() + f"{sample.label} {sample.pair_id}".encode())
    return digest.hexdigest()[:16]
