"""The score head: a float64 reference of transformers and plain torch, the same numbers at every topology, round trips."""

import dataclasses

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import logsigmoid

from megatron_nb.data.pairs import Unit, packs_of
from megatron_nb.losses.reward import Pairwise, PairwiseConfig, Pointwise
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.hf import LiveWeights, load_hf
from megatron_nb.model.hf_config import config_to_hf
from megatron_nb.model.hf_names import hf_shapes
from megatron_nb.model.sharding import bare, named_parameters
from megatron_nb.parallel.topology import ParallelConfig, initialize
from megatron_nb.records import Sample
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.start import find_origin, load_start
from megatron_nb.training.trainer import Trainer
from tests.training.tiny import model_config

SHAPES = {"llama": {}, "tied": {"tied_embeddings": True}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
LAYOUTS = {
    "one": ({}, 1), "dp2": ({}, 2), "tp2": ({"tensor": 2, "sequence_parallel": False}, 2), "tp2-sp": ({"tensor": 2}, 2),
    "pp2": ({"pipeline": 2}, 2), "cp2": ({"context": 2}, 2), "cp2-tp2-sp": ({"context": 2, "tensor": 2}, 4),
    "pp2-vpp2-cp2": ({"pipeline": 2, "virtual_pipeline": 2, "context": 2}, 4),
}  # fmt: skip
CASES = [("llama", name) for name in LAYOUTS] + [("tied", "pp2"), ("tied", "one"), ("qwen3", "tp2-sp"), ("qwen2", "pp2")]
LOSSES = {"pointwise": Pointwise(), "pairwise": Pairwise(PairwiseConfig(bound=2.0, swap=0.7, magnitude=0.05), ramp=0.5)}


def _units():
    """Five pairs (the fourth a tie) and one graded answer, of lengths that straddle every context rank's chunks."""
    random = np.random.default_rng(3)  # no token 0: transformers gives the row of its padding no gradient

    def sample(length, label, pair):
        return Sample(random.integers(1, 300, length), np.zeros(length, np.float32), pair or "g", pair_id=pair, label=label)

    lengths = [(9, 14), (21, 5), (3, 30), (16, 16), (11, 8)]
    pairs = [Unit([sample(n, 0.5 if i == 3 else 1.0, f"p{i}") for n in both], both) for i, both in enumerate(lengths)]
    return pairs, [Unit([sample(13, 0.8, "")], (13,))]


def _trainer(shape, layout):
    model, parallel = model_config(**SHAPES[shape], head="score"), ParallelConfig(**layout)
    place = initialize(parallel, seed=1)
    chunks = build(model, parallel)
    initialize_weights(chunks, model, seed=5, std=0.15)
    return model, Trainer(chunks, OptimizerConfig(lr=1e-3), place, num_steps=10, distributed_optimizer=False)


class _Keep:
    """A loss that remembers scores by unit and sign."""

    output = "score"

    def __init__(self, loss):
        self.loss, self.scores = loss, {}

    def __call__(self, scores, batch):
        found = zip(batch.documents["unit"].tolist(), batch.documents["sign"].tolist(), scores.tolist())
        self.scores |= {(unit, sign): score for unit, sign, score in found if unit >= 0}
        return self.loss(scores, batch)


def _gradients(shape, layout, kind):
    """(loss, count, metrics, scores of this rank, {Hugging Face name: gradient of sum / count})."""
    model, trainer = _trainer(shape, layout)
    t, keep = trainer.topology, _Keep(LOSSES[kind])
    pairs, graded = _units()
    layout, units = ParallelConfig(**layout), pairs + graded * (kind == "pointwise")
    packs = packs_of(units, 64, t.data_rank, t.data_size, layout.pack_multiple, layout.pipeline)
    total, count, metrics, *_ = trainer.gradients(packs, keep)
    for _, parameter in named_parameters(trainer.chunks):
        parameter.data.copy_(parameter.main_grad)  # so the export gathers gradients as it gathers weights
    return total, count, metrics, keep.scores, {n: g.clone() for n, g in LiveWeights(trainer.chunks, model).hf_tensors()}


def _reference(shape, kind):
    """The same from transformers in float64, every document alone, and the loss written down once more."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model, trainer = _trainer(shape, {})
    weights = {name: tensor.double() for name, tensor in LiveWeights(trainer.chunks, model).hf_tensors()}
    raw = config_to_hf(model, {"pad_token_id": 0})
    theirs = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**raw), dtype=torch.float64)
    theirs.load_state_dict(weights)
    pairs, graded = _units()

    def score(sample):
        return theirs(torch.tensor(sample.ids)[None].long()).logits[0, 0]

    total = torch.zeros((), dtype=torch.float64)
    scores = {}
    for number, unit in enumerate(pairs):
        a, b = map(score, unit.samples)
        scores |= {(number, 1): a.item(), (number, -1): b.item()}
        if kind == "pointwise":
            total = total - (0.5 * (logsigmoid(a - b) + logsigmoid(b - a)) if number == 3 else logsigmoid(a - b))
        else:
            a, b = 2.0 * torch.tanh(a / 2.0), 2.0 * torch.tanh(b / 2.0)
            tie = -sum(logsigmoid(s) + logsigmoid(-s) for s in (a, b)) / 4
            likelihood = tie if number == 3 else -(logsigmoid(a) + logsigmoid(-b)) / 2
            total = total + likelihood + 0.5 * 0.7 * (a + b) ** 2 + 0.05 * (a**2 + b**2) / 2
    if kind == "pointwise":
        scores[5, 0] = (r := score(graded[0].samples[0])).item()
        total = total + (r - 0.8) ** 2
    count = len(pairs) + (kind == "pointwise")
    (total / count).backward()
    return total.item(), count, scores, {name: p.grad for name, p in theirs.named_parameters()}


@pytest.fixture(scope="module")
def reference(ranks):
    cache = {}
    return lambda *case: cache.get(case) or cache.setdefault(case, ranks.run(1, _reference, *case)[0])


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("shape, layout", CASES)
def test_loss_scores_and_gradients_equal_a_float64_reference_at_every_topology(ranks, reference, shape, layout, kind):
    total, count, scores, gradients = reference(shape, kind)
    results = ranks.run(LAYOUTS[layout][1], _gradients, shape, LAYOUTS[layout][0], kind)
    seen = {}
    for found, found_count, metrics, some_scores, found_gradients in results:
        assert found_count == count and found == pytest.approx(total, rel=1e-5) and metrics["loss"] == pytest.approx(found)
        seen |= some_scores
        assert found_gradients.keys() == gradients.keys() == hf_shapes(model_config(**SHAPES[shape], head="score")).keys()
        for name, expected in gradients.items():
            worst = (found_gradients[name].double() - expected).abs().max()
            assert worst <= 1e-5 * max(1.0, expected.abs().max()), (name, worst)
    assert seen.keys() == scores.keys() and max(abs(seen[key] - scores[key]) for key in scores) <= 1e-5


def _held(shape, layout):
    _, trainer = _trainer(shape, layout)
    return {name: p.numel() for chunk in trainer.chunks for name, p in bare(chunk).named_parameters() if "layers" not in name}


@pytest.mark.parametrize("shape", ["llama", "tied"])
def test_there_is_no_vocabulary_head_and_no_second_table(ranks, shape):
    first, last = ranks.run(2, _held, shape, {"pipeline": 2})
    assert first == {"embedding.word_embeddings.weight": 384 * 32}
    assert last == {"decoder.final_layernorm.weight": 32, "output_layer.weight": 32}
    shapes = hf_shapes(model_config(**SHAPES[shape], head="score"))
    assert model_config(**SHAPES[shape], head="score").num_parameters == sum(torch.Size(s).numel() for s in shapes.values())


def _started(folder, head, layout):
    """Weights of a model that starts from `folder`, and what a fresh draw of the score head would be."""
    model, parallel = model_config(head=head), ParallelConfig(**layout)
    initialize(parallel, seed=1)
    chunks = build(model, parallel)
    origin = find_origin(str(folder), model)
    load_start(origin, chunks, model, seed=11)
    started = dict(LiveWeights(chunks, model).hf_tensors())
    initialize_weights(chunks, model, seed=11)
    return started, dict(LiveWeights(chunks, model).hf_tensors()).get("score.weight")


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tp2", "pp2"])
def test_a_language_model_lends_its_body_to_a_score_head_drawn_by_the_seed(ranks, tmp_path, layout):
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(model_config())), dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "hf")
    world = 2 if layout else 1
    for started, drawn in ranks.run(world, _started, tmp_path / "hf", "score", layout):
        body = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
        assert started.keys() == body.keys() | {"score.weight"}
        assert all(torch.equal(started[name], body[name]) for name in body) and torch.equal(started["score.weight"], drawn)


def test_a_reward_model_is_refused_as_the_start_of_a_language_model(tmp_path):
    config = model_config(head="score")
    (tmp_path / "COMPLETE").touch()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": dataclasses.asdict(config)}))
    with pytest.raises(ValueError, match="head is score there, vocabulary here"):
        find_origin(str(tmp_path), dataclasses.replace(config, head="vocabulary"))
    assert find_origin(str(tmp_path), config).step_folder == tmp_path


def _loaded(folder, layout):
    model, parallel = model_config(head="score"), ParallelConfig(**layout)
    initialize(parallel, seed=1)
    chunks = build(model, parallel)
    load_hf(folder, chunks, model)
    return dict(LiveWeights(chunks, model).hf_tensors())


def test_a_classifier_of_one_label_loads_exactly_and_one_of_two_labels_is_refused(ranks, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    raw = config_to_hf(model_config(head="score"))
    for labels in (1, 2):
        config = AutoConfig.for_model(**{**raw, "num_labels": labels, "id2label": None, "label2id": None, "pad_token_id": 0})
        theirs = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        theirs.save_pretrained(tmp_path / str(labels))
        if labels == 1:
            expected = theirs.state_dict()
    for loaded in ranks.run(2, _loaded, tmp_path / "1", {"tensor": 2}):
        assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="number of labels=2 cannot be represented, only 1"):
        find_origin(str(tmp_path / "2"), model_config(head="score"))
