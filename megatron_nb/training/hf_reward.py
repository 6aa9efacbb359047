"""A trained reward model for scoring, through transformers: of a Hugging Face folder, a run, or a step folder.

The convention: *ForSequenceClassification with one label; in config.json "reward_kind": "pointwise" (also when it is
missing, so published reward models work) or "pairwise" with its "reward_bound". What is scored is written by
data/preferences.py: `answer_ids` for point-wise, `pair_ids` for pair-wise models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_nb.data.tokenizer import load_tokenizer
from megatron_nb.losses.reward import bounded
from megatron_nb.model.global_tensors import HF
from megatron_nb.model.hf import CheckpointWeights
from megatron_nb.model.hf_config import config_to_hf, read_json
from megatron_nb.training.checkpoint_folder import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KINDS = ("pointwise", "pairwise")
FORWARD_TOKENS = 16384  # padding included: bounds the memory of one forward pass


class RewardModel(torch.nn.Module):
    """Scores of token rows; kind is one of KINDS; bound (pair-wise) as in losses/reward.py."""

    def __init__(self, model: PreTrainedModel, kind: str, bound: float | None):
        super().__init__()
        self.model, self.kind, self.bound = model.eval(), kind, bound

    @torch.no_grad()
    def forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows of token ids -> [n] fp32 scores of their last tokens, bounded for pair-wise models."""
        scores = torch.zeros(len(rows))
        for numbers in by_length([len(row) for row in rows]):
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(rows[number]) for number in numbers], batch_first=True)
            last = torch.tensor([len(rows[number]) - 1 for number in numbers])
            mask = torch.arange(ids.shape[1])[None] <= last[:, None]
            device = self.model.device
            hidden = self.model.base_model(ids.to(device), attention_mask=mask.long().to(device)).last_hidden_state
            # ours, not transformers': it looks for the last token that is no padding, which an end of turn may be
            rows_of_last = hidden[torch.arange(len(last)), last].float()
            scores[torch.tensor(numbers)] = (rows_of_last @ self.model.score.weight[0].float()).cpu()
        return scores if self.bound is None else bounded(scores, self.bound)


def by_length(lengths: list[int]) -> list[list[int]]:
    """Numbers of the rows of each forward pass, rows of like length together."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if not groups or (len(groups[-1]) + 1) * lengths[number] > FORWARD_TOKENS:
            groups.append([])
        groups[-1].append(number)
    return groups


def load_reward_model(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[RewardModel, PreTrainedTokenizerBase, str]:
    """(model, tokenizer, kind). ValueError when the folder holds no reward model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    step = resolve(path)
    folder = Path(path) if step is None else step / HF
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if step is not None:
        weights = CheckpointWeights(step)
        raw = config_to_hf(weights.config, raw)
    architectures = raw.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ValueError(
            f"{path} holds {', '.join(architectures) or 'no config.json'}: a reward model is a *ForSequenceClassification of "
            "one label; train one on it with megatron_nb.reward_model"
        )
    kind = raw.get("reward_kind", "pointwise")
    if kind not in KINDS:
        raise ValueError(f"{folder}/config.json: reward_kind={kind!r} must be one of {', '.join(KINDS)}")
    if kind == "pairwise" and not isinstance(raw.get("reward_bound"), (int, float)):
        raise ValueError(f"{folder}/config.json: reward_bound={raw.get('reward_bound')!r} must be that of its training")
    if step is None:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, local_files_only=True)
    else:
        with torch.random.fork_rng([]):  # its first weights are drawn: a resumed run would draw them once more
            model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**raw), dtype=dtype)
        model.load_state_dict(dict(weights.hf_tensors()))
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        raise ValueError(
            f"{path} has {model.config.num_labels} labels: a reward model has one, by a linear layer named score; take another"
        )
    module = RewardModel(model.to(device), kind, float(raw["reward_bound"]) if kind == "pairwise" else None)
    return module, load_tokenizer(str(folder)), kind
