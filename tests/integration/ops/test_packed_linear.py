"""Packed linears: the native kernels of every level against float64, and the packed form itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native
from nxd_infer.ops import packed
from tests.support.needs import needs_native
from tests.support.ops.levels import LEVELS, run_at

pytestmark = needs_native

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 5, 7, 12, 13, 16, 17, 31, 33, 64]),  # rows: across every kernel's group of rows
    st.one_of(st.integers(1, 70), st.sampled_from([96, 128])),
    st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 512, 1056])),  # 1056: more than one span of tiles
)


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


def problem(
    rows: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator)
    found = torch.randn(n, generator=generator).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), found


def check_product(library: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compare with float64: the error of adding k products in float32, and for bfloat16 one rounding of the result."""
    wide = None if bias is None else bias.double()
    expected = F.linear(x.double(), weight.double(), wide)
    size = F.linear(x.double().abs(), weight.double().abs(), None if wide is None else wide.abs())
    found = library.op("packed_linear")(x, packed.pack(weight), bias)
    assert found.dtype == x.dtype and found.shape == expected.shape
    room = size * weight.shape[1] * 2.0**-23
    if x.dtype == torch.bfloat16:
        room = room + expected.abs() * 2.0**-8
    assert bool(((found.double() - expected).abs() <= room + 1e-30).all())
    return found


