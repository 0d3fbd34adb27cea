"""Routing against a naive search, and every refusal of a call's arguments."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, OutputSpec
from nxd_infer.errors import BucketError, InputMismatchError, InputRangeError
from nxd_infer.runtime.router import Router, cut, fill, lawful


def bucket(name: str, shapes: dict[str, tuple[int, ...]], pads: dict[str, set[int]], **more) -> BucketSpec:
    inputs = [
        InputSpec.of(key, torch.zeros(shape), pad=dict.fromkeys(pads.get(key, ()), 7.0), default=more.get(key))
        for key, shape in shapes.items()
    ]
    return BucketSpec(name=name, inputs=inputs, outputs=[], graphs=["g"])


sizes = st.integers(1, 6)


@st.composite
def tables_and_calls(draw):
    """A few buckets of one signature, and a call that may or may not fit any of them."""
    ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    pads = {f"i{n}": set(draw(st.sets(st.integers(0, max(dims - 1, 0))))) for n, dims in enumerate(ranks) if dims}
    buckets = [
        bucket(f"b{k}", {f"i{n}": tuple(draw(sizes) for _ in range(dims)) for n, dims in enumerate(ranks)}, pads)
        for k in range(draw(st.integers(1, 5)))
    ]
    call = {f"i{n}": torch.zeros([draw(sizes) for _ in range(dims)]) for n, dims in enumerate(ranks)}
    if draw(st.booleans()):  # a call that equals a bucket
        chosen = draw(st.sampled_from(buckets))
        call = {spec.name: torch.zeros(spec.shape) for spec in chosen.inputs}
    return buckets, pads, call


def naive(buckets: list[BucketSpec], pads: dict[str, set[int]], call: dict[str, torch.Tensor]) -> int | None:
    """Try every bucket; of those every dimension of which is equal or padded up, the one with the fewest elements."""
    best = None
    for index, candidate in enumerate(buckets):
        good, elements = True, 0
        for spec in candidate.inputs:
            elements += math.prod(spec.shape)
            for dim, size in enumerate(spec.shape):
                have = call[spec.name].shape[dim]
                good = good and (have == size or (have < size and dim in pads.get(spec.name, set())))
        if good and (best is None or elements < best[0]):
            best = (elements, index)
    return None if best is None else best[1]


@settings(max_examples=100)
@given(tables_and_calls())
def test_routes_as_a_naive_search_does(case):
    buckets, pads, call = case
    want = naive(buckets, pads, call)
    router = Router(buckets)
    if want is None:
        with pytest.raises(BucketError) as caught:
            router.route([], call)
        assert all(b.name in str(caught.value) for b in buckets)
        assert len(caught.value.buckets) == len(buckets)
        return
    assert router.route([], call).bucket == want
    assert router.route(list(call.values()), {}).bucket == want
    exact = [i for i, b in enumerate(buckets) if all(list(call[s.name].shape) == s.shape for s in b.inputs)]
    if exact:
        assert want == exact[0]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_filling_keeps_the_values_and_pads_the_rest(inner, data):
    outer = [size + data.draw(st.integers(0, 3)) for size in inner]
    spec = InputSpec.of("x", torch.zeros(outer), pad=dict.fromkeys(range(len(outer)), 9.0))
    values = torch.arange(1, math.prod(inner) + 1, dtype=torch.float32).view(inner)
    view = torch.full(outer, float("nan"))
    fill(view, spec, values)
    for index in itertools.product(*(range(size) for size in outer)):
        inside = all(i < size for i, size in zip(index, inner, strict=True))
        assert view[index] == (values[index] if inside else 9.0)


def test_padding_and_defaults_are_of_the_inputs_own_kind():
    """What fits a type fills an input, as far as a float holds it; infinities fill a mask, say."""
    for dtype, value, expected in (
        (torch.int64, 3.0, 3),
        (torch.bool, 7, True),
        (torch.int32, 2**31 - 1, 2**31 - 1),
        (torch.uint8, 255, 255),
        (torch.float32, -math.inf, -math.inf),
    ):
        view = torch.zeros(4, dtype=dtype)
        spec = InputSpec.of("x", view, pad={0: value}, default=value)
        fill(view, spec, torch.zeros(2, dtype=dtype))
        assert view.tolist() == [0, 0, expected, expected]
        fill(view, spec, None)
        assert view.tolist() == [expected] * 4


@pytest.mark.parametrize(
    ("positional", "named", "text"),
    [
        ([], {}, "input 'x' is missing and has no default"),
        ([torch.zeros(2)] * 3, {}, "3 inputs given, bucket 'b' takes 2: x, y"),
        ([torch.zeros(2)], {"x": torch.zeros(2)}, "input 'x' is given by position and by name"),
        ([torch.zeros(2)], {"z": torch.zeros(2)}, "there is no input 'z'; the inputs are x, y"),
        ([torch.zeros(2).double()], {}, r"input 'x' is float64\[2\], expected float32\[2\].*\.to\(torch\.float32\)"),
        ([[1.0, 2.0]], {}, "input 'x' is a list, expected a torch.Tensor"),
        ([torch.zeros(2).to_sparse()], {}, "input 'x' has layout torch.sparse_coo"),
        ([torch.zeros(2, device="meta")], {}, "input 'x' is on meta, expected cpu"),
    ],
)
def test_wrong_arguments_are_named(positional, named, text):
    router = Router([bucket("b", {"x": (2,), "y": (2,)}, {}, y=0.0)])
    with pytest.raises(InputMismatchError, match=text) as caught:
        router.route(positional, named)
    assert not isinstance(caught.value, BucketError)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: ([x], torch.tensor(5)), "chose bucket 5 of 2"),
        (lambda x: ([x], torch.tensor(1)), "does not fit its bucket"),
        (lambda x: ([x, x], torch.tensor(0)), "2 inputs given"),
    ],
)
def test_a_kernel_that_is_wrong_is_told_so(result, text):
    table = [bucket("s2", {"x": (2,)}, {}), bucket("s4", {"x": (4,)}, {})]
    with pytest.raises(BucketError, match=text):
        Router(table, lambda tensors: result(tensors[0])).route([torch.ones(2)], {})


def test_outputs_are_cut_as_declared():
    spec = OutputSpec.of("y", torch.zeros(4, 8, 3), cut={0: ("x", 0), 1: ("x", 1)})
    table = bucket("b", {"x": (4, 8)}, {"x": {0, 1}})
    table.outputs.append(spec)
    (y,) = cut(table, {"x": torch.zeros(2, 5)}, [torch.arange(96.0).view(4, 8, 3)])
    assert y.shape == (2, 5, 3)
    assert torch.equal(y, torch.arange(96.0).view(4, 8, 3)[:2, :5])
    (whole,) = cut(table, {}, [torch.zeros(4, 8, 3)])
    assert whole.shape == (4, 8, 3)


def ranged(dtype: torch.dtype = torch.int64, **limits) -> BucketSpec:
    ids = InputSpec.of("ids", torch.zeros(2, 4, dtype=dtype), pad={0: 0, 1: 0}, **limits)
    return BucketSpec(name="b", inputs=[ids], outputs=[], graphs=["g"])


@pytest.mark.parametrize(
    ("dtype", "low", "high", "value"),
    [
        (torch.int64, 0, None, -1),
        (torch.int32, None, 5, 6),
        (torch.float32, -1, 7, 7.5),
        (torch.float32, 0, None, math.nan),
    ],
)
def test_values_outside_the_declared_range_are_refused(dtype, low, high, value):
    router = Router([ranged(dtype, minimum=low, maximum=high)])
    limits = [limit for limit in (low, high) if limit is not None]
    right = torch.tensor([[3, *limits, limits[0], 3][:4], [3, 3, 3, 3]], dtype=dtype)
    wrong = right.clone()
    wrong[0, 3] = value
    for run in (lambda ids: router.route([ids[:1]], {}), lambda ids: router.exact(0, {"ids": ids})):
        assert run(right).bucket == 0
        with pytest.raises(InputRangeError, match=f"input 'ids' holds the value {value}; it must be") as caught:
            run(wrong)
        assert caught.value.input == "ids" and all(str(limit) in str(caught.value) for limit in limits)
    assert router.route([right[:, :0]], {}).bucket == 0


@pytest.mark.parametrize(
    ("low", "high", "want"), [(None, None, 0), (2, 5, 2), (-5, -2, -2), (-1, 1, 0), (None, -4, -4)]
)
def test_what_a_warm_up_feeds_is_in_the_range(low, high, want):
    tensor = lawful(ranged(minimum=low, maximum=high).inputs[0])
    assert tensor.shape == (2, 4) and tensor.unique().tolist() == [want]


def test_nested_tensors_are_given_as_they_were_traced():
    one, two, three = (torch.full((2,), float(value)) for value in (1, 2, 3))
    router = Router([bucket("b", {"x.a": (2,), "x.b.0": (2,), "y": (2,)}, {})])
    for positional, named in (
        ([{"b": [two], "a": one}, three], {}),
        ([], {"y": three, "x": {"a": one, "b": (two,)}}),
        ([one, two, three], {}),
    ):
        assert list(router.route(positional, named).inputs.values()) == [one, two, three]
    with pytest.raises(InputMismatchError, match=r"there is no input 'x.b.1'; the inputs are x.a, x.b.0, y"):
        router.route([{"a": one, "b": [two, two]}, three], {})
    with pytest.raises(InputMismatchError, match=r"input 'y' is a list, expected a torch\.Tensor"):
        Router([bucket("b", {"y": (2,)}, {})]).route([[1.0, 2.0]], {})
