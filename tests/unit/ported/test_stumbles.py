"""Lines at which public programs have stopped, each as they write it; those of examples/ported are tested there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nxd_infer import compat
from nxd_infer.checkpoint.api import load_checkpoint
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from tests.support.checkpoint.reference import write
from tests.support.neuron.machines import forget

LINES = {
    "ring attention is imported beside flash attention": """
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
from neuronx_distributed.kernels.ring_attention_kernel import nki_ring_attn_func
q, k, v = torch.randn(3, 1, 2, 8, 4)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert torch.allclose(nki_ring_attn_func(q, k, v, 0, None), expected, atol=1e-6)
""",
    "a norm without a bias": """
from neuronx_distributed.parallel_layers.layer_norm import LayerNorm
norm = LayerNorm(4, eps=1e-5, bias=False, sequence_parallel_enabled=False)
assert norm.bias is None and norm(torch.randn(2, 4)).shape == (2, 4)
""",
    "groups are asked for where there are none": """
from neuronx_distributed.parallel_layers import parallel_state
assert parallel_state.get_tensor_model_parallel_group(as_list=True) == [[0]]
parallel_state.get_tensor_model_parallel_group()
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
ColumnParallelLinear(4, 4, tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group())
""",
    "a model notes something on itself in forward, and is traced": """
from neuronx_distributed.trace.model_builder import BaseModelInstance, ModelBuilder
class Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, x):
        self.batch_size = x.shape[0]
        return self.linear(x) + self.batch_size
model = Noting()
builder = ModelBuilder(router=None, tp_degree=1, checkpoint_loader=model.state_dict)
builder.add("only", BaseModelInstance(Noting, {}), [(torch.ones(3, 2),)])
assert torch.allclose(builder.trace()(torch.ones(3, 2)), model(torch.ones(3, 2)), atol=1e-6)
""",
    "a Lightning module of a script is set up for no stage": """
from neuronx_distributed.lightning import NeuronLTModule
import inspect
inspect.signature(NeuronLTModule.setup).bind(None)
""",
    "DataParallel of torch_neuronx": """
import torch_neuronx
model = torch_neuronx.DataParallel(torch.nn.Linear(2, 2))
assert model(torch.ones(4, 2)).shape == (4, 2)
""",
    "what is absent is an AttributeError": """
import neuronx_distributed.trace, neuronx_distributed.parallel_layers.layers as layers
assert not hasattr(neuronx_distributed.trace, "nothing_of_the_kind") and not hasattr(layers, "nothing_of_the_kind")
""",
}


@pytest.mark.parametrize("line", LINES)
def test_programs_go_on_where_they_stopped(line: str, monkeypatch: pytest.MonkeyPatch):
    forget(monkeypatch)
    compat.install()
    try:
        exec(LINES[line], {"torch": torch, "__name__": "script"})
    finally:
        compat.uninstall()


def test_an_adapter_of_an_older_checkpoint(tmp_path: Path):
    """Files of two ranks that neuronx_distributed has saved: one factor of each layer is split, the options beside."""
    config = LoraConfig(lora_rank=2, target_modules=["0", "1"])

    def adapted() -> LoRAModel:
        return LoRAModel(torch.nn.Sequential(ColumnParallelLinear(4, 6), RowParallelLinear(6, 4)), config)

    kept = {name: torch.randn_like(tensor) for name, tensor in adapted().state_dict().items()}
    split = {"0.lora_B.weight": 0, "1.lora_A.weight": 1}
    assert kept.keys() == {"0.lora_A.weight", "0.lora_B.weight", "1.lora_A.weight", "1.lora_B.weight"}
    for rank in (0, 1):
        state = {name: tensor.chunk(2, split[name])[rank] if name in split else tensor for name, tensor in kept.items()}
        path = tmp_path / "adapter" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
        write(path, {**state, "lora_config": {"lora_rank": 2, "lora_alpha": 8}}, False)
    for mark in ("checkpoint", "done"):
        (tmp_path / "adapter" / mark).touch()
    model = adapted()
    load_checkpoint(tmp_path, "adapter", model=model)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
