"""Parallel layers in one process: what they are made with, copies, fake tensors, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import parallel_cross_entropy, utils
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
)
from nxd_infer.parallel_layers.loss_functions import from_parallel_logits_to_logprobs
from nxd_infer.parallel_layers.pad import pad_model
from nxd_infer.parallel_layers.random import get_xla_rng_tracker


def test_uninitialised_is_degree_one():
    assert not dist.is_initialized()
    layer = ColumnParallelLinear(4, 6)
    assert layer.degree == 1 and layer(torch.ones(2, 4)).shape == (2, 6)
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 0
    assert layer.weight.num_partitions == 1 and layer.weight.partition_stride == 1
    assert RowParallelLinear(4, 6, device=False).weight.partition_dim == 1
    assert not dist.is_initialized()


def two(rank: int = 0):
    return use_context(make_context(2, rank, tp=2))


def test_layers_keep_the_context_they_were_built_with():
    with two(1):
        layer = ColumnParallelLinear(4, 6, gather_output=False)
    assert (layer.degree, layer.rank) == (2, 1)
    assert layer(torch.ones(2, 4)).shape == (2, 3)  # no communication forward
    assert layer.tensor_parallel_group == "tp"


def layouts_of(module: nn.Module) -> dict:
    return {name: getattr(param, "nxd_layout", None) for name, param in module.named_parameters()}


def test_layouts_survive_copies_and_replacements():
    with two():
        model = nn.Sequential(
            ParallelEmbedding(8, 4),
            GQAQKVColumnParallelLinear(4, [8, 4], head_dim=2, gather_output=True),
            ColumnParallelLinear(4, 12, output_plan=AxisPlan.strided(12, 3)),
        )
    expected, index = layouts_of(model), model[2].output_index.clone()
    assert len([layout for layout in expected.values() if layout is not None]) == 4
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).to(torch.float64),
        copy.deepcopy(model).to("meta").to_empty(device="cpu"),
        copy.deepcopy(model),
    ]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies[-1].load_state_dict(state, assign=True)
    for other in copies:
        assert layouts_of(other) == expected
        assert weight_layout(other) == weight_layout(model)
        assert torch.equal(other[2].output_index, index)
        assert other[2].weight.partition_dim == 0 and other[2].weight.num_partitions == 2
    assert "output_index" not in state


def test_meta_and_fake_construction():
    make = [
        lambda: ColumnParallelLinear(4, 12, output_plan=AxisPlan.strided(12, 3)),
        lambda: GQAQKVColumnParallelLinear(4, [8, 4], head_dim=2, kv_size_multiplier=2),
        lambda: RowParallelLinear(12, 4, input_plan=AxisPlan.strided(12, 3)),
    ]
    for build in make:
        with two():
            real = build()
            with torch.device("meta"):
                on_meta = build()
            with FakeTensorMode():
                fake = build()
        assert all(param.is_meta for param in on_meta.parameters())
        for other in (on_meta, fake):
            assert {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
            assert weight_layout(other) == weight_layout(real)
        on_meta.to_empty(device="cpu")
        with two():
            torch.manual_seed(0)
            real.reset_parameters()
            torch.manual_seed(0)
            on_meta.reset_parameters()
        for kind in ("named_parameters", "named_buffers"):
            ours, theirs = dict(getattr(on_meta, kind)()), dict(getattr(real, kind)())
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_init_method_fills_the_logical_weight():
    shapes = []

    def init(weight: torch.Tensor) -> None:
        shapes.append(tuple(weight.shape))
        nn.init.normal_(weight, std=0.02)

    with two(1):
        layer = ColumnParallelLinear(4, 6, init_method=init)
        RowParallelLinear(6, 4, init_method=init)
        ParallelEmbedding(6, 4, init)
        GQAQKVColumnParallelLinear(4, [4, 2], init_method=init)
    assert shapes == [(6, 4), (4, 6), (6, 4), (4, 4), (2, 4), (2, 4)]
    assert layer.weight.abs().max() < 0.2


def test_indivisible_size_is_reported_at_first_use():
    with two():
        column, row = ColumnParallelLinear(4, 9), RowParallelLinear(9, 4)  # pad_model has its chance
        qkv = GQAQKVColumnParallelLinear(4, [9, 3])
    for layer, x, what in ((column, (2, 4), "output_size = 9"), (row, (2, 9), "input_size = 9"), (qkv, (2, 4), "= 9")):
        with pytest.raises(ShardingError, match=f"{what} does not divide over 2 ranks") as caught:
            layer(torch.ones(x))
        assert "1, 3, 9" in str(caught.value) and "pad_model" in str(caught.value)
        assert ("with pad=True" in str(caught.value)) == (layer is not qkv), "where the layer has that option"


def test_utils():
    assert utils.divide(12, 4) == 3
    for divisor, told in ((4, r"10 is not divisible by 4; it divides by \[1, 2, 5, 10\]"), (0, "0")):
        with pytest.raises(ShardingError, match=told):
            utils.divide(10, divisor)
    x = torch.arange(12).view(2, 6)
    parts = utils.split_tensor_along_last_dim(x, 3)
    assert [p.tolist() for p in parts] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert utils.split_tensor_along_last_dim(x, 3, True)[1].is_contiguous() and not parts[1].is_contiguous()
    assert utils.EmbeddingUtility.range_from_global_vocab_size(12, 1, 3) == (4, 8)
    source, other = ColumnParallelLinear(2, 4).weight, nn.Parameter(torch.ones(4, 2))
    utils.copy_tensor_model_parallel_attributes(other, source)
    assert other.nxd_layout == source.nxd_layout and other.partition_dim == 0
    utils.set_tensor_model_parallel_attributes(other, True, 1, 2, 4)
    assert (other.partition_dim, other.partition_stride, other.num_partitions) == (1, 2, 4)


def test_spmd_rank():
    rank = SPMDRank(1)
    assert rank.get_rank().tolist() == [0] and rank.get_rank().dtype == torch.int32 and not rank.state_dict()
    nn.ModuleDict({"rank_util": rank}).load_state_dict({"rank_util.rank": torch.zeros(1)})
    with pytest.raises(ParallelConfigError, match="over 2 ranks"):
        SPMDRank(2)


def test_padding_idx_zero_is_not_ignored():
    layer = ParallelEmbedding(12, 8, padding_idx=0)
    assert not layer.weight[0].any()
    layer(torch.tensor([0, 1])).sum().backward()
    assert not layer.weight.grad[0].any() and layer.weight.grad[1].any()


def test_local_heads_that_may_not_fit_are_told():
    """Where a rank has a whole copy, nothing says where a head ends; with its size there is nothing to tell."""
    copied: dict[str, Any] = {"output_sizes": [16, 4], "kv_size_multiplier": 2}
    with pytest.warns(UserWarning, match="pass head_dim="):
        layer = GQAQKVColumnParallelLinear(12, gather_output=False, **copied)
    assert [y.shape[-1] for y in layer(torch.ones(2, 12))] == [16, 8, 8]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*head_dim")  # torch 2.9 warns at each seed, of devices it lacks
        GQAQKVColumnParallelLinear(12, gather_output=False, head_dim=2, **copied)
        GQAQKVColumnParallelLinear(12, **copied)
    with use_context(make_context(2, 0, tp=2, collectives="none")), pytest.warns(UserWarning, match="or all heads"):
        GQAQKVColumnParallelLinear(12, gather_output=False, **copied)


def test_sizes_of_a_fused_projection():
    assert GQAQKVColumnParallelLinear(8, 8).output_sizes == [8, 8]
    assert GQAQKVColumnParallelLinear(8, output_sizes=(8, 4)).output_sizes == [8, 4]
    for arguments in ({}, {"output_size": 8, "output_sizes": 8}, {"output_size": [8]}, {"output_size": [8, 0]}):
        with pytest.raises(ParallelConfigError):
            GQAQKVColumnParallelLinear(8, **arguments)
    with use_context(make_context(3, 1, tp=3)), pytest.raises(ParallelConfigError, match="3 ranks; pass head_dim="):
        GQAQKVColumnParallelLinear(8, [8, 4], kv_size_multiplier=2)


def test_losses_on_split_logits_have_no_second_derivative():
    labels = torch.tensor([[1, 2, 3, 0]])
    losses = [
        lambda logits: parallel_cross_entropy(logits, labels).mean(),  # whose own gradient is a constant
        lambda logits: parallel_cross_entropy(logits, labels).pow(2).sum(),
        lambda logits: from_parallel_logits_to_logprobs(logits, labels, inference=False).mean(),
    ]
    for loss in losses:
        x = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(loss(torch.tanh(x) @ weight), x, create_graph=True)
        with pytest.raises(RuntimeError, match="have no second derivative"):
            grad.pow(2).sum().backward()
        first = torch.autograd.grad(loss(torch.tanh(x) @ weight), x)
        torch.testing.assert_close(first[0], grad.detach())


LOGITS, THREE = torch.zeros(3, 8), torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ColumnParallelLinear(cast(Any, 4.0), 4), "whole numbers, got 4.0"),
        (lambda: ParallelEmbedding(cast(Any, 4.0), 4), "whole numbers, got 4.0"),
        (lambda: ParallelEmbedding(0, 4), "num_embeddings must be at least 1, got 0"),
        (
            lambda: ParallelEmbedding(10, 4, cast(Any, "zeros")),
            "third argument is padding_idx, a number or None, or init_method",
        ),
        (lambda: ParallelEmbedding(10, 4, padding_idx=10), "outside the vocabulary of 10"),
        (lambda: ColumnParallelLinear(4, 4, device=cast(Any, True)), "got True"),
        (lambda: RowParallelLinear(4, 4, sequence_parallel_enabled=True), "input_is_parallel=True"),
        (lambda: RowParallelLinear(4, 4, reduce_output=False), "bias=False or skip_bias_add=True"),
        (lambda: OutputChannelParallelConv2d(4, 4, 3, groups=2), "groups=1"),
        (lambda: InputChannelParallelConv2d(4, 4, 3, padding_mode="mirror"), "padding_mode must be one of"),
        (lambda: GQAQKVColumnParallelLinear(8, [8, 4], head_dim=0), "head_dim must be a whole number of at least 1"),
        (lambda: GQAQKVColumnParallelLinear(8, [8, 4], head_dim=3), "whole heads of 3"),
        (lambda: GQAQKVColumnParallelLinear(8, [8, 4], kv_size_multiplier=True), "whole number of at least 1"),
        (lambda: pad_model(nn.Linear(4, 4), 2, cast(Any, 2.5)), "number of heads must be a whole number .* got 2.5"),
        (lambda: parallel_cross_entropy(LOGITS, THREE, 2.0), "between 0 and 1, got 2"),
        (lambda: parallel_cross_entropy(LOGITS, THREE[:2]), "do not fit logits"),
        (
            lambda: parallel_cross_entropy(LOGITS, THREE, vocab_size=9),
            "vocab_size must lie between 1 and the 8 columns",
        ),
        (lambda: parallel_cross_entropy(LOGITS, torch.ones(3)), "labels must be class indices"),
        (lambda: get_xla_rng_tracker().fork("mine").__enter__(), "no random stream 'mine'"),
    ],
)
def test_what_is_refused(make: Callable[[], object], told: str):
    with pytest.raises(ParallelConfigError, match=told):
        make()


def test_what_no_degree_allows():
    with two(), pytest.raises(ShardingError, match="no input may be on two ranks"):
        RowParallelLinear(4, 4, input_plan=GQAQKVColumnParallelLinear(4, [8, 4], head_dim=4).kv_plan)
    with pytest.raises(ShardingError, match="stride must divide it"):
        ColumnParallelLinear(4, 10, stride=4)
    with pytest.raises(IndexError, match="label 8 is outside the vocabulary"):
        parallel_cross_entropy(LOGITS, torch.tensor([1, 8, 3]))
    for bad in (10, -1):
        with pytest.raises(IndexError):
            ParallelEmbedding(10, 4)(torch.tensor([1, bad]))
