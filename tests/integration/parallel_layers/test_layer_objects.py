"""What surrounds the computation: low precision, copies, meta device, groups, errors, helpers, the mappings."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nxd_infer import parallel_state
from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import mappings, utils
from nxd_infer.parallel_layers.groups import axis_of
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, SPMDRank
from tests.support.parallel_layers.compare import LIMITS, error, own_part, piece
from tests.support.ranks import run_ranks

# --- low precision ----------------------------------------------------------------------------------------


def low_precision(size: int) -> dict[str, float]:
    torch.manual_seed(0)
    row = RowParallelLinear(size, 8, dtype=torch.bfloat16)
    torch.manual_seed(0)
    reference = nn.Linear(size, 8, dtype=torch.bfloat16)
    x = torch.randn(64, size, dtype=torch.bfloat16)
    found = {"row": error(row(x), reference(x))}
    for gather in (True, False):
        torch.manual_seed(0)
        column = ColumnParallelLinear(size, 8, gather_output=gather, dtype=torch.bfloat16)
        found[f"column {gather}"] = error(column(x), reference(x) if gather else piece(reference(x), -1))
    torch.manual_seed(0)
    full = RowParallelLinear(size, 8)
    full.load_state_dict({name: value.float() for name, value in row.state_dict().items()})
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = error(full(x.float()), reference(x))
    x.requires_grad_()
    (row(x) * 2).sum().backward()
    ours, x.grad = x.grad, None
    (reference(x) * 2).sum().backward()
    found["input grad"] = error(ours, x.grad)
    return found


def test_bfloat16():
    for found in run_ranks(low_precision, 4, 512):
        assert all(value < LIMITS[torch.bfloat16] for value in found.values()), found


def reduced_in(layer: nn.Module, x: torch.Tensor) -> list[torch.dtype]:
    """The types in which an exported layer's collectives sum."""
    graph = torch.export.export(layer, (x,)).graph
    sums = [node for node in graph.nodes if "reduce" in str(node.target)]
    return [node.args[0].meta["val"].dtype for node in sums]


def test_sums_are_taken_in_reduce_dtype():
    """float32 by default for low precision, never less than the values have, and what is asked for otherwise."""
    sequence = {"input_is_parallel": True, "sequence_parallel_enabled": True}
    expected = {
        (torch.bfloat16, "default"): torch.float32,
        (torch.float16, "default"): torch.float32,
        (torch.bfloat16, None): torch.bfloat16,
        (torch.bfloat16, torch.bfloat16): torch.bfloat16,
        (torch.float64, "default"): torch.float64,
        (torch.float32, "default"): torch.float32,
    }
    for (dtype, reduce_dtype), wanted in expected.items():
        options = {} if reduce_dtype == "default" else {"reduce_dtype": reduce_dtype}
        with two():
            for extra in ({"input_is_parallel": True}, sequence):
                layer = RowParallelLinear(8, 4, dtype=dtype, **extra, **options)
                assert reduced_in(layer, torch.ones(2, 4, dtype=dtype)) == [wanted]


# --- the context, copies, and whatever replaces parameters --------------------------------------------------


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
        for (name, a), (_, b) in zip(real.state_dict().items(), on_meta.state_dict().items(), strict=True):
            assert torch.equal(a, b), name
        for (name, a), (_, b) in zip(real.named_buffers(), on_meta.named_buffers(), strict=True):
            assert torch.equal(a, b), name


def different_seed_per_rank() -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's generator stands at the same place afterwards on every rank and at every degree."""
    torch.manual_seed(1)
    ColumnParallelLinear(4, 8)
    ParallelEmbedding(8, 4, padding_idx=2)
    row = RowParallelLinear(8, 4)
    assert row.bias is not None
    return torch.rand(3), row.bias.detach()


def test_initialisation_draws_the_same_at_every_degree():
    after, bias = different_seed_per_rank()
    torch.manual_seed(1)
    nn.Linear(4, 8), nn.Embedding(8, 4, padding_idx=2)
    plain = nn.Linear(8, 4)
    assert torch.equal(plain.bias, bias) and torch.equal(torch.rand(3), after)
    for other, other_bias in run_ranks(different_seed_per_rank, 2):
        assert torch.equal(other, after) and torch.equal(other_bias, bias)


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


