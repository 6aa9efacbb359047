"""What the SFT job checks before it works, and how it counts steps."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import yaml

from megatron_nb import sft
from megatron_nb.config import compose
from megatron_nb.model.shape import ModelConfig
from megatron_nb.training.start import find_origin

WORDS = ["model=tiny", "parallel=cpu1", "context=2k", "data=files", "data.sources.a.path=a.jsonl"]


def test_replay_numbers_steps_as_the_log_does(caplog):
    """Update k of the log takes batch k - 1 of the loader."""
    batch = SimpleNamespace(sample_ids=["a/1", ""])
    loader = SimpleNamespace(batch=lambda number: {6: [batch]}[number])
    trainer = SimpleNamespace(topology=SimpleNamespace(pipeline_size=2), gradients=lambda packs, loss: (len(packs) * 6.0, 6))
    with caplog.at_level(logging.INFO, logger="megatron_nb"):
        sft.replay(trainer, loader, 7)
    assert "step 7, micro-batch 0: loss 2.000000 over 3 tokens: a/1" in caplog.text


@pytest.mark.parametrize(
    ("word", "rule"), [("replay_step=0", "at least 1"), ("layer_norms_every=0", "at least 1"), ("seed=-1", "not be negative")]
)
def test_a_number_below_its_least_is_refused(word, rule):
    with pytest.raises(ValueError, match=f"{word} must (be )?{rule}"):
        compose(sft.SftConfig, "sft", [*WORDS, word])


def test_a_dry_run_refuses_weights_that_mean_nothing():
    with pytest.raises(ValueError, match="sum to 0"):
        sft.describe_job(compose(sft.SftConfig, "sft", [*WORDS, "data.sources.a.weight=0", "launch.dry_run=true"]))


def test_a_checkpoint_of_another_shape_is_refused_before_anything_is_built(tmp_path):
    model = compose(sft.SftConfig, "sft", WORDS).model
    step = tmp_path / "step-00000001"
    step.mkdir()
    (step / "COMPLETE").touch()
    (step / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(model)}))
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    new = {"rope_theta": 5e6, "max_position_embeddings": 2**18, "rope_scaling": scaling}
    longer = ModelConfig(**dataclasses.asdict(model) | new)
    assert find_origin(str(step), longer).step_folder == step
    with pytest.raises(ValueError, match="num_layers is 2 there, 3 here"):
        find_origin(str(step), ModelConfig(**dataclasses.asdict(model) | {"num_layers": 3}))
