"""config.json <-> ModelConfig, and the arithmetic of a shape."""
import json

import pytest
import torch

from megatron_nb.model.hf_config import config_from_hf, config_to_hf
from megatron_nb.model.hf_names import hf_shapes
from megatron_nb.model.shape import ModelConfig

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 301,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def folder_with(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    return tmp_path


def test_the_recipe_shape_has_its_stated_number_of_parameters():
    config = ModelConfig()
    assert config.num_parameters == 3_933_637_120
    assert sum(torch.Size(shape).numel() for shape in hf_shapes(config).values()) == 3_933_637_120
    assert config.flops_per_token(262144) == pytest.approx(150e9, rel=0.01)  # DESIGN section 5


@pytest.mark.parametrize("changes", [{"tied_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True}])
def test_number_of_parameters_equals_the_sum_over_tensors(changes):
    config = ModelConfig(num_layers=3, hidden_size=64, vocab_size=97, ffn_hidden_size=40, **changes)
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in hf_shapes(config).values())


@pytest.mark.parametrize("vocabulary, tensor, padded", [(166144, 1, 166144), (166144, 8, 166912), (512, 4, 512), (513, 2, 768)])
def test_padded_vocabulary_is_the_smallest_multiple(vocabulary, tensor, padded):
    assert ModelConfig(vocab_size=vocabulary).padded_vocab(tensor) == padded


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_query_groups": 3}, "num_query_groups=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dtype": "fp16"}, "dtype='fp16'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 2.0}}, "high_freq_factor"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**changes)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 7e7},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 7e7, "rope_type": "default"}},
        {"rope_theta": 7e7, "rope_parameters": {"rope_theta": 7e7, "rope_type": "default"}, "rope_scaling": None},
    ],
)
def test_both_spellings_of_rope_are_read(tmp_path, spelling):
    assert config_from_hf(folder_with(tmp_path, **spelling)).rope_theta == 7e7


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_both_spellings(tmp_path, key):
    config = config_from_hf(folder_with(tmp_path, **{key: {"rope_type": "llama3", **LLAMA3}}))
    assert config.rope_scaling == {"rope_type": "llama3", **LLAMA3} and config.rope_theta == 50000.0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, "number of labels=3"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 8}, "use_sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 50000.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs by layer type"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "disagree"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_key_and_value(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        config_from_hf(folder_with(tmp_path, **changes))


def test_a_folder_without_configuration_and_broken_json_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n')
    with pytest.raises(ValueError, match=r"config\.json:2: not valid JSON"):
        config_from_hf(tmp_path)


@pytest.mark.parametrize("family, head_dim", [("llama", 8), ("qwen2", 8), ("qwen3", 128)])
def test_keys_that_the_file_leaves_out_mean_what_transformers_takes_them_for(tmp_path, family, head_dim):
    import transformers

    config = config_from_hf(folder_with(tmp_path, model_type=family, architectures=None))
    assert config.head_dim == head_dim
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads == head_dim
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")


@pytest.mark.parametrize("scaling", [None, {"rope_type": "llama3", **LLAMA3}])
def test_written_configuration_reads_back_and_transformers_sees_the_same_rope(tmp_path, scaling):
    import transformers

    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, head_dim=8, vocab_size=301,
                         rope_theta=5e6, rope_scaling=scaling)  # fmt: skip
    raw = config_to_hf(config)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 5e6
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert config_from_hf(tmp_path) == config
    rope = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope == {"rope_type": "default", **(scaling or {}), "rope_theta": 5e6}


def test_the_origins_other_keys_are_kept_and_what_training_changed_is_updated():
    origin = {**TINY, "eos_token_id": [2, 7], "initializer_range": 0.01, "rope_scaling": None}
    config = ModelConfig(rope_theta=7e7, max_position_embeddings=262144)
    raw = config_to_hf(config, origin)
    assert raw["eos_token_id"] == [2, 7] and raw["initializer_range"] == 0.01
    assert raw["rope_theta"] == 7e7 and raw["max_position_embeddings"] == 262144 and raw["rope_scaling"] is None
    assert raw["torch_dtype"] == "bfloat16" and "dtype" not in raw
    with pytest.raises(ValueError, match="no Hugging Face architecture"):
        config_to_hf(ModelConfig(qkv_bias=True, qk_norm=True))
