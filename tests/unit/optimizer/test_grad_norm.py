"""clip_grad_norm in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.grads import clip_grad_norm, get_grad_norm

F64 = torch.float64


@pytest.mark.parametrize(("order", "dtype"), [(1, F64), (2, torch.float32), (math.inf, torch.float32)])
def test_without_parallelism_it_is_torch(order: float, dtype: torch.dtype):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, 3, dtype=dtype)) for n in (2, 5, 7)]
    for param in ours:
        param.grad = torch.randn_like(param) * 10
    ours.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    for mine, their in zip(ours, theirs, strict=True):
        their.grad = None if mine.grad is None else mine.grad.clone()
    found = nxd.parallel_layers.clip_grad_norm(ours, 1.0, order)
    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(theirs, 1.0, order))
    for mine, their in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine.grad is not None and their.grad is not None and torch.equal(mine.grad, their.grad)


def test_forms_of_parameters():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_grad_norm(param, 10) == 5  # one tensor
    assert clip_grad_norm((p for p in (param, param)), 10, norm_type="inf") == 4  # the same twice counts once
    assert clip_grad_norm((param,), 10.0) == 5
    assert clip_grad_norm([], 1.0) == 0
    assert get_grad_norm([nn.Parameter(torch.zeros(2))]) == 0
    assert torch.equal(param.grad, torch.tensor([3.0, 0.0, 4.0]))


def test_narrow_and_huge_gradients():
    half, wide = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))
    half.grad = torch.full((4096,), 1 + 1 / 128, dtype=torch.bfloat16)
    assert get_grad_norm([half]).dtype == torch.float32
    assert abs(float(get_grad_norm([half])) - 64 * (1 + 1 / 128)) < 1e-4
    wide.grad = torch.tensor([3e30, 4e30])
    norm = clip_grad_norm([wide], 1.0)  # the squares are no float32
    assert abs(float(norm) - 5e30) < 1e25
    assert torch.allclose(wide.grad, torch.tensor([0.6, 0.8]))
    sparse = nn.Embedding(5, 2, sparse=True)
    sparse(torch.tensor([1, 1, 3])).sum().backward()
    assert float(clip_grad_norm(sparse.parameters(), 1.0)) == pytest.approx(10**0.5)


@pytest.mark.parametrize("order", [0, -1, "two", math.nan, None])
def test_bad_orders(order: Any):
    with pytest.raises(ParallelConfigError, match="norm_type must be a positive number or 'inf'"):
        get_grad_norm([nn.Parameter(torch.zeros(2))], order)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_norm_of_a_large_parameter(order: float):
    """PyTorch's own, of all elements at once, is wrong by 3e-5."""
    param = nn.Parameter(torch.empty(2**21 + 7))
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.linalg.vector_norm(param.grad.double(), order)
    assert float(get_grad_norm([param], order)) == pytest.approx(float(wanted), rel=5e-6)