@settings(max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_the_product_is_that_of_float64(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, seed: int) -> None:
    check_product(native.load(), *problem(*shape, dtype, bias, seed))


@settings(max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 1000))
def test_packing_loses_nothing(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    library = native.load()
    _, weight, _ = problem(*shape, dtype, False, seed)
    plain, fast = packed.pack(weight), packed.pack(weight, library=library)
    assert torch.equal(plain, fast)
    assert plain.shape == weight.shape and plain.dtype == weight.dtype
    assert torch.equal(packed.unpack(plain), weight) and torch.equal(packed.unpack(fast, library), weight)
    ids = torch.randint(0, weight.shape[0], (2, 3), generator=torch.Generator().manual_seed(seed))
    for some in (ids, ids.int()):
        assert torch.equal(library.op("packed_embedding")(fast, some), F.embedding(some, weight))
    assert torch.equal(packed.packed_embedding(fast, ids), F.embedding(ids, weight))


def rows_alone_and_together(library: Any) -> None:
    """A row's result has the same bits alone, in a batch, beside other rows, and with any number of threads."""
    before = torch.get_num_threads()
    try:
        for dtype in DTYPES:
            for n, k in ((512, 256), (70, 1056), (48, 33)):
                x, weight, bias = problem(65, n, k, dtype, True, 3)
                layout = packed.pack(weight)
                torch.set_num_threads(2)
                whole = library.op("packed_linear")(x, layout, bias)
                for threads in (5, 1):  # more than there are blocks to share, and nobody to share with
                    torch.set_num_threads(threads)
                    assert torch.equal(library.op("packed_linear")(x, layout, bias), whole)
                for first, last in ((0, 1), (0, 4), (3, 16), (20, 52), (64, 65)):
                    part = library.op("packed_linear")(x[first:last], layout, bias)
                    assert torch.equal(part, whole[first:last]), (dtype, n, k, first, last)
                others = torch.full_like(x, torch.inf)
                others[7] = x[7]
                assert torch.equal(library.op("packed_linear")(others, layout, bias)[7], whole[7])
    finally:
        torch.set_num_threads(before)


def test_a_row_does_not_depend_on_the_others(library: Any) -> None:
    rows_alone_and_together(library)


def every_shape(library: Any) -> None:
    for rows in (1, 2, 3, 4, 5, 6, 11, 12, 13, 16, 17, 32, 33, 50):
        for n, k in ((1, 1), (16, 32), (33, 31), (40, 70), (64, 512), (31, 1056)):
            for dtype in DTYPES:
                check_product(library, *problem(rows, n, k, dtype, rows % 2 == 0, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_layers_of_one_input_together_have_the_bits_of_each_alone(library: Any, dtype: torch.dtype, rows: int) -> None:
    for sizes, k, bias in (
        ((64, 32, 32), 96, True),
        ((70, 70), 33, False),
        ((1, 130, 16, 48), 64, True),
        ((5,), 7, False),
    ):
        x = problem(rows, 1, k, dtype, False, 0)[0]
        layers = [problem(1, n, k, dtype, True, n)[1:] for n in sizes]
        weights = [packed.pack(weight) for weight, _ in layers]
        biases = [found for _, found in layers] if bias else []
        together = library.op("packed_linears")(x, [*weights, *biases], bias)
        one = library.op("packed_linear")
        alone = [one(x, weight, biases[i] if bias else None) for i, weight in enumerate(weights)]
        assert len(together) == len(alone) and all(map(torch.equal, together, alone))
        for found, wanted in zip(packed.packed_linears(x, weights, biases), alone, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_agrees_with_float64(library: Any, level: str) -> None:
    code = (
        "from tests.integration.ops.test_packed_linear import every_shape, rows_alone_and_together\n"
        "every_shape(native.load()); rows_alone_and_together(native.load()); print('fine')\n"
    )
    assert run_at(library, level, code) == "fine"


def test_threads_that_were_there_before_the_first_product_can_multiply(library: Any) -> None:
    """The permission to use tiles is asked for once, and holds for threads that run already."""
    code = (
        "import threading, torch\n"
        "from nxd_infer import native\n"
        "from nxd_infer.ops import packed\n"
        "library = native.load(); go = threading.Event(); results = []\n"
        "x, w = torch.ones(17, 64).bfloat16(), packed.pack(torch.ones(32, 64).bfloat16())\n"
        "def work():\n"
        "    go.wait(); results.append(library.op('packed_linear')(x, w, None))\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[t.start() for t in threads]; library.op('packed_linear')(x, w, None); go.set()\n"
        "[t.join() for t in threads]\n"
        "assert len(results) == 3 and all(bool((y == 64).all()) for y in results); print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_without_elements_and_with_many_dimensions(library: Any, dtype: torch.dtype) -> None:
    weight = torch.randn(20, 8).to(dtype)
    layout = packed.pack(weight)
    multiply = library.op("packed_linear")
    assert multiply(torch.zeros(0, 8, dtype=dtype), layout, None).shape == (0, 20)
    x = torch.randn(2, 3, 8).to(dtype)
    torch.testing.assert_close(multiply(x, layout, None), F.linear(x, weight), rtol=1e-2, atol=1e-2)
    assert multiply(x[0, 0], layout, None).shape == (20,)
    across = torch.randn(8, 5).to(dtype).T  # rows that are not contiguous
    torch.testing.assert_close(multiply(across, layout, None), F.linear(across, weight), rtol=1e-2, atol=1e-2)
    assert library.op("packed_embedding")(layout, torch.zeros(0, dtype=torch.int64)).shape == (0, 8)
    bias = torch.randn(20).to(dtype)
    for rows in (1, 3, 40):  # a sum of no products is the bias
        assert torch.equal(multiply(torch.zeros(rows, 0, dtype=dtype), weight[:, :0], bias), bias.expand(rows, 20))


def test_what_does_not_fit_is_refused(library: Any) -> None:
    layout = packed.pack(torch.randn(20, 8))
    multiply, gather = library.op("packed_linear"), library.op("packed_embedding")
    with pytest.raises(RuntimeError, match=r"\[2, 9\].*does not fit the weight \[20, 8\]"):
        multiply(torch.zeros(2, 9), layout, None)
    with pytest.raises(RuntimeError, match="does not fit the weight"):
        multiply(torch.zeros(2, 8, dtype=torch.bfloat16), layout, None)
    with pytest.raises(RuntimeError, match=r"bias \[19\]"):
        multiply(torch.zeros(2, 8), layout, torch.zeros(19))
    with pytest.raises(RuntimeError, match="3 tensors are no weights with a bias each"):
        library.op("packed_linears")(torch.zeros(2, 8), [layout, layout, torch.zeros(20)], True)
    with pytest.raises(RuntimeError, match=r"does not fit the weight \[20, 8\]"):
        library.op("packed_linears")(torch.zeros(2, 8), [layout, layout.bfloat16()], False)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        multiply(torch.zeros(2, 8).double(), layout.double(), None)
    for bad in (20, -1):
        with pytest.raises(RuntimeError, match=f"index {bad} is out of range for a table of 20 rows"):
            gather(layout, torch.tensor([0, bad]))
    with pytest.raises(RuntimeError, match="int64 or int32"):
        gather(layout, torch.tensor([0.0]))