# --- groups --------------------------------------------------------------------------------------------------


def groups() -> list[str]:
    group = parallel_state.get_tensor_model_parallel_group()
    x = torch.ones(2) * (current_context().tp.rank + 1)
    assert mappings.reduce_from_tensor_model_parallel_region(x, group).tolist() == [3.0, 3.0]
    layers = [
        ColumnParallelLinear(4, 6, tensor_model_parallel_group=group),
        RowParallelLinear(4, 6, tensor_model_parallel_group="cp"),
    ]
    for axis, every in (
        ("tp", parallel_state.get_tensor_model_parallel_group(as_list=True)),
        ("cp", parallel_state.get_context_parallel_group(as_list=True)),
    ):
        own = next(ranks for ranks in every if current_context().rank in ranks)
        assert axis_of(every, current_context()) == axis_of(own, current_context()) == axis
    try:
        ColumnParallelLinear(4, 6, tensor_model_parallel_group=dist.new_group([0, 1, 2]))
    except ParallelConfigError as problem:
        message = str(problem)
    return [layer.axis for layer in layers] + [str(layer.degree) for layer in layers] + [message]


def test_groups():
    found = run_ranks(groups, 4, tp=2, cp=2)
    assert all(axes[:4] == ["tp", "cp", "2", "2"] for axes in found)
    assert "ranks [0, 1, 2] is not a parallel group of rank 0" in found[0][4]
    for wrong in ("ep", 3, [[0, 1]]):
        with pytest.raises(ParallelConfigError):
            ColumnParallelLinear(4, 6, tensor_model_parallel_group=wrong)


# --- mappings ------------------------------------------------------------------------------------------------


