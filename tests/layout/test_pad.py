"""``pad_model``: padded models compute what the plain ones do, whatever was built, sharded or loaded before."""

import copy
import math

import pytest
import torch
from torch import nn

from nxd_infer.comm import collectives_of
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, load_weights, merge_state_dicts, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import pad
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
)
from nxd_infer.parallel_layers.pad import generate_padding_mask, get_number_of_extra_heads, pad_model
from tests.layout.attention import Shape, logical_weights
from tests.layout.pad_models import F64, STYLES, ParallelAttention, compare, difference, inputs, reference, run_padded
from tests.layout.threads import built, run_threads


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def padded_with_layouts(shape, style, loaded):
    result = run_padded(shape, style, loaded)
    model = ParallelAttention(shape, style)
    pad_model(model, current_context().tp.degree, shape.heads)
    return result, weight_layout(model)


def check(shape, degree, style, loaded):
    found = run_threads(padded_with_layouts, degree, shape, style, loaded)
    worst = compare([result for result, _ in found], shape, found[0][1])
    assert worst < 1e-10, f"tp {degree}, {shape.heads} heads, {shape.kv_heads} kv heads, {style}, loaded {loaded}"


@pytest.mark.parametrize("degree", range(1, 9))
def test_every_combination_of_heads(degree):
    """Every number of heads and kv heads; the style and the time of loading take turns."""
    turn = 0
    for heads in range(1, 17):
        for kv_heads in divisors(heads):
            check(Shape(heads, kv_heads), degree, STYLES[turn % 3], ("before", "after")[turn // 3 % 2])
            turn += 1


@pytest.mark.check
@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads"), [(2, 3, 3), (3, 4, 2), (3, 8, 2), (4, 6, 3), (4, 4, 2), (4, 1, 1)]
)
def test_every_style_before_and_after_loading(degree, heads, kv_heads, style, loaded):
    check(Shape(heads, kv_heads), degree, style, loaded)


@pytest.mark.check
def test_a_head_that_straddled_two_ranks_is_whole_again():
    """3 heads of 4 at tp 2: padding each rank's slice at its tail would tear the second head."""
    check(Shape(3, 3, head_dim=4), 2, "separate", "before")


def test_padding_on_real_ranks_matches_a_naive_reference():
    from tests.ranks import run_ranks

    for degree, heads, kv_heads in [(2, 3, 3), (2, 5, 1), (3, 4, 2), (4, 6, 3), (4, 10, 2)]:
        shape = Shape(heads, kv_heads)
        for style, loaded in (("separate", "before"), ("fused", "before"), ("unfused", "after")):
            found = run_ranks(padded_with_layouts, degree, shape, style, loaded, timeout=120)
            assert compare([result for result, _ in found], shape, found[0][1]) < 1e-10, (degree, shape, style, loaded)


def test_a_trained_padded_model_merges_to_what_plain_training_gives():
    """A step of SGD on the padded ranks equals one on the plain weights: filling never learns."""
    shape, degree = Shape(3, 1), 2
    (_, _, gradients) = reference(shape)
    expected = {name: tensor - 0.1 * gradients[name] for name, tensor in logical_weights(shape).items()}

    found = run_threads(train_once, degree, shape)
    merged = merge_state_dicts([state for state, _ in found], found[0][1])
    assert all(difference(merged[name], expected[name]) < 1e-10 for name in expected)


def train_once(shape):
    tp = current_context().tp
    model = ParallelAttention(shape, "fused")
    pad_model(model, tp.degree, shape.heads)
    load_weights(model, logical_weights(shape), rank=tp.rank, degree=tp.degree)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, seen = inputs(shape)
    model(x).backward(seen)
    optimizer.step()
    layouts = weight_layout(model)
    for name, parameter in model.named_parameters():
        for slices, value in layouts[name].rank_layout(tp.degree, tp.rank).fills():
            assert (parameter[slices] == value).all(), f"the filling of {name} has learned"
    return model.state_dict(), layouts


# --- layers that give or take whole features ----------------------------------------------------------------


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = ParallelEmbedding(11, 6, dtype=F64)
        self.up = ColumnParallelLinear(6, 9, bias=True, gather_output=True, dtype=F64)
        self.down = RowParallelLinear(9, 6, bias=True, input_is_parallel=False, dtype=F64)
        self.head = ColumnParallelLinear(6, 11, bias=False, gather_output=True, dtype=F64)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(torch.tanh(self.up(self.embed(ids)))))


