"""``pad_model``: padded models compute what the plain ones do, whatever was built, sharded or loaded before."""

import pytest
import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.layout import load_weights, merge_state_dicts, weight_layout
from nxd_infer.parallel_layers.layers import ColumnParallelLinear
from nxd_infer.parallel_layers.pad import pad_model
from tests.support.layout.attention import Shape, logical_weights
from tests.support.layout.pad_blocks import BertLayer, BertOutput, BertSelf, Gathered, Mlp, StridedBlock
from tests.support.layout.pad_models import (
    F64,
    STYLES,
    ParallelAttention,
    compare,
    difference,
    inputs,
    padded_with_layouts,
    reference,
)
from tests.support.layout.threads import built, run_threads


@pytest.mark.parametrize("style", STYLES)
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


def test_a_trained_padded_model_merges_to_what_plain_training_gives():
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

    run_threads(only, 2)