def mapping_cases() -> dict[str, float]:
    """Every mapping, forward and backward, against what its definition says."""
    tp = current_context().tp
    base = torch.arange(2 * 4 * 8, dtype=torch.float64).view(2, 4, 8) / 10
    mine = base * (tp.rank + 1)
    total = base * sum(range(1, tp.degree + 1))
    stacked = [base * (rank + 1) for rank in range(tp.degree)]
    found: dict[str, float] = {}

    def check(name: str, move, x, expected, grad, expected_grad) -> None:
        x = x.clone().requires_grad_()
        y = move(x)
        y.backward(grad)
        found[name] = max(error(y, expected), error(x.grad, expected_grad))

    check("copy", mappings.copy_to_tensor_model_parallel_region, base, base, mine, total)
    check("reduce", mappings.reduce_from_tensor_model_parallel_region, mine, total, base, base)
    scatter = mappings.scatter_to_tensor_model_parallel_region
    gather = mappings.gather_from_tensor_model_parallel_region
    pieces = torch.cat([piece_of(s, r, -1) for r, s in enumerate(stacked)], -1)
    check("scatter", scatter, base, piece(base, -1), piece(mine, -1), pieces)
    check("gather", gather, mine, torch.cat(stacked, -1), torch.cat(stacked, -1), mine)
    for dim in (0, 1, -1) if tp.degree == 2 else (1, -1):
        pieces = torch.cat([piece_of(s, r, dim) for r, s in enumerate(stacked)], dim)
        whole, reduced = torch.cat(stacked, dim), piece(total, dim)
        move = partial(mappings.scatter_to_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence scatter {dim}", move, base, piece(base, dim), piece(mine, dim), pieces)
        factor = sum(range(1, tp.degree + 1))
        move = partial(mappings.gather_from_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence gather {dim}", move, mine, whole, whole * (tp.rank + 1), mine * factor)
        move = partial(move, to_model_parallel=False)
        check(f"sequence gather alike {dim}", move, mine, whole, whole, mine)
        move = partial(mappings.reduce_scatter_to_sequence_parallel_region, sequence_dimension=dim)
        check(f"sequence reduce-scatter {dim}", move, mine, reduced, piece(mine, dim), pieces)
        move = partial(mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim, partition_dim=dim)
        check(f"reduce-scatter {dim}", move, mine, reduced, piece(mine, dim), pieces)
    image = base[:, :, None, :].contiguous()
    channels = mappings.scatter_input_channels_to_tensor_model_parallel_region(image)
    found["channels"] = error(channels, image.chunk(tp.degree, 1)[tp.rank])
    with torch.no_grad():
        found["no grad"] = error(gather(mine), torch.cat(stacked, -1))
    return found


def piece_of(x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    return x.chunk(current_context().tp.degree, dim)[rank]


@pytest.mark.parametrize("tp", [2, 4])
def test_mappings(tp: int):
    for found in run_ranks(mapping_cases, tp):
        assert len(found) >= 16
        assert all(value < 1e-12 for value in found.values()), found


def backward_in_another_thread() -> torch.Tensor:
    """The backward runs in the groups of the forward, whatever the current context has become."""
    x = torch.ones(3, requires_grad=True)
    y = mappings.copy_to_tensor_model_parallel_region(x).sum()
    with use_context(make_context()):
        y.backward()
    return x.grad


def test_backward_keeps_the_context():
    assert [grad.tolist() for grad in run_ranks(backward_in_another_thread, 2)] == [[2.0] * 3] * 2


# --- errors --------------------------------------------------------------------------------------------------


def test_indivisible_size_is_reported_at_first_use():
    with two():
        column, row = ColumnParallelLinear(4, 9), RowParallelLinear(9, 4)  # pad_model has its chance
        qkv = GQAQKVColumnParallelLinear(4, [9, 3])
    for layer, x, what in ((column, (2, 4), "output_size = 9"), (row, (2, 9), "input_size = 9"), (qkv, (2, 4), "= 9")):
        with pytest.raises(ShardingError, match=f"{what} does not divide over 2 ranks") as caught:
            layer(torch.ones(x))
        assert "1, 3, 9" in str(caught.value) and "pad_model" in str(caught.value)
        assert ("with pad=True" in str(caught.value)) == (layer is not qkv), "where the layer has that option"


def test_options_that_contradict_each_other():
    with pytest.raises(ParallelConfigError, match="input_is_parallel=True"):
        RowParallelLinear(4, 4, sequence_parallel_enabled=True)
    with pytest.raises(ParallelConfigError, match="bias=False or skip_bias_add=True"):
        RowParallelLinear(4, 4, reduce_output=False)
    with two(), pytest.raises(ShardingError, match="no input may be on two ranks"):
        RowParallelLinear(4, 4, input_plan=GQAQKVColumnParallelLinear(4, [8, 4], head_dim=4).kv_plan)
    with pytest.raises(ShardingError, match="stride must divide it"):
        ColumnParallelLinear(4, 10, stride=4)
    with pytest.raises(ParallelConfigError, match="got True"):
        ColumnParallelLinear(4, 4, device=True)


def partial_sums() -> torch.Tensor:
    torch.manual_seed(0)
    layer = RowParallelLinear(8, 4, bias=False, reduce_output=False)
    torch.manual_seed(0)
    reference = nn.Linear(8, 4, bias=False)
    x = torch.ones(2, 8)
    whole = mappings.reduce_from_tensor_model_parallel_region(layer(x))
    return (whole - reference(x)).abs().max()


def test_partial_sums():
    assert max(run_ranks(partial_sums, 2)) < 1e-6


def test_utils():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ShardingError, match=r"10 is not divisible by 4; it divides by \[1, 2, 5, 10\]"):
        utils.divide(10, 4)
    with pytest.raises(ShardingError):
        utils.divide(10, 0)
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


def replaced() -> float:
    """replace_parameters: another plan and its tensors; the layer computes by them at once."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 9)
    torch.manual_seed(0)
    reference = nn.Linear(4, 9)
    plan = AxisPlan.padded(9, 3)
    padded = ColumnParallelLinear(4, 9, output_plan=plan)
    layer.replace_parameters({"output_plan": plan}, weight=own_part(padded, "weight", reference.weight.detach()))
    assert layer.weight.nxd_layout.axes[0] == plan
    return error(layer(torch.ones(2, 4)), reference(torch.ones(2, 4)))


def test_replace_parameters():
    assert max(run_ranks(replaced, 2)) < 1e-6
