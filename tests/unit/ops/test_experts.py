"""The experts' linear layers, as PyTorch computes them: against float64, with gradients, and in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxd_infer.graph.passes import retrace
from nxd_infer.ops import COMPOSITE, expert_linear, packed_experts
from nxd_infer.ops.packed import pack, pack_int8, quantize


def problem(rows: int, count: int = 5, outputs: int = 7, inputs: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randn(shape, generator=generator).double() for shape in ((rows, inputs), (count, outputs, inputs))
    )
    return x, weight, torch.randint(-1, count + 1, (rows,), generator=generator)


def naive(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    inside = (experts >= 0) & (experts < weight.shape[0])
    return torch.einsum("nok,nk->no", weight[experts.clamp(0, weight.shape[0] - 1)], x) * inside[:, None]


@pytest.mark.parametrize("rows", [0, 1, 4, 40])
def test_each_row_has_the_matrix_of_its_expert_and_others_are_zero(rows: int) -> None:
    x, weight, experts = problem(rows)
    found = expert_linear(x, weight, experts)
    torch.testing.assert_close(found, naive(x, weight, experts))
    assert found.shape == (rows, 7) and bool((found[(experts < 0) | (experts > 4)] == 0).all())


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_a_graph_has_no_shape_that_depends_on_the_experts(rows: int) -> None:
    x, weight, experts = problem(rows)
    x[experts < 0] = torch.nan  # a row that nobody reads
    program = torch.export.export(_Layer(), (x, weight, experts))
    (node,) = (node for node in program.graph.nodes if node.target is torch.ops.nxd.expert_linear.default)
    inlined = retrace(COMPOSITE[node.target], node.args)
    for some in (experts, experts.flip(0), torch.full_like(experts, -1)):
        used = torch.where((some >= 0)[:, None], x.nan_to_num(), torch.nan)
        torch.testing.assert_close(inlined(used, weight, some), naive(used.nan_to_num(), weight, some))


class _Layer(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
        return expert_linear(x, weight, experts)


@pytest.mark.parametrize("rows", [3, 30])
def test_gradients_are_those_of_the_products(rows: int) -> None:
    x, weight, experts = problem(rows)
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: expert_linear(x, weight, experts), (x, weight))
    probe = torch.randn(rows, 7).double()
    wanted = torch.autograd.grad((naive(x, weight, experts) * probe).sum(), (x, weight))
    found = torch.autograd.grad((expert_linear(x, weight, experts) * probe).sum(), (x, weight))
    torch.testing.assert_close(found, wanted)


def test_packed_weights_give_the_same_rows_plain_and_in_eight_bits() -> None:
    x, weight, experts = (each.float() if each.is_floating_point() else each for each in problem(9, outputs=40))
    torch.testing.assert_close(packed_experts(x, pack(weight), experts), naive(x, weight, experts))
    q, scale = quantize(weight)
    torch.testing.assert_close(packed_experts(x, pack_int8(weight), experts), naive(x, q * scale[..., None], experts))
