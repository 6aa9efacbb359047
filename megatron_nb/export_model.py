"""The Hugging Face folder of a checkpoint, as the last stage of a chain.

python -m megatron_nb.export_model init_from=RUN [overrides]
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field

from megatron_nb.config import ConfigError, job
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.model.hf_config import read_json
from megatron_nb.model.hf_files import parse_size
from megatron_nb.training.checkpoint_folder import resolve
from megatron_nb.training.export import export_hf

log = logging.getLogger(__name__)


@dataclass
class ExportConfig:
    """One export."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    init_from: str = ""  # a run, or a step folder of one
    max_shard_size: str = "5GB"  # of a safetensors file
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        parse_size(self.max_shard_size)


@job(ExportConfig, "export_model")
def main(config: ExportConfig) -> None:
    """Write RUN/model and its size into the summary."""
    if not config.init_from:
        raise ConfigError("init_from is not given: which run is to be exported?")
    step = resolve(config.init_from)
    if step is None:
        raise ConfigError(f"init_from={config.init_from} holds no checkpoint of ours: give a run, or a step-N folder of one")
    if elsewhere(config, "export_model", "megatron_nb.export_model", f"export       {step} to RUN/model"):
        return
    with open_run(config, "export_model") as run:
        model = run.folder / "model"
        for left in run.folder.glob(".model.partial-*"):  # by an attempt that was killed
            shutil.rmtree(left)
        if not model.exists():
            meter = export_hf(step, model, parse_size(config.max_shard_size))
            log.info("%s: %.3f GB in %.1f s", model, meter.total / 1e9, meter.seconds)
        held = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        layers = read_json(model / "config.json")["num_hidden_layers"]
        run.write_summary(0, gigabytes=held / 1e9, layers=layers)


if __name__ == "__main__":
    main()
