"""What to train on: the data section of a job, and how it becomes token caches."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_nb.data.formats import FORMATS
from megatron_nb.data.mixture import check_weights
from megatron_nb.data.render import HISTORY


@dataclass
class SourceConfig:
    """One source: rows of one kind with one weight."""

    path: str  # a file, a folder or a glob of .jsonl, .json, .parquet, plain or .gz
    weight: float | None = None  # share of the draws; None on every source: each row once per epoch
    format: str = "auto"  # auto | messages | sharegpt | text


@dataclass
class DataConfig:
    """The data section of a job."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    tokenizer: str | None = None  # folder of a Hugging Face model or checkpoint, or a GGUF file; None: that of init_from
    chat_template: str | None = None  # a Jinja file, or chatml (built in); None: the tokenizer's own
    cache_dir: str = "runs/token-cache"
    workers: int | None = None  # tokenising processes; None: one per core; 0: none but the job's own
    loader_workers: int = 1  # processes that read and pack ahead of the step; 0: none but the job's own
    packing: bool = True  # False: every sample alone, padded to seq_len
    lookahead: int = 512  # samples beyond those due, from which the packer chooses the last ones of a pack
    overlong: str = "error"  # a sample longer than seq_len: error | truncate | drop
    bad_rows: str = "error"  # a row that cannot be read or rendered: error | skip
    history: str = "full"  # full | per_turn, see render.py
    keep_all_think: bool = False  # thinking of earlier turns stays in the context (if the template knows it)
    shuffle: bool = True
    changed: str = "error"  # data other than that of the checkpoint: error | restart (the order begins anew)

    def validate(self) -> None:
        """Raises ValueError for a setting that no run could use."""
        choices = {
            "overlong": ("error", "truncate", "drop"),
            "bad_rows": ("error", "skip"),
            "history": HISTORY,
            "changed": ("error", "restart"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"data.{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not self.sources:
            raise ValueError("data.sources is empty: training needs at least one source; set data.sources.NAME.path")
        check_weights({name: source.weight for name, source in self.sources.items()}, list(self.sources))
        for name, source in [*self.sources.items(), *self.validation.items()]:
            if source.format not in FORMATS:
                raise ValueError(f"data source {name}: format={source.format!r} must be one of {', '.join(FORMATS)}")
        for name, least in (("workers", 0), ("loader_workers", 0), ("lookahead", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least {least}")
