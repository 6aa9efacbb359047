"""Random tiny Hugging Face folders, made by transformers itself."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def save_random(
    folder: Path, family: str = "llama", heads: int = 4, groups: int = 2, tied: bool = False, vocabulary: int = 301,
    dtype: torch.dtype = torch.float32, shard: str = "1GB", context: int = 128, layers: int = 2, **settings,
) -> Path:  # fmt: skip
    """A model with every tensor random (biases and norms too), a chat template, and generation settings with two eos ids."""
    import transformers

    config = getattr(transformers, f"{CLASSES[family]}Config")(
        vocab_size=vocabulary,
        hidden_size=40 if heads % 5 == 0 else 32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=8,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0} | settings,
        eos_token_id=[2, 7],
    )
    generator = torch.Generator().manual_seed(heads * 100 + groups)
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + centre)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 7], temperature=0.6, do_sample=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": context}))
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_weights(a: Path, b: Path) -> None:
    """Bit for bit: same names, dtypes, shapes and values."""
    one, two = tensors_in(a), tensors_in(b)
    assert sorted(one) == sorted(two)
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert torch.equal(one[name], two[name]), name