def gathered(pads):
    model = built(Gathered)
    if pads:
        pad_model(model, current_context().tp.degree, 3)
    y = model(torch.arange(11)[None])
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return y.detach(), grads, weight_layout(model), model.head.weight is model.embed.weight, model.up.output_size


@pytest.mark.check
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gathered_outputs_with_bias_keep_their_width(degree):
    """The reference breaks here: 10 outputs meet a bias of 9. Ours gathers the 9 logical outputs; ties hold."""
    ((expected, gradients, _, _, _),) = run_threads(gathered, 1, False)
    found = run_threads(gathered, degree, True)
    for y, _, _, tied, size in found:
        assert y.shape == (1, 11, 11) and tied and size == 9
        assert difference(y, expected) < 1e-10
    merged = merge_state_dicts([grads for _, grads, _, _, _ in found], found[0][2])
    assert all(difference(merged[name], gradients[name]) < 1e-10 for name in merged)


@pytest.mark.check
def test_an_indivisible_layer_says_what_to_do_at_its_first_use():
    def use():
        layer = ColumnParallelLinear(4, 9, gather_output=False)
        with pytest.raises(ShardingError, match=r"9 does not divide over 2 ranks.*pad_model"):
            layer(torch.ones(1, 4))
        pad_model(layer, 2, 3)
        return layer(torch.ones(1, 4)).shape[-1]

    assert run_threads(use, 2) == [5, 5]


# --- other ways to write it ---------------------------------------------------------------------------------


class StridedBlock(nn.Module):
    """A fused c_attn of three sections in one logical tensor, and a gated MLP whose gate and up are one layer."""

    def __init__(self, heads=3, head_dim=2, inner=9):
        super().__init__()
        size = heads * head_dim
        self.head_dim = head_dim
        self.c_attn = ColumnParallelLinear(size, 3 * size, stride=3, gather_output=False, dtype=F64)
        self.c_proj = RowParallelLinear(size, size, input_is_parallel=True, dtype=F64)
        self.gate_up = ColumnParallelLinear(size, 2 * inner, stride=2, gather_output=False, dtype=F64)
        self.down = RowParallelLinear(inner, size, input_is_parallel=True, dtype=F64)
        self.split_size = divide_evenly(size)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.c_attn(x).split(self.split_size, -1))
        out = torch.einsum("hij,jhd->ihd", torch.einsum("ihd,jhd->hij", q, k).softmax(-1), v)
        x = self.c_proj(out.flatten(1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


def divide_evenly(size):
    return size // current_context().tp.degree


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


@pytest.mark.parametrize("degree", [2, 4])
def test_strided_layers_and_the_hook_of_the_guide(degree):
    (expected,) = run_threads(strided, 1)
    assert all(difference(y, expected) < 1e-10 for y in run_threads(strided, degree))


class BertSelf(nn.Module):
    def __init__(self, kv=6):
        super().__init__()
        self.query, self.key, self.value = (
            ColumnParallelLinear(6, size, gather_output=False, dtype=F64) for size in (6, kv, kv)
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 2)) for t in (self.query(x), self.key(x), self.value(x)))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return torch.einsum("hij,jhd->ihd", torch.einsum("ihd,jhd->hij", q, k).softmax(-1), v).flatten(1)


class BertOutput(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.dense = RowParallelLinear(size, 6, input_is_parallel=True, dtype=F64)

    def forward(self, x):
        return self.dense(x)


class BertLayer(nn.Module):
    def __init__(self, kv=6):
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelf(kv), "output": BertOutput()})
        self.intermediate = ColumnParallelLinear(6, 10, gather_output=False, dtype=F64)
        self.output = BertOutput(10)

    def forward(self, x):
        x = self.attention["output"](self.attention["self"](x))
        return self.output(torch.sigmoid(self.intermediate(x)))


def bert(kv):
    model = nn.Sequential(built(BertLayer, kv), built(BertLayer, kv))
    pad_model(model, current_context().tp.degree, 3)
    return model(torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(3))).detach()


@pytest.mark.parametrize("kv", [6, 2])
@pytest.mark.parametrize("degree", [2, 3, 4])
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


def test_only_wrapped_classes_are_padded():
    def only():
        model = nn.ModuleDict({"attention": ParallelAttention(Shape(3, 3), "separate"), "mlp": Mlp(), "mlp2": Mlp()})
        pad_model(model, 2, 3, wrapped_classes=ParallelAttention)
        assert model["attention"].q.output_size == 8 and model["mlp"].up.output_size == 12
        assert model["mlp"].up.weight.shape == (6, 6)

    run_threads(only, 2)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(6, 12, gather_output=False, dtype=F64)
        self.down = RowParallelLinear(12, 6, input_is_parallel=True, dtype=F64)

    def forward(self, x):
        return self.down(torch.sigmoid(self.up(x)))


