"""RL rows -> micro-batches: equally many packs for each data rank, and nearly equal work.

The cost of a row of n tokens is n + n^2 / attention_length: linear layers cost the same for every token, causal attention grows
with the row. Rows go to data ranks by cost, then within a rank to packs by tokens: a rank's packs are equally long, so what
fill they need is wasted on linear layers. Ranks with long rows get fewer tokens, so lengths differ between data ranks, which
no group of megatron-core minds: pipeline, tensor and context ranks share a data rank.
The plan depends on the rows alone, so every rank makes the same one without talking.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_nb.data.packing import lay_out, pack
from megatron_nb.data.prefix import units
from megatron_nb.records import STREAMS, Batch, Sample

UNITS_OF_A_RANK = 4  # at least, of rows that share a prefix


def balanced(
    samples: Sequence[Sample],
    *,
    data_rank: int,
    data_size: int,
    max_tokens: int,
    attention_length: float,
    multiple: int = 1,
    micro_multiple: int = 1,
    share_prefixes: bool = False,
) -> list[Batch]:
    """This data rank's packs of the samples; ranks without enough of them get packs of weight zero.

    max_tokens: of a pack. attention_length: n at which attention costs as much as the linear layers (about 12 * hidden).
    multiple: of the length of a pack. micro_multiple: of the number of packs (pipeline stages).
    share_prefixes: what the rows of a group begin with is computed once a pack (data/prefix.py).
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
    room = max_tokens // multiple * multiple
    # with several ranks units stay small enough to be dealt evenly
    most = room if data_size == 1 else min(room, -(-sum(map(len, samples)) // (UNITS_OF_A_RANK * data_size)))
    blocks = units(samples, most, share_prefixes)
    lengths = [sum(map(len, block)) for block in blocks]
    share = plan(lengths, data_size, room, attention_length, micro_multiple)[data_rank]
    longest = max(sum(lengths[i] for i in places) for places in share)
    length = max(-(-longest // multiple), 1) * multiple
    return [pack([row for i in places for row in blocks[i]], length, multiple, streams) for places in share]


def plan(
    lengths: Sequence[int], data_size: int, max_tokens: int, attention_length: float, micro_multiple: int = 1
) -> list[list[list[int]]]:
    """[data_size][packs] positions of rows: the fewest packs that this greedy rule fits, equally many a rank."""
    tokens = np.asarray(lengths, np.int64)
    costs = tokens + tokens.astype(np.float64) ** 2 / attention_length
    number = max(-(-int(tokens.sum()) // (max_tokens * data_size)), 1)
    number = -(-number // micro_multiple) * micro_multiple
    while True:
        ranks = _fill(np.arange(len(tokens)), costs, tokens, data_size, max_tokens * number)
        shares = [_fill(np.array(places, int), tokens, tokens, number, max_tokens) for places in ranks or []]
        if ranks is not None and None not in shares:
            return shares
        number += micro_multiple


def _fill(places: np.ndarray, costs: np.ndarray, tokens: np.ndarray, number: int, room: int) -> list[list[int]] | None:
    """Rows at `places`, the dearest first, each into the cheapest of `number` bins with room; None when a row finds none."""
    bins: list[list[int]] = [[] for _ in range(number)]
    used, spent = np.zeros(number, np.int64), np.zeros(number)
    for i in places[np.argsort(-costs[places], kind="stable")]:
        cheapest = int(np.where(used + tokens[i] <= room, spent, np.inf).argmin())
        if used[cheapest] + tokens[i] > room:
            return None
        bins[cheapest].append(int(i))
        used[cheapest] += tokens[i]
        spent[cheapest] += costs[i]
    return [sorted(bin) for bin in bins]
