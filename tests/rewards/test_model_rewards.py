"""Rewards by models: scores against one forward pass per row, both orders, batching across calls, faults."""

import asyncio
import gc
import json
import math
import threading
import weakref

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
)

from megatron_nb.config import build
from megatron_nb.data.preferences import FIRST, SECOND, answer_ids, pair_ids
from megatron_nb.rewards.pairwise import QUESTION, Pairwise, probability
from megatron_nb.rewards.reward import RewardConfig, build_reward
from megatron_nb.rewards.scorer import Batcher, load_scorer
from tests.data.data_tokenizers import tiny
from tests.rewards.endpoint_stub import Stub
from tests.rewards.made_groups import group_of, scores

SHAPE = dict(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0)  # fmt: skip
TEXTS = ("some words", "an answer and a question and some words of an answer", "", "<think>words</think>a", "question")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind of model -> its Hugging Face folder."""
    root, made = tmp_path_factory.mktemp("models"), {}
    torch.manual_seed(0)
    models = {
        "pointwise": LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)),
        "pairwise": LlamaForSequenceClassification(
            LlamaConfig(**SHAPE, num_labels=1, reward_kind="pairwise", reward_bound=1.0)
        ),
        "letters": LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "bert": BertForSequenceClassification(
            BertConfig(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                       num_labels=1, pad_token_id=0)
        ),
        "mistral": MistralForSequenceClassification(MistralConfig(**SHAPE, num_labels=1)),  # transformers looks for padding
        "two labels": BertForSequenceClassification(
            BertConfig(vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        ),
    }  # fmt: skip
    for kind, model in models.items():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)  # scores that differ
        model.save_pretrained(root / kind)
        tiny().save_pretrained(root / kind)
        made[kind] = str(root / kind)
    return made


def model_of(folder, architecture):
    return architecture.from_pretrained(folder).eval()


def term(kind, folder, **settings):
    return {"m": {"kind": kind, "settings": {"checkpoint": folder, **settings}}}


def rewards(terms, group, **settings):
    return [score.reward for score in scores(terms, group, **settings)]


# ------------------------------------------------------------------ point-wise
@pytest.mark.parametrize(("kind", "architecture"), [("pointwise", LlamaForSequenceClassification),
                                                    ("bert", BertForSequenceClassification)])  # fmt: skip
def test_pointwise_equals_one_forward_pass_per_answer(folders, kind, architecture):
    model, group = model_of(folders[kind], architecture), group_of(*TEXTS)
    said = ["some words", TEXTS[1], "", "a", "question"]  # thinking is cut
    rows = [answer_ids(group.prompt.conversation, text, tiny()) for text in said]
    with torch.no_grad():
        expected = [model(torch.tensor([row])).logits.item() for row in rows]
    assert rewards(term("pointwise", folders[kind]), group) == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 5


def test_a_truncated_answer_is_scored_like_any_other_and_the_penalty_is_taken_off(folders):
    group = group_of("some words", "some words", statuses=["done", "length"])
    whole, cut = rewards(term("pointwise", folders["pointwise"]), group)
    assert whole == cut
    found = scores(term("pointwise", folders["pointwise"], penalise_truncated=0.5), group)
    assert [score.reward for score in found] == [whole, pytest.approx(whole - 0.5)]
    assert found[1].parts == {"m": found[1].reward, "m/model": whole} and found[1].reason == "m: cut by its length"


def test_an_answer_too_long_to_be_judged_is_invalid_and_names_the_limit(folders):
    short, long = scores(term("pointwise", folders["pointwise"], max_tokens=60), group_of("a", "a " * 50))
    assert short.reward is not None and long.reward is None and "more than max_tokens=60" in long.reason


def test_nan_of_the_model_is_invalid(folders, monkeypatch):
    for kind in ("pointwise", "pairwise"):
        reward = build_reward(build(RewardConfig, {"terms": term(kind, folders[kind], **({} if kind == "pointwise" else
                                                                {"mode": "group"}))}), None, "cpu")  # fmt: skip
        batcher = reward.terms["m"].scorer._batcher
        forward, bad = batcher._forward, tiny()(" nan", add_special_tokens=False).input_ids

        def poisoned(rows, forward=forward, bad=bad):
            holds = [any(row[i : i + len(bad)] == bad for i in range(len(row))) for row in rows]
            return forward(rows).masked_fill(torch.tensor(holds), math.nan)

        batcher._forward = poisoned
        good, other, broken = asyncio.run(reward.score(group_of("some words", "an answer", "a nan here")))
        assert broken.reward is None and "the model gave " in broken.reason and "nan" in broken.reason
        assert good.reward is not None and other.reward is not None
        if kind == "pairwise":
            assert good.reward + other.reward == pytest.approx(1, abs=1e-12)  # each judged against the other alone


def test_pointwise_by_an_endpoint_sends_the_same_tokens(folders):
    stub = Stub()
    try:
        group = group_of(*TEXTS)
        found = rewards(term("pointwise", folders["pointwise"], url=stub.url, model="rm"), group)
    finally:
        stub.close()
    rows = [answer_ids(group.prompt.conversation, text.split("</think>")[-1], tiny()) for text in TEXTS]
    assert found == [float(len(row)) for row in rows]
    assert sorted(body["input"][0] for body in stub.bodies) == sorted(rows)
    assert stub.bodies[0] | {"input": 0} == {"model": "rm", "input": 0, "task": "classify", "use_activation": False}


# ------------------------------------------------------------------ pair-wise
def by_hand(folder, conversation, a, b):
    """sigmoid((s_ab - s_ba) / 2) from two forward passes; the checkpoint's bound is 1."""
    model, s = model_of(folder, LlamaForSequenceClassification), []
    for one, other in ((a, b), (b, a)):
        with torch.no_grad():
            raw = model(torch.tensor([pair_ids(conversation, one, other, tiny())])).logits.item()
        s.append(math.tanh(raw))
    return 1 / (1 + math.exp(-(s[0] - s[1]) / 2))


