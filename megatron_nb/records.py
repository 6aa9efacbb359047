"""The types that cross folders. Everything else is private to its folder.

Legend: L tokens of one sample, T packed tokens of one pack, S documents in a pack.

A *stream* is a per-token array. In a Sample, stream[i] belongs to token i as the token that is predicted. `pack` shifts
once, so in a Batch stream[t] belongs to targets[t]; nobody else shifts. Fill values: weight 0, turn -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # data workers read and pack without loading torch
    import torch

STREAMS = ("loss_weight", "behaviour_logprob", "old_logprob", "ref_logprob", "advantage", "turn_id")


@dataclass
class Conversation:
    """Messages in the OpenAI form, checked and mended, before any template.

    messages: {"role": system|user|assistant|tool, "content": str, "reasoning_content"?: str,
               "tool_calls"?: [{"id", "type": "function", "function": {"name", "arguments": dict}}], "loss"?: 0|1}
    """

    messages: list[dict[str, Any]]
    sample_id: str
    source: str
    tools: list[dict[str, Any]] | None = None


@dataclass
class Sample:
    """One training row as token ids; every stream is [L]."""

    ids: np.ndarray  # [L] int64
    loss_weight: np.ndarray  # [L] float32, 0 where the token is not trained
    sample_id: str
    source: str = ""
    behaviour_logprob: np.ndarray | None = None  # [L] float32, of the engine that sampled the token
    old_logprob: np.ndarray | None = None  # [L] float32, of the trainer before the first update on this batch
    ref_logprob: np.ndarray | None = None  # [L] float32
    advantage: np.ndarray | None = None  # [L] float32
    turn_id: np.ndarray | None = None  # [L] int32, -1 outside turns
    rollout_id: str = ""
    group_id: str = ""
    pair_id: str = ""
    label: float | None = None  # of the whole document: the grade of a graded answer; losses of scores read it
    count: int | None = None  # share of the divisor of the mean; None: the trained tokens
    prefix: int = 0  # > 0: goes on from a document of so many tokens, which its pack holds before it (data/prefix.py)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Batch:
    """One pack (one micro-batch), whole or already split for one context-parallel rank.

    Whole: T is the pack's length. Split: T is the local length and `index` holds the pack positions of the local tokens.
    """

    ids: torch.Tensor  # [T] int64, inputs
    targets: torch.Tensor  # [T] int64, the token after ids[t] in its document; 0 where there is none (weight 0)
    loss_weight: torch.Tensor  # [T] float32, of targets
    index: torch.Tensor  # [T] int64, position in the pack
    start: torch.Tensor  # [T] int64, position in the pack where the token's document begins
    cu_seqlens: torch.Tensor  # [S + 1] int64, of the whole pack, last == pack length; a tail fill is the last document
    count: int  # integer share of the global divisor; 0 on context-parallel ranks other than 0
    sample_ids: list[str] = field(default_factory=list)  # one per document, "" for a fill
    streams: dict[str, torch.Tensor] = field(default_factory=dict)  # other streams of STREAMS, [T], as targets
    documents: dict[str, torch.Tensor] = field(default_factory=dict)  # [S] values by document; never split
    # (first, stop, of, end): the documents in tokens first..stop go on from tokens of..end, each as if alone behind them
    shared: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def pack_length(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def positions(self) -> torch.Tensor:
        """[T] rotary positions: they restart in every document, at 0 or where its shared prefix ends."""
        positions = self.index - self.start
        for first, stop, of, end in self.shared:
            positions[first:stop] += end - of
        return positions

    def to(self, device: torch.device) -> Batch:
        """The same pack on another device."""
        move = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("ids", "targets", "loss_weight", "index", "start", "cu_seqlens")
        }
        streams = {name: stream.to(device, non_blocking=True) for name, stream in self.streams.items()}
        documents = {name: values.to(device, non_blocking=True) for name, values in self.documents.items()}
        rest = {"count": self.count, "sample_ids": self.sample_ids, "shared": self.shared}
        return Batch(**move, **rest, streams=streams, documents=documents)


@dataclass
class Prompt:
    """A conversation up to the turn to be sampled, and its tokens."""

    conversation: Conversation
    ids: list[int]  # after template and tools, with the generation header
    data: dict[str, Any] = field(default_factory=dict)  # the row's other fields: what rewards compare with (answer, tests, ...)


@dataclass
class Score:
    """What a reward says of one rollout. reward None means invalid: it never becomes a number."""

    reward: float | None
    turn_rewards: list[float] | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Turn:
    """One turn of a rollout: ids[start:stop]."""

    start: int
    stop: int
    kind: str  # assistant | tool
    calls: int = 0  # of an assistant turn: those that could be read
    status: str = ""  # assistant: eos | length | malformed (a call in it could not be read); tool: ok | error | failed
    reward: float | None = None


@dataclass
class Rollout:
    """One training row of an episode as token ids; ids, sampled_mask, logprob, weight_version and turn_id are equally long.

    An episode whose context was cut or restarted is several rows: same group_id, index and score, segment 0, 1, ...
    """

    prompt_ids: list[int]
    ids: list[int]  # after the prompt: what was sampled and, between turns, what tools answered
    sampled_mask: list[bool]
    logprob: list[float]  # of the engine, at the temperature of `sampling`; 0 where not sampled
    weight_version: list[int]  # of the weights that sampled the token; -1 where not sampled
    turn_id: list[int]  # index into `turns`
    turns: list[Turn]
    status: str  # how the episode ended, the same in all its rows: done | length | turns | invalid
    sampling: dict[str, Any]
    seed: int
    group_id: str
    index: int  # within the group
    segment: int = 0
    text: str = ""  # of the last assistant turn, thinking included, end-of-turn token left out
    score: Score | None = None
    advantage: float | None = None  # written by `credit`, for those who look at the file

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index}"


@dataclass
class Group:
    """The rollouts of one prompt in one step; their rewards are compared with each other."""

    group_id: str
    prompt: Prompt
    rollouts: list[Rollout]  # rows: those of an episode follow one another, by segment

    @property
    def episodes(self) -> list[list[Rollout]]:
        """The rows of every rollout in the order of their segments; the rollouts in the order of their first rows here."""
        found: dict[int, list[Rollout]] = {}
        for row in self.rollouts:
            found.setdefault(row.index, []).append(row)
        return [sorted(rows, key=lambda row: row.segment) for rows in found.values()]
