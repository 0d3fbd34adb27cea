"""Weight gradients of linear layers that are left for later are those of the backward pass, hooks included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.pipeline.deferred import DeferredWeights, Late, finish


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.LayerNorm(3)).double()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_later_is_what_at_once_is(shape: tuple[int, ...]):
    x = torch.randn(shape, dtype=torch.float64)
    plain, model = layers(), layers()
    wanted = x.clone().requires_grad_()
    plain(wanted).square().sum().backward()

    deferred, late, fired = DeferredWeights(), Late(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    own = x.clone().requires_grad_()
    with deferred.linears():
        deferred.late = late
        model(own).square().sum().backward()
    assert F.linear is torch._C._nn.linear
    torch.testing.assert_close(own.grad, wanted.grad)
    assert {name for name, gradient in gradients(model).items() if gradient is None} == {"0.weight", "2.weight"}
    assert len(late) == 2 and sorted(fired) == ["0.bias", "3.bias", "3.weight"]
    finish(late)
    assert not late and sorted(fired[3:]) == ["0.weight", "2.weight"]
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_what_is_no_parameter_is_left_alone():
    deferred, late = DeferredWeights(), Late()
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    deferred.late = late
    with deferred.linears():
        F.linear(x, weight * 2).sum().backward()
        F.linear(x.detach(), weight).sum().backward()
        with torch.autocast("cpu"):
            F.linear(x, weight).float().sum().backward()
        with torch.no_grad():
            F.linear(x, weight)
        F.linear(x, weight.detach()).sum().backward()
    assert not late and weight.grad is not None