def test_reference_mode_is_the_win_probability_over_the_reference(folders):
    group = group_of(*TEXTS[:3], data={"reference": "<think>so</think>question"})
    expected = [by_hand(folders["pairwise"], group.prompt.conversation, text, "question") for text in TEXTS[:3]]
    assert rewards(term("pairwise", folders["pairwise"]), group) == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 0.005


def test_group_mode_is_the_mean_over_the_others_and_the_group_mean_is_one_half(folders):
    texts = TEXTS[:4]
    said, group = [*TEXTS[:3], "a"], group_of(*texts)
    p = [[by_hand(folders["pairwise"], group.prompt.conversation, a, b) for b in said] for a in said]
    expected = [sum(p[i][j] for j in range(4) if j != i) / 3 for i in range(4)]
    found = rewards(term("pairwise", folders["pairwise"], mode="group"), group)
    assert found == pytest.approx(expected, abs=1e-6)
    assert sum(found) / 4 == pytest.approx(0.5, abs=1e-12)


def test_both_orders_exactly_swapped_make_the_probability_antisymmetric(folders):
    pairwise = Pairwise(folders["pairwise"], mode="group")
    conversation = group_of("").prompt.conversation
    seen = []
    forward = pairwise._batcher._forward
    pairwise._batcher._forward = lambda rows: (seen.extend(rows), forward(rows))[1]
    ab, ba, same = asyncio.run(pairwise._wins(conversation, [("a", "words"), ("words", "a"), ("a", "a")]))
    assert ab + ba == pytest.approx(1, abs=1e-6) and same == pytest.approx(0.5, abs=1e-6)  # rows of fp32
    assert seen[0] == seen[3] and seen[1] == seen[2] and len(seen) == 6
    text = tiny().decode(seen[0])
    assert f"{FIRST}\na\n\n{SECOND}\nwords" in text
    for s, other in ((3.0, -20.0), (1e-9, 7.0), (2000.0, -2000.0)):
        assert probability(s, other) + probability(other, s) == pytest.approx(1, abs=1e-15)


def test_a_group_of_g_answers_takes_g_times_g_minus_1_rows_in_one_pass(folders):
    pairwise, calls = Pairwise(folders["pairwise"], mode="group"), []
    forward = pairwise._batcher._forward
    pairwise._batcher._forward = lambda rows: (calls.append(len(rows)), forward(rows))[1]
    asyncio.run(pairwise.score(group_of(*TEXTS)))
    assert calls == [5 * 4]


def test_a_lone_answer_has_no_win_rate_in_its_group(folders):
    (score,) = scores(term("pairwise", folders["pairwise"], mode="group"), group_of("a"))
    assert score.reward is None and "no other answer in the group" in score.reason


def test_references_come_from_a_file_of_first_answers(folders, tmp_path):
    prompt = [{"role": "user", "content": "How much?"}]
    rows = [{"prompt": prompt, "text": "question", "index": 0}, {"prompt": prompt, "text": "other"}]
    path = tmp_path / "step-0.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    group = group_of(*TEXTS[:2], data={"reference": "not this one"})
    expected = [by_hand(folders["pairwise"], group.prompt.conversation, text, "question") for text in TEXTS[:2]]
    settings = term("pairwise", folders["pairwise"], references=str(path))
    assert rewards(settings, group) == pytest.approx(expected, abs=1e-6)
    (score,) = scores(settings, group_of("a", question="Why?"))
    assert score.reward is None and "has no answer to 'Why?'" in score.reason
    path.write_text('{"prompt": 3}')
    with pytest.raises(ValueError, match=r"step-0.jsonl:1: a row is"):
        scores(settings, group)


