"""Logical to rank to logical: exact for every kind of layout, streaming, and with errors that list names and shapes."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nxd_infer.errors import CheckpointError, ParallelConfigError, ShardingError, WeightMismatchError
from nxd_infer.layout import (
    AxisPlan,
    DictSource,
    Fill,
    MergedSource,
    ParamLayout,
    Run,
    TensorLayout,
    attach_layout,
    check_weights,
    gqa_plan,
    iter_shards,
    load_weights,
    merge_state_dicts,
    owned_blocks,
    shard_state_dict,
    shard_tensor,
    weight_layout,
)
from nxd_infer.layout.runs import axis_length, coalesce, cut

GQA = gqa_plan(6, 3, 1)


def fused_qkv():
    return AxisPlan.fused({"q": GQA.q_axis(2), "k": GQA.kv_axis(2), "v": GQA.kv_axis(2)})


LAYOUTS = {
    "replicated": ParamLayout.of([3, 4], "w"),
    "scalar": ParamLayout.of([], "w"),
    "column": ParamLayout.of([AxisPlan.even(24), 3], "w"),
    "row": ParamLayout.of([3, AxisPlan.even(24)], "w"),
    "uneven column": ParamLayout.of([AxisPlan.even(7), 3], "w"),
    "vocabulary": ParamLayout.of([AxisPlan.padded(21, 4, -7.0), 3], "w"),
    "heads": ParamLayout.of([AxisPlan.heads(5, 2)], "w"),
    "grouped query": ParamLayout.of([GQA.q_axis(2), 3], "w"),
    "grouped key": ParamLayout.of([GQA.kv_axis(2), 3], "w"),
    "output projection": ParamLayout.of([3, GQA.q_axis(2)], "w"),
    "fused qkv": ParamLayout.of([fused_qkv(), 3], {"q": "wq", "k": "wk", "v": "wv"}),
    "fused bias": ParamLayout.of([fused_qkv()], {"q": "bq", "k": "bk", "v": "bv"}),
    "gate up": ParamLayout.of([AxisPlan.fused([AxisPlan.even(8), AxisPlan.even(8)]), 3], {"0": "gate", "1": "up"}),
    "strided": ParamLayout.of([AxisPlan.strided(24, 3), 3], "w"),
    "sections": ParamLayout.of([AxisPlan.sections([AxisPlan.heads(3, 2), AxisPlan.heads(1, 2)]), 3], "w"),
}


class CountingSource(DictSource):
    def __init__(self, tensors):
        super().__init__(tensors)
        self.elements = 0
        self.largest = 0

    def read(self, name, slices=None):
        out = super().read(name, slices)
        self.elements += out.numel()
        self.largest = max(self.largest, out.numel())
        return out


def logical_of(layout):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.logical_shapes.items()}


def shards_of(layout, degree):
    """The tensor of each rank, read from a source that counts: no more than the rank holds, and nothing twice."""
    logical, pieces = logical_of(layout), []
    for rank in range(degree):
        source = CountingSource(logical)
        pieces.append(shard_tensor(source, layout.rank_layout(degree, rank)))
        assert source.elements <= pieces[-1].numel()
    assert {tuple(piece.shape) for piece in pieces} == {layout.rank_shape(degree)}
    return logical, pieces


def check_round_trip(layout, degree):
    """Merged again it is exact, and the blocks of first owners tile it: a norm over them counts each value once."""
    logical, pieces = shards_of(layout, degree)
    merged = merge_state_dicts([{"p": piece} for piece in pieces], {"p": layout})
    assert merged.keys() == logical.keys()
    assert all(torch.equal(merged[name], logical[name]) for name in logical)
    counted = {name: torch.zeros_like(tensor) for name, tensor in logical.items()}
    for rank, piece in enumerate(pieces):
        for block in owned_blocks(layout, degree, rank):
            counted[block.name][block.logical_slices] += 1
            assert torch.equal(piece[block.local_slices], logical[block.name][block.logical_slices])
    assert all(torch.equal(count, torch.ones_like(count)) for count in counted.values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_is_read_in_bounded_pieces(layout, monkeypatch):
    """What is read lies in memory beside the whole tensor: of a table of hundreds of megabytes, as much again."""
    source = CountingSource(logical_of(layout))
    own = layout.rank_layout(2, 1)
    whole = shard_tensor(source, own)
    elements, row = source.elements, max((block.numel // _rows(block) for block in own.blocks()), default=0)
    monkeypatch.setattr("nxd_infer.layout.shard.READ_BYTES", 8 * whole.element_size())
    source.largest = 0
    assert torch.equal(shard_tensor(source, own), whole)
    assert source.elements == 2 * elements and source.largest <= max(8, row)


def _rows(block):
    return (block.local[0][1] - block.local[0][0] or 1) if block.local else 1


LEAVES = st.one_of(
    st.builds(AxisPlan.even, st.integers(1, 12)),
    st.builds(AxisPlan.padded, st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, -1.0])),
    st.builds(AxisPlan.heads, st.integers(1, 6), st.integers(1, 3)),
    st.builds(lambda n, stride: AxisPlan.strided(n * stride, stride), st.integers(1, 6), st.integers(1, 3)),
    st.builds(
        lambda kv, group, d, multiplier, q: getattr(
            gqa_plan(kv * group, kv, 1, kv_size_multiplier=multiplier), "q_axis" if q else "kv_axis"
        )(d),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(0, 4),
        st.booleans(),
    ),
)
ONE_TENSOR = st.recursive(
    LEAVES,
    lambda plans: st.one_of(
        st.lists(plans, min_size=1, max_size=3).map(AxisPlan.sections),
        st.builds(AxisPlan.recut, plans, st.integers(1, 6)),
    ),
    max_leaves=4,
)
ANY_PLAN = ONE_TENSOR | st.lists(ONE_TENSOR, min_size=1, max_size=3).map(AxisPlan.fused)


@settings(max_examples=60)
@given(ANY_PLAN, st.integers(1, 8), st.booleans())
def test_any_composition_of_plans_goes_there_and_back(plan, degree, last):
    sources = {part: f"w{part}" for part in plan.parts}
    check_round_trip(ParamLayout.of([2, plan] if last else [plan, 2], sources), degree)


SPELLED = AxisPlan.from_runs([Run("", 4, 8), Fill(0.0, 4), Run("", 0, 4), Run("", 0, 4)])


@given(ANY_PLAN | st.sampled_from([AxisPlan.replicated(12), SPELLED]), st.integers(1, 8))
def test_a_plan_covers_its_axis_in_equal_pieces_and_indices_lay_it_out_and_back(plan, degree):
    ranks = [plan.runs(degree, rank) for rank in range(degree)]
    assert {axis_length(axis) for axis in ranks} == {plan.local_size(degree)}
    runs = [piece for axis in ranks for piece in axis if isinstance(piece, Run)]
    held = {(run.name, i) for run in runs for i in range(run.start, run.stop)}
    assert held == {(name, i) for name, size in plan.parts.items() for i in range(size)}
    x = torch.arange(1.0, plan.size + 1)
    filled = torch.cat([x, torch.zeros(1)])
    scatter, gather = plan.scatter_index(degree), plan.gather_index(degree)
    gathered = x if scatter is None else filled[scatter]
    assert gathered.numel() == plan.padded_size(degree)
    if plan.sharded:
        for rank, piece in enumerate(gathered.chunk(degree)):
            assert torch.equal(piece, filled[plan.rank_index(degree, rank)])
    assert torch.equal(gathered if gather is None else gathered[gather], x)


def test_owners_alone_are_enough():
    layout = LAYOUTS["replicated"]
    logical = logical_of(layout)
    assert torch.equal(merge_state_dicts([{"p": logical["w"]}, {}, {}], {"p": layout})["w"], logical["w"])
    with pytest.raises(CheckpointError, match="no tensor 'p'"):
        merge_state_dicts([{}, {"p": logical["w"]}], {"p": layout})


@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 8)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_resharding_streams_from_degree_to_degree(layout, old, new):
    logical, pieces = shards_of(layout, old)
    before = [CountingSource({"p": piece}) for piece in pieces]
    merged = MergedSource(before, {"p": layout})
    for rank in range(new):
        count = sum(source.elements for source in before)
        (_, piece), *rest = iter_shards({"p": layout}, merged, rank, new)
        assert not rest
        assert torch.equal(piece, shard_tensor(logical, layout.rank_layout(new, rank)))
        assert sum(source.elements for source in before) - count <= piece.numel()


def test_filling_is_what_the_plan_says_in_every_type():
    lowest = torch.finfo(torch.float32).min
    layout = ParamLayout.of([AxisPlan.padded(3, fill=lowest)], "b").rank_layout(2, 1)
    assert shard_tensor({"b": torch.ones(3)}, layout).tolist() == [1.0, lowest]
    half = shard_tensor({"b": torch.ones(3)}, layout, torch.float16)
    assert half.tolist() == [1.0, torch.finfo(torch.float16).min]


def test_a_shard_never_shares_memory_with_its_source():
    tensor = torch.ones(4, 3)
    shard_tensor({"w": tensor}, ParamLayout.of([4, 3], "w").rank_layout(1, 0)).zero_()
    assert tensor.sum() == 12


class Attention(nn.Module):
    """A rank's module of degree 2: fused qkv from three logical tensors, a tied pair, a buffer, a replicated norm."""

    def __init__(self, degree=2):
        super().__init__()
        self.qkv = nn.Linear(3, fused_qkv().local_size(degree))
        self.norm = nn.LayerNorm(3)
        self.embed = nn.Embedding(AxisPlan.padded(5).local_size(degree), 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        for name, rest in (("weight", [3]), ("bias", [])):
            sources = {part: f"../{part}_proj.{name}" for part in "qkv"}
            attach_layout(self.qkv, name, [fused_qkv(), *rest], sources, degree=degree)
        attach_layout(self.embed, "weight", [AxisPlan.padded(5), 3], degree=degree)
        attach_layout(self.head, "weight", [AxisPlan.padded(5), 3], degree=degree)


def attention_logical():
    shapes = {"q_proj": 12, "k_proj": 6, "v_proj": 6}
    out = {f"{name}.weight": torch.randn(n, 3) for name, n in shapes.items()}
    out |= {f"{name}.bias": torch.randn(n) for name, n in shapes.items()}
    return out | {
        "norm.weight": torch.randn(3),
        "norm.bias": torch.randn(3),
        "embed.weight": torch.randn(5, 3),
        "steps": torch.randn(2),
    }


def test_a_module_is_loaded_and_merged_back():
    logical = attention_logical()
    modules = [Attention() for _ in range(2)]
    for rank, module in enumerate(modules):
        load_weights(module, logical, rank=rank, degree=2)
        assert module.head.weight is module.embed.weight
    layouts = weight_layout(modules[0])
    merged = merge_state_dicts([module.state_dict() for module in modules], layouts)
    assert merged.keys() == logical.keys()
    assert all(torch.equal(merged[name], logical[name]) for name in logical)
    for rank, module in enumerate(modules):
        state = shard_state_dict(module, logical, rank, 2)
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
        module.load_state_dict(state)


def test_weights_of_another_model_are_refused_with_names_and_shapes():
    logical = attention_logical()
    del logical["norm.bias"]
    logical["q_proj.weight"] = torch.randn(10, 3)
    logical["stray"] = torch.randn(2, 7)
    module = Attention()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(WeightMismatchError) as caught:
        load_weights(module, logical, rank=0, degree=2)
    assert caught.value.missing == ("norm.bias",)
    assert caught.value.unexpected == ("stray",)
    assert caught.value.mismatched == (("q_proj.weight", (10, 3), (12, 3)),)
    for text in ("norm.bias", "stray [2, 7]", "q_proj.weight is [10, 3], wanted [12, 3]"):
        assert text in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    layouts, logical = weight_layout(module), attention_logical() | {"rope.inv_freq": torch.ones(1)}
    with pytest.raises(WeightMismatchError):
        check_weights(layouts, logical)
    check_weights(layouts, logical, ignore=["*.inv_freq"])
    check_weights(layouts, logical, strict=False)


def test_another_degree_is_refused():
    module = Attention(2)
    with pytest.raises(WeightMismatchError, match="not built for 4 ranks"):
        load_weights(module, attention_logical(), rank=0, degree=4)
    with pytest.raises(CheckpointError, match="another degree"):
        merge_state_dicts([module.state_dict()] * 3, weight_layout(module))


def test_a_layout_that_does_not_fit_its_parameter_is_refused():
    with pytest.raises(ShardingError, match=r"\(4, 3\).*\(6, 3\)"):
        attach_layout(nn.Linear(3, 4), "weight", [AxisPlan.even(12), 3], degree=2)
    with pytest.raises(ShardingError, match=r"axes \[0, 1\] are sharded"):
        ParamLayout.of([AxisPlan.even(8), AxisPlan.even(6)], "w")
    with pytest.raises(ShardingError, match="climbs above the root"):
        ParamLayout.of([4], "../../w").resolved("a", "w")


def test_a_layout_that_drops_elements_cannot_be_merged():
    layout = ParamLayout.of([AxisPlan.from_runs([Run("", 2, 6), Run("", 0, 1), Fill(0.0, 1)])], "w")
    logical = {"w": torch.randn(6)}
    ranks = [{"p": shard_tensor(logical, layout.rank_layout(2, rank))} for rank in range(2)]
    with pytest.raises(CheckpointError, match="holds 5 of the 6 elements asked for"):
        merge_state_dicts(ranks, {"p": layout})


RUNS = st.builds(lambda start, n: Run("", start, start + n), st.integers(0, 20), st.integers(0, 9))

FILLS = st.builds(Fill, st.sampled_from([0.0, -1.5, float("-inf")]), st.integers(0, 5))

AXES = st.lists(RUNS | FILLS, max_size=8).map(tuple)


def elements(axis: Any) -> list[Any]:
    """The axis spelled out, one entry an element."""
    return [
        (piece.name, piece.start + i) if isinstance(piece, Run) else piece.value
        for piece in axis
        for i in range(len(piece))
    ]


@given(AXES, AXES, st.data())
def test_cut_coalesce_and_json_keep_the_elements(axis: Any, other: Any, data: st.DataObject):
    length = axis_length(axis)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert elements(coalesce(axis)) == elements(axis)
    assert elements(cut(axis, start, stop)) == elements(axis)[start:stop]
    assert all(len(piece) for piece in coalesce(axis))
    layout = TensorLayout((axis, other), "model.weight")
    assert TensorLayout.from_json(json.loads(json.dumps(layout.to_json(), allow_nan=False))) == layout


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"axes": [], "source": 3},
        {"axes": [[["", 0]]], "source": ""},
        {"axes": [[["", 5, 2]]], "source": ""},
    ],
)
def test_json_that_describes_no_layout_is_refused(data: Any):
    with pytest.raises(ShardingError):
        TensorLayout.from_json(data)


