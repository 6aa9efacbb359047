"""The models behind point-wise and pair-wise rewards: rows of token ids in, one score each out, batched across calls."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.losses.reward import bounded
from megatron_nb.model.hf_config import read_json
from megatron_nb.training.checkpoint_folder import resolve
from megatron_nb.training.hf_reward import by_length, load_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GATHER_S = 0.003  # how long a forward pass waits for further rows
OURS = ("Llama", "Qwen2", "Qwen3")  # families that load_reward_model knows
BOUND = 20.0  # of the logit difference of a language model that answers A or B

Rows = Sequence[Sequence[int]]


class Batcher:
    """Rows of concurrent calls in one forward pass, in a thread: the event loop goes on. Any event loop may call."""

    def __init__(self, forward: Callable[[Rows], torch.Tensor]):
        self._forward, self._lock = forward, threading.Lock()
        self._pending: list[tuple[Sequence[int], Future[float]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    async def scores(self, rows: Rows) -> list[float]:
        """One score per row. Raises what the forward pass raises."""
        futures: list[Future[float]] = [Future() for _ in rows]
        with self._lock:
            self._pending += zip(rows, futures)
        self._thread.submit(self._drain)
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    def _drain(self) -> None:
        with self._lock:
            if not self._pending:
                return  # an earlier pass took this call's rows
        time.sleep(GATHER_S)
        with self._lock:
            taken, self._pending = self._pending, []
        work = [(row, future) for row, future in taken if future.set_running_or_notify_cancel()]  # nobody waits for the others
        if not work:
            return
        try:
            scores = self._forward([row for row, _ in work]).tolist()
        except Exception as error:
            for _, future in work:
                future.set_exception(error)
            return
        for (_, future), score in zip(work, scores):
            future.set_result(score)


class LastLogits(torch.nn.Module):
    """Scores by a transformers model of any family: its one label, or with `letters` (ids of A and B) logit A - logit B."""

    def __init__(self, model: PreTrainedModel, letters: tuple[int, int] | None = None):
        super().__init__()
        self.model, self.letters = model.eval(), letters

    @torch.no_grad()
    def forward(self, rows: Rows) -> torch.Tensor:
        """Rows of token ids -> [n] fp32."""
        scores = torch.zeros(len(rows))
        for numbers in by_length([len(row) for row in rows]):
            ids = pad_sequence([torch.tensor(rows[number]) for number in numbers], batch_first=True, padding_value=self._pad())
            last = torch.tensor([len(rows[number]) - 1 for number in numbers])
            mask = (torch.arange(ids.shape[1])[None] <= last[:, None]).long()
            device = self.model.device
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()
            if self.letters is None:
                scores[torch.tensor(numbers)] = logits[:, 0]
            else:
                a, b = logits[torch.arange(len(last)), last][:, list(self.letters)].unbind(1)
                scores[torch.tensor(numbers)] = a - b
        return scores if self.letters is None else bounded(scores, BOUND)

    def _pad(self) -> int:
        return self.model.config.pad_token_id or 0


@dataclass(eq=False)
class Scorer:
    """A loaded model: rows -> scores; kind: pointwise | pairwise | letters (a language model, which is to answer A or B)."""

    forward: Callable[[Rows], torch.Tensor]
    tokenizer: PreTrainedTokenizerBase
    kind: str


_LOADED: weakref.WeakValueDictionary[tuple[str, str, str], Scorer] = weakref.WeakValueDictionary()


def load_scorer(checkpoint: str, device: torch.device | str, dtype: str) -> Scorer:
    """The model of a run, a step folder or a Hugging Face folder; terms that name the same one at the same time share it.

    ValueError when the folder holds none.
    """
    key = (str(Path(checkpoint).resolve()), str(device), dtype)
    if (found := _LOADED.get(key)) is None:
        found = _LOADED[key] = Scorer(*_load(checkpoint, device, getattr(torch, dtype)))
    return found


def _load(
    checkpoint: str, device: torch.device | str, dtype: torch.dtype
) -> tuple[Callable[[Rows], torch.Tensor], PreTrainedTokenizerBase, str]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    folder = Path(checkpoint)
    raw = read_json(folder / "config.json") if resolve(checkpoint) is None else {}
    architecture = (raw.get("architectures") or [""])[0]
    if not raw or architecture.startswith(OURS) and not architecture.endswith("ForCausalLM"):
        return load_reward_model(checkpoint, device, dtype)
    tokenizer = load_tokenizer(checkpoint)
    if architecture.endswith("ForCausalLM"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
        return LastLogits(model, letters_of(tokenizer, checkpoint)), tokenizer, "letters"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
    if model.config.num_labels != 1:
        raise ValueError(f"checkpoint={checkpoint!r} has {model.config.num_labels} labels: a reward model has one")
    return LastLogits(model), tokenizer, "pointwise"


def letters_of(tokenizer: PreTrainedTokenizerBase, checkpoint: str) -> tuple[int, int]:
    """The tokens of A and B as a turn begins with them."""
    found = [tokenizer(letter, add_special_tokens=False).input_ids for letter in "AB"]
    if any(len(ids) != 1 for ids in found):
        raise ValueError(f"checkpoint={checkpoint!r}: its tokenizer has no single tokens for A and B, found {found}")
    return found[0][0], found[1][0]