def test_a_missing_reference_is_invalid_and_names_the_data(folders):
    (score,) = scores(term("pairwise", folders["pairwise"]), group_of("a", data={"answer": "b"}))
    assert score.reward is None and "the prompt's data has no 'reference'; it has answer" in score.reason


def test_a_language_model_judges_by_the_logits_of_a_and_b(folders):
    group, model, tokenizer = group_of(*TEXTS[:2]), model_of(folders["letters"], LlamaForCausalLM), tiny()
    a, b = (tokenizer(letter).input_ids[0] for letter in "AB")

    def s(one, other):
        text = tokenizer.decode(pair_ids(group.prompt.conversation, one, other, tokenizer))
        text += f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1]
        return 20 * math.tanh((logits[a] - logits[b]).item() / 20)

    expected = 1 / (1 + math.exp(-(s(*TEXTS[:2]) - s(TEXTS[1], TEXTS[0])) / 2))
    found = rewards(term("pairwise", folders["letters"], mode="group"), group)
    assert found == pytest.approx([expected, 1 - expected], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "model", "complaint"),
    [
        ("pointwise", "pairwise", "is of kind pairwise: the point-wise reward needs a pointwise one"),
        ("pointwise", "letters", "is of kind letters"),
        ("pairwise", "pointwise", "is of kind pointwise: it cannot judge pairs"),
        ("pointwise", "two labels", "has 2 labels: a reward model has one"),
        ("pointwise", "nowhere", "/nowhere is not a folder: give a Hugging Face folder, a run"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(folders, kind, model, complaint):
    with pytest.raises(ValueError, match=complaint):
        scores(term(kind, folders.get(model, "/nowhere")), group_of("a"))


def test_terms_with_the_same_checkpoint_share_one_model_for_as_long_as_they_live(folders):
    first, second = (Pairwise(folders["pairwise"], mode=mode) for mode in ("group", "reference"))
    assert first._scorer is second._scorer is not load_scorer(folders["pairwise"], "cpu", "bfloat16")
    gone = weakref.ref(first._scorer.forward)
    del first, second
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ batching
@pytest.mark.parametrize("kind", ["pointwise", "pairwise", "letters", "bert", "mistral"])
def test_batches_give_the_same_scores_as_one_by_one(folders, kind):
    scorer = load_scorer(folders[kind], "cpu", "float32")
    forward, tokenizer = scorer.forward, scorer.tokenizer
    conversation = group_of("").prompt.conversation
    rows = [answer_ids(conversation, text, tokenizer) for text in TEXTS]
    rows += [answer_ids(conversation, "words " * n, tokenizer) for n in (70, 3, 70)]  # equal lengths and far ones
    alone = torch.cat([forward([row]) for row in rows])
    assert torch.allclose(forward(rows), alone, atol=1e-6, rtol=0)


def test_concurrent_calls_share_a_forward_pass_and_the_event_loop_goes_on():
    calls, gate = [], threading.Event()

    def forward(rows):
        calls.append([len(row) for row in rows])
        assert gate.wait(10)
        return torch.tensor([float(sum(row)) for row in rows])

    async def many():
        batcher = Batcher(forward)
        first = [asyncio.create_task(batcher.scores([[i], [i, i]])) for i in range(3)]
        while not calls:
            await asyncio.sleep(0.001)  # it runs beside the pass
        later = [asyncio.create_task(batcher.scores([[i]])) for i in range(3, 6)]
        await asyncio.sleep(0.01)
        later[0].cancel()
        gate.set()
        return await asyncio.gather(*first, *later, return_exceptions=True)

    found = asyncio.run(many())
    assert found[:3] == [[0, 0], [1, 2], [2, 4]] and found[4:] == [[4], [5]]
    assert isinstance(found[3], asyncio.CancelledError)
    assert sum(map(len, calls)) == 8 and len(calls) <= 3  # nobody waits for the cancelled one, so it is not scored


def test_a_forward_pass_that_raises_makes_its_rollouts_invalid(folders):
    reward = build_reward(build(RewardConfig, {"terms": term("pointwise", folders["pointwise"]), "retries": 0}), None, "cpu")

    def failing(rows):
        raise RuntimeError("out of memory")

    reward.terms["m"].scorer._batcher._forward = failing
    found = asyncio.run(reward.score(group_of("a", "b")))
    assert [score.reward for score in found] == [None, None] and found[0].reason == "m: RuntimeError: out of memory"