def test_an_axis_that_does_not_divide_says_so_and_lists_what_does():
    plan = AxisPlan.even(10)
    assert plan.exact(5) and not plan.exact(4)
    with pytest.raises(ShardingError, match=r"output_size = 10 does not divide over 4 ranks.* 1, 2, 5, 10.*pad_model"):
        plan.require_exact(4, "output_size")
    AxisPlan.padded(10).require_exact(4, "output_size")
    assert not AxisPlan.strided(10, 2).exact(2)
    assert AxisPlan.recut(plan, 5).exact(5)


def test_what_makes_no_plan_is_refused():
    with pytest.raises(ShardingError, match="3 sections"):
        AxisPlan.strided(10, 3)
    with pytest.raises(ParallelConfigError, match="rank 2 is outside a group of 2"):
        AxisPlan.even(4).runs(2, 2)
    with pytest.raises(ParallelConfigError, match="at least 1"):
        AxisPlan.even(4).runs(0, 0)
    with pytest.raises(ShardingError, match=r"3\.\.7 out of an axis of 6"):
        cut((Run("", 0, 6),), 3, 7)
    with pytest.raises(ShardingError, match="only one axis"):
        TensorLayout(((Run("a", 0, 2),), (Run("b", 0, 2),)))
    for parts in ({"": AxisPlan.even(4)}, {"a": AxisPlan.replicated(4)}):
        with pytest.raises(ShardingError):
            AxisPlan.fused(parts)