# --- what padding leaves behind -----------------------------------------------------------------------------


@pytest.mark.check
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


def test_padding_twice_changes_nothing_more():
    def twice():
        model = ParallelAttention(Shape(4, 2), "fused")
        pad_model(model, 3, 4)
        before = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
        pad_model(model, 3, 4)
        after = dict(model.named_parameters())
        assert all(after[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())

    run_threads(twice, 3)


def test_a_model_that_divides_is_left_alone_without_a_collective():
    def even():
        model = ParallelAttention(Shape(4, 4), "separate")
        before = dict(model.named_parameters())
        pad_model(model, 2, 4)
        assert collectives_of(current_context()).calls == 0
        assert all(param is before[name] for name, param in model.named_parameters())

    run_threads(even, 2)


@pytest.mark.parametrize("style", STYLES)
def test_padding_for_a_larger_degree_shows_on_one_rank(style):
    """A model built without any group, padded for 4 ranks: the sizes of all ranks together, the same function."""
    shape = Shape(6, 3)
    model = ParallelAttention(shape, style)
    load_weights(model, logical_weights(shape), rank=0, degree=1)
    pad_model(model, 4, 6)
    model.num_heads = 8
    y = model(inputs(shape)[0])
    assert model.o.input_size == 16
    assert difference(y.detach(), reference(shape)[0]) < 1e-10


def test_meta_models_are_padded_without_values():
    def meta():
        with torch.device("meta"):
            model = ParallelAttention(Shape(3, 3), "separate")
        pad_model(model, 2, 3)
        assert model.q.weight.is_meta and model.q.weight.shape == (4, 5)

    run_threads(meta, 2)


@pytest.mark.check
def test_fake_models_are_padded_without_a_transport():
    """Tracing builds every rank of a model in one process, on fake tensors and with no group."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nxd_infer.context import make_context, use_context

    for rank in range(2):
        with use_context(make_context(2, rank, tp=2)), FakeTensorMode():
            model = ParallelAttention(Shape(6, 3), "fused")
            pad_model(model, 2, 6)
        assert model.o.weight.shape == (5, 6)
        layout = weight_layout(model)["qkv.weight_qkv"]
        assert layout.logical_shapes == {"q.weight": (12, 5), "k.weight": (6, 5), "v.weight": (6, 5)}
        assert layout.rank_shape(2) == tuple(model.qkv.weight_qkv.shape) == (18, 5)


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


@pytest.mark.check
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


@pytest.mark.check
def test_what_cannot_be_padded_is_refused():
    with pytest.raises(ParallelConfigError, match="0 heads"):
        pad_model(nn.Linear(2, 2), 2, 0)
    with pytest.raises(ParallelConfigError, match="wrapped_classes must hold classes"):
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


def test_ties_between_padded_layers_hold():
    def tied():
        model = nn.ModuleList([Mlp(), Mlp()])
        model[1].up.weight = model[0].up.weight
        pad_model(model, 2, 3)
        assert model[0].up.weight.shape == (8, 6) and model[0].up.bias is not model[1].up.bias
        assert model[1].up.weight is model[0].up.weight
        assert weight_layout(model)["1.up.weight"].alias_of == "0.up.weight"

    run_threads(tied, 2)


def test_a_tie_to_something_that_is_not_padded_is_refused():
    def tied():
        model = Gathered()
        model.other = nn.Linear(6, 6, bias=False)
        model.other.weight = model.embed.weight
        with pytest.raises(ShardingError, match=r"tied to other\.weight"):
            pad_model(model, 2, 3)

    run_threads(tied, 2)


def test_a_plan_given_by_the_model_is_kept():
    """A model that laid its heads out itself is padded already."""

    def own():
        plan = AxisPlan.heads(3, 2)
        model = nn.Sequential(
            ColumnParallelLinear(6, 6, gather_output=False, dtype=F64, output_plan=plan),
            RowParallelLinear(6, 6, input_is_parallel=True, dtype=F64, input_plan=plan),
        )
        before = dict(model.named_parameters())
        pad_model(model, 2, 3)
        assert all(param is before[name] for name, param in model.named_parameters())

    run_threads(own, 2)
