"""Draw i -> Sample: sources that fit seq_len, in the order of the mixture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from megatron_nb.data.cache import TokenCache
from megatron_nb.data.mixture import Mixture
from megatron_nb.data.prepare import prepare
from megatron_nb.data.sources import DataConfig
from megatron_nb.records import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def open_datasets(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int, vocab_size: int | None = None
) -> tuple[Dataset, dict[str, Dataset]]:
    """The endless training data, and each validation source as a finite set in file order; caches are built where missing.

    Raises ValueError for settings, rows and tokens that cannot be used.
    """
    config.validate()
    weights = {name: source.weight for name, source in config.sources.items()}
    training = prepare(config.sources, config, tokenizer)
    validation = prepare(config.validation, config, tokenizer)
    for cache in [*training.values(), *validation.values()]:
        check_vocabulary(cache, tokenizer, vocab_size)
    for name, cache in validation.items():
        if same := [other for other, seen in training.items() if seen.digest == cache.digest]:
            log.warning(
                "validation source %s is the same data as training source %s: its loss says nothing about new data",
                name,
                same[0],
            )
    held_out = {name: Dataset({name: cache}, seq_len, config.overlong, endless=False) for name, cache in validation.items()}
    drawn = Dataset(training, seq_len, config.overlong, weights, seed, config.shuffle)
    for dataset in (drawn, *held_out.values()):
        dataset.require_trained()
    return drawn, held_out


def check_vocabulary(cache: TokenCache, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> None:
    """Raises ValueError when the cache holds a token the model has no embedding for."""
    if vocab_size is not None and (found := cache.first_beyond(vocab_size)):
        name, token = found
        raise ValueError(
            f"data source {cache.source}: sample {name} holds token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), "
            f"beyond model.vocab_size={vocab_size}: every id needs an embedding; use the model's own tokenizer"
        )


class Dataset:
    """Samples by draw.

    endless: draws go on for ever in the mixture's order (training); otherwise every row once, as it stands (validation).
    overlong: what happens to samples longer than seq_len: error | truncate | drop. Counts of both are in `counts`.
    """

    def __init__(
        self,
        caches: dict[str, TokenCache],
        seq_len: int,
        overlong: str = "error",
        weights: dict[str, float | None] | None = None,
        seed: int = 1234,
        shuffle: bool = True,
        endless: bool = True,
    ):
        self.caches, self.seq_len, self.overlong, self.endless = caches, seq_len, overlong, endless
        self._list = list(caches.values())
        self._kept = [
            np.arange(len(cache)) if overlong != "drop" else np.flatnonzero(cache.lengths <= seq_len) for cache in self._list
        ]
        self.counts = {cache.source: self._apply_length_rule(cache) for cache in self._list}
        sizes = {name: len(kept) for name, kept in zip(caches, self._kept)}
        self.mixture = Mixture(sizes, weights, seed, shuffle and endless)
        self.size = sum(sizes.values())
        self._trained = [cache.trained(seq_len) for cache in self._list]

    def _apply_length_rule(self, cache: TokenCache) -> dict[str, int]:
        """Counts what is cut or left out; raises for overlong="error"."""
        over = np.flatnonzero(cache.lengths > self.seq_len)
        tokens = int(cache.lengths[over].sum(dtype=np.int64))
        counts = {
            "samples": len(cache),
            "tokens": int(cache.lengths.sum(dtype=np.int64)),
            "truncated_samples": 0,
            "truncated_tokens": 0,
        }
        counts |= {"dropped_samples": 0, "dropped_tokens": 0}
        if not len(over):
            return counts
        many = f"{len(over)} of {len(cache)} samples are longer than seq_len={self.seq_len}"
        found = f"data source {cache.source}: {many} (longest {cache.lengths[over].max()})"
        if self.overlong == "error":
            raise ValueError(
                f"{found}, first {cache.name(int(over[0]))}: a sample is never split; "
                "raise seq_len, or set data.overlong=truncate or drop"
            )
        if self.overlong == "truncate":
            counts |= {"truncated_samples": len(over), "truncated_tokens": tokens - len(over) * self.seq_len}
            silent = int((cache.trained(self.seq_len)[over] == 0).sum())
            lost = counts["truncated_tokens"]
            log.warning("%s: cut to seq_len, %d tokens lost, %d of them keep no trained token", found, lost, silent)
        else:
            counts |= {"dropped_samples": len(over), "dropped_tokens": tokens}
            log.warning("%s: left out, %d tokens lost", found, tokens)
        return counts

    def require_trained(self) -> None:
        """Raises ValueError for a source that would be drawn and has no token to learn from or be judged by."""
        for cache, kept, trained in zip(self._list, self._kept, self._trained):
            share = 1.0 if self.mixture.weights is None else self.mixture.weights[cache.source]
            if share and not trained[kept].any():
                raise ValueError(
                    f"data source {cache.source}: none of its {len(kept)} samples has a trained token within seq_len="
                    f'{self.seq_len}, first {cache.name(int(kept[0]))}: its loss would be 0 of nothing; mend "loss": 0 in its '
                    "rows, raise seq_len, or leave the source out"
                )

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source numbers, rows of the caches) of these draws, which lie near one another."""
        if not len(draws):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        begin = int(draws.min())
        sources, rows = self.mixture.draws(begin, int(draws.max()) + 1)
        sources, rows = sources[draws - begin], rows[draws - begin]
        return sources, np.array([self._kept[source][row] for source, row in zip(sources, rows)], np.int64)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] tokens of these draws, at most seq_len."""
        sources, rows = self.locate(np.arange(start, stop))
        return np.minimum([self._list[source].lengths[row] for source, row in zip(sources, rows)], self.seq_len).astype(
            np.int64
        )

    def sizes(self, draws: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source numbers, tokens, trained tokens) of these draws."""
        sources, rows = self.locate(np.asarray(draws, np.int64))
        tokens = [min(int(self._list[source].lengths[row]), self.seq_len) for source, row in zip(sources, rows)]
        trained = [int(self._trained[source][row]) for source, row in zip(sources, rows)]
        return sources, np.asarray(tokens, np.int64), np.asarray(trained, np.int64)

    def samples(self, draws: list[int]) -> list[Sample]:
        """The samples of these draws."""
        return [
            self._list[source].sample(int(row), self.seq_len) for source, row in zip(*self.locate(np.asarray(draws, np.int64)))
        ]

    def names(self, draws: list[int]) -> list[str]:
        """Their ids, with the source in front."""
        found = zip(*self.locate(np.asarray(draws, np.int64)))
        return [f"{self._list[source].source}/{self._list[source].name(int(row))}" for source, row in found]

    def fingerprint(self) -> dict[str, str]:
        """What decides the order and content of the draws, to compare with that of a checkpoint."""
        mixture = self.mixture
        shares = mixture.weights or dict.fromkeys(mixture.names)
        parts = {f"source {name}": f"{cache.digest[:16]} weight {shares[name]}" for name, cache in self.caches.items()}
        return parts | {
            "seq_len": str(self.seq_len),
            "overlong": self.overlong,
            "seed": str(mixture.seed),
            "shuffle": str(mixture.shuffle),
        }
