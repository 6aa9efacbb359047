"""RL rows -> micro-batches: each data rank gets equally many packs of one length, of nearly equal cost.

The cost of a row of n tokens is n + n^2 / attention_length: linear layers cost the same for every token, causal attention grows
with the row. The plan depends on the rows alone, so every rank makes the same one without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_nb.data.packing import lay_out, pack
from megatron_nb.records import STREAMS, Batch, Sample


def balanced(
    samples: Sequence[Sample],
    *,
    data_rank: int,
    data_size: int,
    max_tokens: int,
    attention_length: float,
    multiple: int = 1,
    micro_multiple: int = 1,
) -> list[Batch]:
    """This data rank's packs of the samples; ranks without enough of them get packs of weight zero.

    max_tokens: of a pack. attention_length: n at which attention costs as much as the linear layers (about 12 * hidden).
    multiple: of the length of a pack. micro_multiple: of the number of packs (pipeline stages).
    Raises ValueError, on every rank alike, for a sample that does not fit and for a stream that is not finite where it counts.
    """
    streams = [name for name in STREAMS[1:] if samples and getattr(samples[0], name) is not None]
    for sample in samples:
        if len(sample) > max_tokens // multiple * multiple:
            raise ValueError(
                f"sample {sample.sample_id} has {len(sample)} tokens, a pack holds max_tokens={max_tokens} in multiples of "
                f"{multiple}: raise it, or shorten prompt and answer"
            )
        lay_out([sample], streams=streams)  # on every rank: a refusal on one alone would leave the others waiting
    lengths = [len(sample) for sample in samples]
    shares = plan(lengths, data_size, max_tokens // multiple * multiple, attention_length, micro_multiple)
    longest = max((sum(lengths[i] for i in places) for share in shares for places in share), default=0)
    length = max(-(-longest // multiple), 1) * multiple
    return [pack([samples[i] for i in places], length, multiple, streams) for places in shares[data_rank]]


def plan(
    lengths: Sequence[int], data_size: int, max_tokens: int, attention_length: float, micro_multiple: int = 1
) -> list[list[list[int]]]:
    """[data_size][packs] positions of rows: the fewest packs that this greedy rule fits, equally many a rank."""
    tokens = np.asarray(lengths, np.int64)
    costs = tokens + tokens.astype(np.float64) ** 2 / attention_length
    order = np.argsort(-costs, kind="stable")
    number = max(-(-int(tokens.sum()) // (max_tokens * data_size)), 1)
    number = -(-number // micro_multiple) * micro_multiple
    while (bins := _fill(order, tokens, costs, number * data_size, max_tokens)) is None:
        number += micro_multiple
    totals = np.array([costs[places].sum() for places in bins])
    shares: list[list[list[int]]] = [[] for _ in range(data_size)]
    spent = np.zeros(data_size)
    for place in np.argsort(-totals, kind="stable"):  # the dearest pack to the rank that has least
        rank = min((r for r in range(data_size) if len(shares[r]) < number), key=lambda r: (spent[r], r))
        shares[rank].append(sorted(bins[place]))
        spent[rank] += totals[place]
    return shares


def _fill(order: np.ndarray, tokens: np.ndarray, costs: np.ndarray, number: int, max_tokens: int) -> list[list[int]] | None:
    """The dearest row first, each into the cheapest pack that has room; None when a row finds none."""
    bins: list[list[int]] = [[] for _ in range(number)]
    used, spent = np.zeros(number, np.int64), np.zeros(number)
    for i in order:
        place = int(np.where(used + tokens[i] <= max_tokens, spent, np.inf).argmin())
        if used[place] + tokens[i] > max_tokens:
            return None
        bins[place].append(int(i))
        used[place] += tokens[i]
        spent[place] += costs[i]
    return bins