def test_sources_must_name_every_part():
    plan = AxisPlan.fused({"q": AxisPlan.even(4), "k": AxisPlan.even(4)})
    with pytest.raises(ShardingError, match="parts"):
        ParamLayout.of([plan, 3], {"q": "q.weight"})
    layout = ParamLayout.of([plan, 3], {"q": "q.weight", "k": "k.weight"})
    assert layout.logical_shapes == {"q.weight": (4, 3), "k.weight": (4, 3)}
    assert layout.rank_layout(2, 1).axes[0] == (Run("q.weight", 2, 4), Run("k.weight", 2, 4))
    assert layout.partition_dim == 0 and layout.rank_shape(2) == (4, 3)


def test_a_rank_has_the_fewest_query_heads_and_then_the_fewest_kv_heads():
    """The chosen numbers against a search over all of them, and against the formula of the API guide."""
    for degree in range(1, 9):
        for heads in range(1, 13):
            for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
                plan = gqa_plan(heads, kv_heads, degree)
                possible = [
                    (k * g, k)
                    for k in range(1, heads + 1)
                    for g in range(1, heads + 1)
                    if kv_heads * -(-heads // kv_heads // g) <= degree * k
                ]
                assert (plan.heads_per_rank, plan.kv_heads_per_rank) == min(possible)
                assert plan.heads_per_rank * degree == heads + (-heads % degree)
                held = [h for rank in range(degree) for h in plan.query_heads(rank)]
                assert sorted(h for h in held if h is not None) == list(range(heads))
                assert {h for rank in range(degree) for h in plan.key_value_heads(rank)} - {None} == set(
                    range(kv_heads)
                )


def test_a_multiplier_sets_the_kv_heads_of_a_rank_where_it_costs_no_query_head():
    assert gqa_plan(8, 2, 4, kv_size_multiplier=2).kv_heads_per_rank == 1
    assert gqa_plan(8, 2, 4, kv_size_multiplier=4).kv_heads_per_rank == 2
    assert gqa_plan(20, 4, 4, kv_size_multiplier=2).kv_heads_per_rank == 1, "2 would need 6 query heads a rank, not 5"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (0, 1), (4, 0), (2, 4)])
def test_heads_that_cannot_share_are_refused(heads: int, kv_heads: int):
    with pytest.raises(ShardingError, match="kv heads must be one of"):
        gqa_plan(heads, kv_heads, 2)
