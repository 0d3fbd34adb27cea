"""Packed experts: the native operator against float64 and against packed linears of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nxd_infer import native
from nxd_infer.ops import packed
from tests.support.needs import needs_native
from tests.support.ops import expert_products

pytestmark = needs_native


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


@pytest.mark.smoke
def test_each_row_is_a_linear_layer_of_its_experts_matrix(library: Any) -> None:
    expert_products.check_every_shape(library)


def test_a_row_does_not_depend_on_the_others(library: Any) -> None:
    expert_products.check_rows_alone_and_together(library)


def test_what_does_not_fit_is_refused(library: Any) -> None:
    multiply = library.op("packed_experts")
    x, weight = expert_products.problem(4, 3, 8, 16, torch.float32)
    ids = torch.zeros(4, dtype=torch.int64)
    for bad in ((x[0], weight, ids), (x[:, :8], weight, ids), (x, weight[0], ids), (x, weight, ids[:3])):
        with pytest.raises(RuntimeError, match="packed_experts"):
            multiply(*bad)
    for bad in ((x, weight.bfloat16(), ids), (x.double(), weight.double(), ids), (x, weight, ids.int())):
        with pytest.raises(RuntimeError, match="packed_experts"):
            multiply(*bad)
    assert multiply(x[:0], packed.pack(weight), ids[:0]).shape == (0, 8)
