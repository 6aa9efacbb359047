"""The stage files: every one, with every option of every group, is a configuration its job accepts; the recipe's numbers."""
from __future__ import annotations

import pytest
import yaml

from megatron_nb import (
    cascade,
    evaluate,
    export_model,
    headline,
    refine_solutions,
    reward_model,
    rl,
    sft,
    synthesize_complexity,
    synthesize_preferences,
    synthesize_questions,
    synthesize_trajectories,
)
from megatron_nb.config import STAGES, build, compose, flatten, to_yaml
from megatron_nb.data.mixture import check_weights
from megatron_nb.model.shape import ModelConfig

SCHEMAS = (
    sft.SftConfig, reward_model.RewardModelConfig, rl.RlConfig, synthesize_preferences.PreferencesConfig,
    synthesize_complexity.ComplexityConfig, synthesize_trajectories.TrajectoriesConfig,
    refine_solutions.RefineConfig, synthesize_questions.QuestionsConfig, cascade.CascadeConfig,
    evaluate.EvaluateConfig, export_model.ExportConfig, headline.HeadlineConfig,
)  # fmt: skip
JOBS = {schema.__name__: schema for schema in SCHEMAS}
STAGE_FILES = sorted(STAGES.glob("*.yaml"))
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in STAGES.glob("*/*.yaml"))
# a small model goes neither with long contexts nor with many ranks
SMALL = ("model=tiny", "parallel=cpu1", "context=2k", "answers=short")


def schema_of(stage):
    first = yaml.safe_load(stage.read_text())["defaults"][0]
    assert first in JOBS, f"{stage.name}: the first default must be the job's schema, one of {', '.join(JOBS)}"
    return JOBS[first]


def groups_of(stage):
    """The groups that a stage file lets one choose from."""
    return [key for default in yaml.safe_load(stage.read_text())["defaults"] if isinstance(default, dict) for key in default]


CHOICES = [(stage, option) for stage in STAGE_FILES for option in OPTIONS if option.split("=")[0] in groups_of(stage)]


@pytest.mark.parametrize(("stage", "option"), CHOICES, ids=[f"{stage.stem}-{option}" for stage, option in CHOICES])
def test_every_stage_composes_with_every_option(stage, option):
    (group, name), groups = option.split("="), groups_of(stage)
    small = [word for word in SMALL if word.split("=")[0] in groups and not word.startswith(group)]
    others = small if option in ("model=tiny", "model=smollm2_135m", "answers=short") else []
    config = compose(schema_of(stage), stage.stem, [*others, option])
    assert build(type(config), yaml.safe_load(to_yaml(config))) == config
    if group in ("model", "optimizer", "launch"):  # what the file says is what the job gets
        section = to_dict(config)[group]
        said = flatten(yaml.safe_load((STAGES / group / f"{name}.yaml").read_text()))
        lengths_set = ("defaults", "rope_theta")  # the rope base is that of the stage's length
        assert all(flatten(section)[key] == value for key, value in said.items() if key not in lengths_set)


def to_dict(config):
    return yaml.safe_load(to_yaml(config))


@pytest.mark.parametrize("stage", STAGE_FILES, ids=lambda path: path.stem)
def test_a_stage_file_begins_with_what_it_trains_and_the_command(stage):
    lines = stage.read_text().split("defaults:")[0].splitlines()
    assert lines and all(line.startswith("#") for line in lines)
    assert "python -m megatron_nb." in "\n".join(lines)


def test_every_group_option_says_what_it_is():
    for path in STAGES.glob("*/*.yaml"):
        comments = [line for line in path.read_text().splitlines()[:2] if line.startswith("#") and "@package" not in line]
        assert comments, f"{path}: begin with a comment that says what this option is"


def test_dense_3b_is_the_recipes_model():
    model = compose(sft.SftConfig, "sft").model
    assert model.num_parameters == 3_933_637_120
    assert model == ModelConfig(rope_theta=5e6)


def test_smollm2_has_its_published_size():
    assert compose(sft.SftConfig, "sft", ["model=smollm2_135m", *SMALL[1:3]]).model.num_parameters == 134_515_008


@pytest.mark.parametrize(("context", "length", "theta"), [("32k", 32768, 5e6), ("64k", 65536, 2e7), ("256k", 262144, 7e7)])
def test_each_context_stage_has_its_rope_base_and_the_same_tokens_an_update(context, length, theta):
    config = compose(sft.SftConfig, "sft", [f"context={context}"])
    assert (config.seq_len, config.model.rope_theta, config.model.rope_scaling) == (length, theta, None)
    assert config.seq_len * config.global_batch_size == 2**22


def test_the_256k_mixture_has_the_recipes_shares():
    sources = compose(sft.SftConfig, "sft", ["data=mixture_256k"]).data.sources
    shares = check_weights({name: source.weight for name, source in sources.items()}, list(sources))
    expected = {"code": 27, "deep_search": 26, "stem": 23, "tool_use": 13, "general": 10}
    assert shares == pytest.approx({name: part / 99 for name, part in expected.items()})


@pytest.mark.parametrize(
    ("parallel", "context"), [("h100_8", "32k"), ("h100_64", "64k"), ("h100_256k", "256k"), ("h100_8_256k", "256k")]
)
def test_each_gpu_layout_fits_its_devices_and_tells_its_peak(parallel, context):
    config = compose(sft.SftConfig, "sft", [f"parallel={parallel}", f"context={context}", "launch.dry_run=true"])
    assert config.parallel.device_memory_gb == 80 and config.log.peak_tflops == 989
    assert "memory of the fullest rank" in sft.describe_job(config)


def test_a_layout_that_does_not_fit_is_refused():
    config = compose(sft.SftConfig, "sft", ["parallel=h100_8", "context=256k", "launch.dry_run=true"])
    with pytest.raises(ValueError, match="the fullest rank needs"):
        sft.describe_job(config)


def test_the_sft_demo_mixes_two_sources_and_holds_a_part_out():
    data = compose(sft.SftConfig, "sft", ["data=demo_sft", *SMALL[:3]]).data
    assert len(data.sources) == 2 and set(data.validation) == set(data.sources)
    assert not {source.path for source in data.sources.values()} & {source.path for source in data.validation.values()}
