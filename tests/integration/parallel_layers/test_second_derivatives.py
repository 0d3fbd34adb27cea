"""Second derivatives: a gradient penalty is the same at every degree; what has none says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallel_cross_entropy,
)
from nxd_infer.parallel_layers.loss_functions import from_parallel_logits_to_logprobs
from tests.support.ranks import run_ranks

F64 = torch.float64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, dtype=F64)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + self.down(torch.tanh(self.up(x)))


def penalised() -> tuple[float, Tensor, Tensor]:
    """The penalty on the norm of an input's gradient, and the penalty's own gradients."""
    model = Block()
    x = (torch.arange(30, dtype=F64).reshape(5, 6) / 10).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    penalty = (grad.norm(dim=-1) - 1).pow(2).mean()
    penalty.backward()
    assert x.grad is not None and model.up.weight.grad is not None
    return penalty.item(), x.grad, model.up.weight.grad


def test_gradient_penalty_over_ranks():
    alone = penalised()
    both = run_ranks(penalised, 2)
    for penalty, of_input, _ in both:
        assert penalty == pytest.approx(alone[0], rel=1e-12)
        torch.testing.assert_close(of_input, alone[1])
    torch.testing.assert_close(torch.cat([found[2] for found in both]), alone[2])


def test_losses_on_split_logits_have_no_second_derivative():
    labels = torch.tensor([[1, 2, 3, 0]])
    losses = [
        lambda logits: parallel_cross_entropy(logits, labels).mean(),  # whose own gradient is a constant
        lambda logits: parallel_cross_entropy(logits, labels).pow(2).sum(),
        lambda logits: from_parallel_logits_to_logprobs(logits, labels, inference=False).mean(),
    ]
    for loss in losses:
        x = torch.randn(1, 4, 5, dtype=F64, requires_grad=True)
        weight = torch.randn(5, 7, dtype=F64, requires_grad=True)
        (grad,) = torch.autograd.grad(loss(torch.tanh(x) @ weight), x, create_graph=True)
        with pytest.raises(RuntimeError, match="have no second derivative"):
            grad.pow(2).sum().backward()
        first = torch.autograd.grad(loss(torch.tanh(x) @ weight), x)
        torch.testing.assert_close(first[0], grad.detach())
