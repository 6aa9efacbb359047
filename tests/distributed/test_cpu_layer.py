"""What parallel/cpu.py may touch, and what it must leave alone."""

import pytest
import torch

from megatron_nb.parallel import cpu, topology

pytestmark = pytest.mark.skipif(not topology.ON_CPU, reason="the CPU layer does nothing where CUDA is")


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "full", "arange", "tensor"])
def test_trap_factory_functions_are_never_replaced(name):
    """A replaced factory silently corrupts rotary tables that transformers builds under a meta device."""
    assert getattr(torch, name).__module__ in ("torch._C", "torch._C._VariableFunctions", None) or isinstance(
        getattr(torch, name), type(torch.zeros)
    )
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


def test_trap_models_of_transformers_load_correctly_beside_the_cpu_layer(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_missing_symbol_fails_by_name():
    with pytest.raises(AssertionError, match="torch.cuda.no_such_query is gone"):
        cpu._patch(torch.cuda, "no_such_query", None)


def test_another_release_of_core_is_refused(monkeypatch):
    monkeypatch.setattr(cpu.install, "done", False)
    monkeypatch.setattr(cpu.megatron.core, "__version__", "0.20.0")
    with pytest.raises(AssertionError, match="megatron-core 0.20.0 found"):
        cpu.install()


def test_calls_that_name_cuda_land_on_the_cpu():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"
    assert torch.ones(2).to("cuda").device.type == "cpu"
    assert torch.ones(2).type() == "torch.FloatTensor", "only megatron-core is told of torch.cuda types"
