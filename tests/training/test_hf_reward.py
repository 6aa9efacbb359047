"""Loading reward models for scoring: published ones of other families, padding, and what is refused."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_nb.training.hf_reward import FORWARD_TOKENS, by_length, load_reward_model
from tests.data.data_tokenizers import tiny

SHAPE = {
    "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def _save(folder, family="llama", kind=AutoModelForSequenceClassification, **more):
    torch.manual_seed(0)
    model = kind.from_config(AutoConfig.for_model(family, **SHAPE, num_labels=more.pop("labels", 1)), dtype=torch.float32)
    model.save_pretrained(folder)
    tiny().save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_published_reward_model_scores_as_in_transformers_row_by_row_even_where_rows_end_with_padding(tmp_path, family):
    model = _save(tmp_path, family)
    rows = [[5, 6, 7], [9], [8, 7, 6, 5, 4], [3, 2, 0]]
    module, _, kind = load_reward_model(tmp_path)
    model.config.pad_token_id = None  # transformers then takes the last token of a single row
    expected = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
    assert kind == "pointwise" and torch.allclose(module(rows), expected, atol=1e-6) and not module(rows).requires_grad


def test_a_pairwise_model_is_bounded(tmp_path):
    model = _save(tmp_path, reward_kind="pairwise", reward_bound=0.01)
    plain = model(torch.tensor([[5, 6, 7]])).logits[0, 0].detach()
    module, _, kind = load_reward_model(tmp_path)
    assert kind == "pairwise" and module([[5, 6, 7]]).item() == pytest.approx(0.01 * torch.tanh(plain / 0.01).item(), rel=1e-5)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"kind": AutoModelForCausalLM}, "holds LlamaForCausalLM: a reward model is"),
        ({"labels": 3}, "has 3 labels"),
        ({"reward_kind": "triple"}, "reward_kind='triple' must be one of pointwise, pairwise"),
        ({"reward_kind": "pairwise"}, "reward_bound=None"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, more, words):
    _save(tmp_path, **more)
    with pytest.raises(ValueError, match=words):
        load_reward_model(tmp_path)


def test_forward_passes_hold_every_row_once_within_the_tokens():
    lengths = [1, 9000, 20, 9000, 20000, 3]
    groups = by_length(lengths)
    assert sorted(sum(groups, [])) == list(range(6))
    assert all(len(group) == 1 or len(group) * max(lengths[n] for n in group) <= FORWARD_TOKENS for group in groups)
