"""``pad_model``: padded models compute what the plain ones do; what it leaves behind, leaves alone and refuses."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nxd_infer.comm import collectives_of
from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, merge_state_dicts, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import pad
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    RowParallelLinear,
)
from nxd_infer.parallel_layers.pad import generate_padding_mask, get_number_of_extra_heads, pad_model
from tests.support.layout.pad_blocks import BertLayer, BertOutput, BertSelf, Gathered, Mlp, StridedBlock
from tests.support.layout.pad_models import (
    F64,
    ParallelAttention,
    Shape,
    compare,
    difference,
    padded_with_layouts,
)
from tests.support.layout.threads import built, run_threads


@pytest.mark.parametrize("style", ["separate", "fused", "unfused"])
@pytest.mark.parametrize(
    ("degree", "shape"),
    [
        (1, Shape(6, 3)),
        (2, Shape(3, 3, head_dim=4)),  # padding each rank's slice at its tail would tear the second head
        (2, Shape(5, 1)),
        (3, Shape(4, 2)),
        (3, Shape(8, 2)),
        (4, Shape(1, 1)),
        (4, Shape(6, 3)),
        (4, Shape(4, 2)),
        (8, Shape(12, 4)),
    ],
    ids=str,
)
def test_heads_of_every_style(degree, shape, style):
    """Loaded before padding and after it, in turns."""
    for loaded in ("before", "after") if degree == 4 else (("before", "after")[shape.heads % 2],):
        found = run_threads(padded_with_layouts, degree, shape, style, loaded)
        assert compare([result for result, _ in found], shape, found[0][1]) < 1e-10


def gathered(pads):
    model = built(Gathered)
    if pads:
        pad_model(model, current_context().tp.degree, 3)
    y = model(torch.arange(11)[None])
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return y.detach(), grads, weight_layout(model), model.head.weight is model.embed.weight, model.up.output_size


@pytest.mark.parametrize("degree", [2, 3])
def test_gathered_outputs_with_bias_keep_their_width(degree):
    """The reference breaks here: 10 outputs meet a bias of 9. Ours gathers the 9 logical outputs; ties hold."""
    ((expected, gradients, _, _, _),) = run_threads(gathered, 1, False)
    found = run_threads(gathered, degree, True)
    for y, _, _, tied, size in found:
        assert y.shape == (1, 11, 11) and tied and size == 9
        assert difference(y, expected) < 1e-10
    merged = merge_state_dicts([grads for _, grads, _, _, _ in found], found[0][2])
    assert all(difference(merged[name], gradients[name]) < 1e-10 for name in merged)


def bert(kv):
    model = nn.Sequential(built(BertLayer, kv), built(BertLayer, kv))
    pad_model(model, current_context().tp.degree, 3)
    return model(torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(3))).detach()


@pytest.mark.parametrize(("degree", "kv"), [(2, 2), (4, 6)])
def test_projections_in_modules_of_their_own_are_found(degree, kv):
    """As in BERT, where the output projection is no child of the attention; with 3 and with 1 key/value heads."""
    (expected,) = run_threads(bert, 1, kv)
    assert all(difference(y, expected) < 1e-10 for y in run_threads(bert, degree, kv))


def test_wrapped_classes_that_part_a_pair_are_refused_before_anything_changes():
    def part():
        model = BertLayer()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ShardingError, match=r"'attention.self.query' is inside wrapped_classes.*'attention.output"):
            pad_model(model, 2, 3, wrapped_classes=(BertSelf,))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        pad_model(model, 2, 3, wrapped_classes=[BertSelf, BertOutput, ColumnParallelLinear])

    run_threads(part, 2)


def strided():
    model = built(StridedBlock)
    degree = current_context().tp.degree
    calls = []

    def hook(block, ratio):
        calls.append((block, ratio))
        block.split_size = int(6 * ratio) // degree

    pad_model(model, degree, 3, wrapped_classes=[StridedBlock], pad_hook_fn=hook)
    assert [(block is model, ratio) for block, ratio in calls] == [(True, (3 + -3 % degree) / 3)]
    x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(3))
    return model(x).detach()


def test_strided_layers_and_the_hook_of_the_guide():
    (expected,) = run_threads(strided, 1)
    assert all(difference(y, expected) < 1e-10 for y in run_threads(strided, 4))


def test_only_wrapped_classes_are_padded():
    def only():
        model = nn.ModuleDict({"attention": ParallelAttention(Shape(3, 3), "separate"), "mlp": Mlp(), "mlp2": Mlp()})
        pad_model(model, 2, 3, wrapped_classes=ParallelAttention)
        assert model["attention"].q.output_size == 8 and model["mlp"].up.output_size == 12
        assert model["mlp"].up.weight.shape == (6, 6)
        layer = pad_model(ColumnParallelLinear(4, 9, gather_output=False), 2, 3)  # one alone
        assert layer(torch.ones(1, 4)).shape == (1, 5)

    run_threads(only, 2)


def test_sizes_attributes_and_flags_follow():
    def look():
        model = ParallelAttention(Shape(3, 3, head_dim=4), "separate")
        model.q.weight.requires_grad_(False)
        model.q.weight.sequence_parallel_enabled = True
        assert pad_model(model, 2, 3) is model
        q, o = model.q, model.o
        assert (q.output_size, q.output_size_per_partition, q.weight.shape, q.bias.shape) == (16, 8, (8, 5), (8,))
        assert (o.input_size, o.input_size_per_partition, o.weight.shape, o.bias.shape) == (16, 8, (5, 8), (5,))
        assert q.weight.tensor_model_parallel and q.weight.partition_dim == 0 and q.weight.num_partitions == 2
        assert o.weight.tensor_model_parallel and o.weight.partition_dim == 1
        assert not q.weight.requires_grad and q.weight.sequence_parallel_enabled
        assert q.output_plan.exact(2) and o.input_plan.exact(2)
        return [tuple(p.shape) for p in copy.deepcopy(model).parameters()]

    first, second = run_threads(look, 2)
    assert first == second


def padded_leaves_alone(model, degree, heads):
    before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    pad_model(model, degree, heads)
    after = dict(model.named_parameters())
    return all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())


def test_what_needs_no_padding_is_left_alone():

    def twice():
        model = ParallelAttention(Shape(4, 2), "fused")
        pad_model(model, 3, 4)
        assert padded_leaves_alone(model, 3, 4)

    def even():
        assert padded_leaves_alone(ParallelAttention(Shape(4, 4), "separate"), 2, 4)
        assert collectives_of(current_context()).calls == 0
        plan = AxisPlan.heads(3, 2)
        own = nn.Sequential(
            ColumnParallelLinear(6, 6, gather_output=False, dtype=F64, output_plan=plan),
            RowParallelLinear(6, 6, input_is_parallel=True, dtype=F64, input_plan=plan),
        )
        assert padded_leaves_alone(own, 2, 3)

    run_threads(twice, 3)
    run_threads(even, 2)


def test_meta_and_fake_models_are_padded_without_values_or_a_transport():
    """Tracing builds every rank of a model in one process, on fake tensors and with no group."""
    for rank in range(2):
        for without_values in (torch.device("meta"), FakeTensorMode()):
            with use_context(make_context(2, rank, tp=2)), without_values:
                model = ParallelAttention(Shape(6, 3), "fused")
                pad_model(model, 2, 6)
            assert model.o.weight.shape == (5, 6)
            layout = weight_layout(model)["qkv.weight_qkv"]
            assert layout.logical_shapes == {"q.weight": (12, 5), "k.weight": (6, 5), "v.weight": (6, 5)}
            assert layout.rank_shape(2) == tuple(model.qkv.weight_qkv.shape) == (18, 5)


def test_extra_heads_and_the_ratio():
    assert [get_number_of_extra_heads(n, 4) for n in (1, 3, 4, 5, 12)] == [3, 1, 0, 3, 0]
    for n in range(1, 65):
        for degree in (2, 3, 5, 7, 8, 32):
            padded = n + get_number_of_extra_heads(n, degree)
            ratio = pad.HeadRatio(padded, n)
            assert ratio == padded / n and isinstance(ratio, float)
            assert int(n * 80 * ratio) == padded * 80 == int(ratio * (n * 80))
    assert math.isclose(pad.HeadRatio(4, 3) * 5, 20 / 3) and pad.HeadRatio(4, 3) * 1.5 == 2.0


def test_the_padding_mask_marks_real_heads():
    assert generate_padding_mask(3, 4, tp_degree=2, tp_rank=1).tolist() == [True, False]
    assert generate_padding_mask(8, 9, 2, 9, 3, 2).tolist() == [True, True, False]
    with pytest.raises(ShardingError, match="padded to 4 and"):
        generate_padding_mask(3, 6, tp_degree=2)


def test_what_cannot_be_padded_is_refused():
    with pytest.raises(ParallelConfigError, match="at least 1, got 0"):
        pad_model(nn.Linear(2, 2), 2, 0)
    with pytest.raises(ParallelConfigError, match="wrapped_classes must contain classes"):
        pad_model(nn.Linear(2, 2), 2, 2, wrapped_classes=["Attention"])
    with pytest.warns(UserWarning, match="no instance of BertSelf"):
        pad_model(nn.Linear(2, 2), 2, 2, wrapped_classes=[BertSelf])
    qkv = GQAQKVColumnParallelLinear(4, [6, 2], gather_output=False)
    with pytest.raises(ShardingError, match="not whole heads when there are n_heads=4"):
        pad_model(qkv, 2, 4)
    with pytest.raises(ShardingError, match="need a RowParallelLinear"):
        pad_model(GQAQKVColumnParallelLinear(4, [12, 4], gather_output=False), 4, 6)

    def wrong_degree():
        with pytest.raises(ParallelConfigError, match="split over 2 ranks"):
            pad_model(Mlp(), 3, 3)

    run_threads(wrong_degree, 2)


def test_ties_between_padded_layers_hold_and_others_are_refused():
    def tied():
        model = nn.ModuleList([Mlp(), Mlp()])
        model[1].up.weight = model[0].up.weight
        pad_model(model, 2, 3)
        assert model[0].up.weight.shape == (8, 6) and model[0].up.bias is not model[1].up.bias
        assert model[1].up.weight is model[0].up.weight
        assert weight_layout(model)["1.up.weight"].alias_of == "0.up.weight"
        other = Gathered()
        other.other = nn.Linear(6, 6, bias=False)
        other.other.weight = other.embed.weight
        with pytest.raises(ShardingError, match=r"tied to 'other\.weight'"):
            pad_model(other, 2, 3)

    run_threads(tied, 2)


def test_channels_of_convolutions_are_filled_up():
    def make():
        return nn.Sequential(
            OutputChannelParallelConv2d(2, 5, 3, gather_output=False, dtype=F64),
            InputChannelParallelConv2d(5, 2, 1, input_is_parallel=True, dtype=F64),
        )

    def convolve():
        model = pad_model(built(make), current_context().tp.degree, 3)
        return model(torch.ones(1, 2, 4, 4, dtype=F64)).detach()

    (expected,) = run_threads(convolve, 1)
    assert all(difference(y, expected) < 1e-10 for y in run_threads(convolve, 2))
