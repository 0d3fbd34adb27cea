"""Packed experts: the native operator against float64 and against packed linears of each row."""

from __future__ import annotations

import subprocess
import sys
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


UNREADABLE = """
import ctypes, mmap, torch
from nxd_infer import native
from nxd_infer.ops import packed
memory = mmap.mmap(-1, 4 * 32 * 1024 * 4)
weight = torch.frombuffer(memory, dtype=torch.float32).view(4, 32, 1024)
weight.copy_(packed.pack(torch.randn(4, 32, 1024)))
def allow(expert, access):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(weight[expert].data_ptr()), weight[expert].nbytes, access) == 0
multiply, x = native.load().op("packed_experts"), torch.randn(9, 1024)
experts = torch.tensor([2, 0, -1, 2, 2, 0, 4, 0, 2])
expected = multiply(x, weight, experts)
for expert in (1, 3):
    allow(expert, 0)
print(torch.equal(multiply(x, weight, experts), expected))
"""


def test_the_matrix_of_an_expert_without_rows_is_not_read() -> None:
    """An access would end the process: nothing may read its memory."""
    done = subprocess.run([sys.executable, "-c", UNREADABLE], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-2000:]
