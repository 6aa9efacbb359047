"""config.json of a Hugging Face folder <-> ModelConfig.

What cannot be represented is refused, never ignored: the error names key, value and remedy. Everything that is not shape
(token ids, initialiser, versions) stays in the origin's config.json and is carried along.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nb.model.shape import ModelConfig

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
DTYPE_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture, what sets it apart here, and its defaults for keys that config.json may leave out."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads

    def with_head(self, head: str) -> str:
        """The architecture with our "vocabulary" or "score" head."""
        return self.architecture if head == "vocabulary" else self.architecture.replace("CausalLM", "SequenceClassification")


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}
MUST_BE = {  # key: (the only value that can be represented, what it would mean)
    "hidden_act": ("silu", "the MLP is SwiGLU"),
    "attention_bias": (False, "a bias on o_proj has no place in this model"),
    "mlp_bias": (False, "the MLP has no bias"),
    "partial_rotary_factor": (1.0, "rotary embedding turns the whole head"),
    "quantization_config": (None, "weights must be dequantised first"),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError with the file and the position when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); copy the file again from its source") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, must hold a JSON object")
    return value


def config_from_hf(folder: str | Path, dtype: str | None = None) -> ModelConfig:
    """The shape of the model in a Hugging Face folder.

    dtype: "bf16" or "fp32" overrides config.json. Raises ValueError for what cannot be represented.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Hugging Face model folder has config.json beside its weights")
    raw = read_json(path)
    family, head = _family(path, raw)
    for key, (value, why) in MUST_BE.items():
        _refuse(path, key, raw.get(key, value), value, why)
    if raw.get("use_sliding_window", False) and raw.get("sliding_window") is not None:
        _refuse(path, "use_sliding_window", True, False, "every layer attends to the whole document")
    for kind in raw.get("layer_types") or []:
        _refuse(path, "layer_types", kind, "full_attention", "every layer attends to the whole document")
    heads = _get(path, raw, "num_attention_heads")
    hidden = _get(path, raw, "hidden_size")
    theta, scaling = _rope(path, raw)
    return ModelConfig(
        num_layers=_get(path, raw, "num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or family.head_dim or hidden // heads,
        ffn_hidden_size=_get(path, raw, "intermediate_size"),
        vocab_size=_get(path, raw, "vocab_size"),
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_get(path, raw, "max_position_embeddings"),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        head=head,
        dtype=dtype or _dtype(path, raw),
    )


def config_to_hf(config: ModelConfig, origin: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json for a model: the origin's, brought up to date with what training may have changed.

    Rope is written in both spellings (`rope_theta`, `rope_scaling` for transformers 4 and servers; `rope_parameters` for
    transformers 5): a reader that knows only one would otherwise fall back to theta 10000 without a word.
    """
    model_type = next(
        (name for name, family in FAMILIES.items() if (family.qkv_bias, family.qk_norm) == (config.qkv_bias, config.qk_norm)),
        None,
    )
    if model_type is None:
        raise ValueError("qkv_bias=true with qk_norm=true has no Hugging Face architecture here: set one of them to false")
    result = dict(origin or {})
    dtype = DTYPE_NAMES[config.dtype]
    result.update(
        architectures=[FAMILIES[model_type].with_head(config.head)],
        model_type=model_type,
        hidden_act="silu",
        num_hidden_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_hidden_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.norm_epsilon,
        rope_theta=config.rope_theta,
        rope_parameters={"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tied_embeddings,
        **{key: dtype for key in ("dtype", "torch_dtype") if key in result or (key == "dtype" and "torch_dtype" not in result)},
    )
    if config.head == "score" and _labels(result) != 1:
        result.update(id2label={"0": "SCORE"}, label2id={"SCORE": 0})  # transformers counts its labels by these
    if config.rope_scaling or "rope_scaling" in result:
        result["rope_scaling"] = config.rope_scaling
    return result


def _labels(raw: dict[str, Any]) -> int:
    return len(raw["id2label"]) if raw.get("id2label") else raw.get("num_labels", 2)


def _family(path: Path, raw: dict[str, Any]) -> tuple[Family, str]:
    """(family, head)."""
    found = raw.get("model_type")
    if found not in FAMILIES:
        raise ValueError(f"{path}: model_type={found!r} cannot be represented; known are {', '.join(FAMILIES)}")
    family = FAMILIES[found]
    heads = {family.with_head(head): head for head in ("vocabulary", "score")}
    named = raw.get("architectures") or [family.architecture]
    if len(named) != 1 or named[0] not in heads:
        raise ValueError(
            f"{path}: architectures={named} cannot be represented, only {' or '.join(heads)}; use another checkpoint"
        )
    head = heads[named[0]]
    if head == "score":
        _refuse(path, "number of labels", _labels(raw), 1, "a reward model has one score")
    return family, head


def _refuse(path: Path, key: str, found: Any, allowed: Any, why: str) -> None:
    if found != allowed:
        raise ValueError(f"{path}: {key}={found!r} cannot be represented, only {allowed!r}: {why}; use another checkpoint")


def _get(path: Path, raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"{path}: {key} is missing; add it as the model's authors state it")
    return raw[key]


def _dtype(path: Path, raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{path}: dtype={name!r} cannot be kept, only {', '.join(DTYPES)}: give the dtype to convert to")
    return DTYPES[name]


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from either spelling; both may be there when they agree."""
    spellings = {key: dict(raw.get(key) or {}) for key in ("rope_parameters", "rope_scaling")}
    thetas = {"rope_theta": raw.get("rope_theta")}
    scalings: dict[str, Any] = {}
    for key, value in spellings.items():
        if any(isinstance(inner, dict) for inner in value.values()):
            raise ValueError(f"{path}: {key} differs by layer type, which cannot be represented; use another checkpoint")
        thetas[f"{key}.rope_theta"] = value.pop("rope_theta", None)
        whole, why = MUST_BE["partial_rotary_factor"]
        _refuse(path, f"{key}.partial_rotary_factor", value.pop("partial_rotary_factor", whole), whole, why)
        old_name = value.pop("type", "default")
        kind = value.pop("rope_type", old_name)
        if kind not in ("default", "llama3"):
            raise ValueError(
                f"{path}: {key}.rope_type={kind!r} cannot be represented, only 'default' and 'llama3': "
                "use the checkpoint from before its context was stretched, or one with a larger rope_theta"
            )
        if kind == "llama3":
            value.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
            scalings[key] = {"rope_type": kind, **value}
    thetas = {key: float(value) for key, value in thetas.items() if value is not None}
    if len(set(thetas.values())) > 1:
        raise ValueError(f"{path}: the spellings of rope disagree: {thetas}; keep the one that the authors state")
    if len(scalings) == 2 and scalings["rope_parameters"] != scalings["rope_scaling"]:
        raise ValueError(f"{path}: the spellings of rope scaling disagree: {scalings}; keep the one that the authors state")
    return next(iter(thetas.values()), 10000.0), next(iter(scalings.values()), None)
