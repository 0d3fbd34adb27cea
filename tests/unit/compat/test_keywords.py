"""Keywords and places of the reference: neutral ones pass, others that cannot be honoured are refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import parallel_state as ps
from nxd_infer.checkpoint import api
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.optimizer import NeuronZero1Optimizer
from nxd_infer.optimizer.adamw_fp32 import AdamW_FP32OptimParams
from nxd_infer.parallel_layers import grads
from nxd_infer.parallel_layers.layer_norm import LayerNorm
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.trainer.activation_checkpoint import apply_activation_checkpoint
from nxd_infer.util.also_called import also_called


def test_checkpoints_by_the_references_keywords(tmp_path: Path):
    model, wrong = nn.Linear(2, 2), {"avoid_saving_lower_precision_weights": True}
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW_FP32OptimParams, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not api.has_checkpoint(checkpoint_dir_str=tmp_path)
    neutral = {"use_zero1_dcp": False, "avoid_saving_lower_precision_weights": False, "zero1_optimizer": True}
    nxd.save_checkpoint(checkpoint_dir_str=tmp_path, tag="a", model=model, optimizer=optimizer.state_dict(), **neutral)
    other = nn.Linear(2, 2)
    nxd.load_checkpoint(checkpoint_dir_str=str(tmp_path), tag="a", model=other, use_zero1_dcp=False)
    assert torch.equal(other.weight, model.weight) and api.has_checkpoint(checkpoint_dir_str=tmp_path)
    with pytest.raises(ParallelConfigError, match="avoid_saving_lower_precision_weights=True is not supported"):
        nxd.save_checkpoint(tmp_path, "b", model=model, **wrong)
    with pytest.raises(TypeError, match="'path' twice, also as 'checkpoint_dir_str'"):
        nxd.load_checkpoint(path=tmp_path, checkpoint_dir_str=tmp_path)


def test_a_name_that_is_given_is_the_functions_own():
    @also_called(renamed={"other": "own"}, ignored="tile_cc", neutral={"groups": None})
    def function(own: int = 0, **rest: int) -> int:
        return own

    assert function(other=3) == function(own=3, tile_cc=True, groups=None) == function(3) == 3 and function() == 0
    with pytest.raises(ParallelConfigError, match=r"groups=\[\] is not supported: leave it out, or pass None"):
        function(groups=[])
    assert str(inspect.signature(function)).startswith("(own: 'int' = 0, *, tile_cc=None, groups=None, other=None, **")


def test_degrees_by_place():
    assert ps.initialize_model_parallel(1, 1, 1, 1, True, 1, True).tp_groups == [[0]]  # pyright: ignore
    with pytest.raises(ParallelConfigError, match="lnc_size=2 is not supported yet"):
        ps.initialize_model_parallel(1, 1, 1, 1, True, 2)
    assert not ps.model_parallel_is_initialized()


def test_layers_by_place_and_keyword():
    column = ColumnParallelLinear(2, 4, False, True, torch.float64, None, 1, nn.init.ones_, rank_ordering=None)
    assert column.weight.dtype == torch.float64 and bool((column.weight == 1).all())
    documented = ColumnParallelLinear(2, 4, True, False, 1, torch.float64)
    assert documented.sequence_parallel_enabled and documented.weight.dtype == torch.float64
    row = RowParallelLinear(4, 2, False, True, torch.float64, tile_cc=True, rank_ordering=None)
    assert row.weight.dtype == torch.float64 and not row.sequence_parallel_enabled
    for table in (ParallelEmbedding(4, 2, 1), ParallelEmbedding(4, 2, padding_idx=1), ParallelEmbedding(4, 2, -3)):
        assert table.padding_idx == 1 and bool((table.weight[1] == 0).all())
    assert ParallelEmbedding(4, 2, None, dtype=torch.float64).weight.dtype == torch.float64
    with pytest.raises(TypeError, match="padding_idx"):
        ParallelEmbedding(4, 2, 1, padding_idx=1)
    torch.manual_seed(2)
    qkv = GQAQKVColumnParallelLinear(4, [4, 2], False, True, torch.float64, None, None, False, False, 1, False)
    before = qkv.weight_k.clone()
    qkv.weight_k.data.zero_()
    torch.manual_seed(2)
    qkv.initialize_weight_biases()
    assert torch.equal(qkv.weight_k, before) and before.dtype == torch.float64 and not qkv.fuse_qkv
    norm = LayerNorm(4, bias=False)
    assert norm.bias is None and LayerNorm(4, 1e-5, True, True).bias.sequence_parallel_enabled
    x = torch.randn(3, 4)
    assert torch.equal(norm(x), nn.functional.layer_norm(x, (4,)))


def test_norms_with_the_references_keywords():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert grads.get_grad_norm([weight], zero1_optimizer=True, zero1_optimizer_groups=None, force_spmd=False) == 5
    assert grads.clip_grad_norm([weight], 1.0, 2, zero1_optimizer_groups=None, force_spmd=True) == 5
    with pytest.raises(ParallelConfigError, match=r"zero1_optimizer_groups=\[\[0, 1\]\] is not supported"):
        grads.clip_grad_norm([weight], 1.0, zero1_optimizer_groups=[[0, 1]])
    weight.shared = True  # pyright: ignore[reportAttributeAccessIssue]
    assert not grads.param_is_not_shared(weight) and grads.param_is_not_shared(torch.ones(1))


def test_any_class_can_be_recomputed():
    class Marked:
        pass

    class Layer(Marked, nn.Linear):
        pass

    config = nxd.neuronx_distributed_config(activation_checkpoint_config=Marked)
    model = nn.Sequential(Layer(2, 2), nn.Linear(2, 2))
    assert apply_activation_checkpoint(model, config["activation_checkpoint_config"]) == 1
