"""An optimizer's state comes back as it was: of any shape and dtype, in its group, without the files it came from."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint import reshard_checkpoint
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.reshard import Resharding
from nxd_infer.errors import NotInitializedError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.optimizer.parallel import NxDOptimizer

AdamW = torch.optim.AdamW


def stepped(model: nn.Module, optimizer_class: type[torch.optim.Optimizer] = AdamW) -> tuple[nn.Module, NxDOptimizer]:
    optimizer = NxDOptimizer(model.named_parameters(), optimizer_class)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: NxDOptimizer) -> None:
    x = torch.linspace(-1, 1, 8, dtype=next(model.parameters()).dtype).view(2, 4)
    found = model(x)
    torch.cat(found if isinstance(found, tuple) else (found,), dim=-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(optimizer: NxDOptimizer) -> list[dict[str, Any]]:
    return list(optimizer.optimizer.state.values())


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_nothing_keeps_the_files_open(tmp_path: Path):
    """A mapped file stays on the disk when its checkpoint is removed, and on NFS its folder cannot be removed."""
    model, optimizer = stepped(linears())
    save_checkpoint(tmp_path / "ours", "a", model, optimizer, user_content={"seen": torch.arange(5)})
    plain = torch.optim.SGD(model.parameters(), momentum=0.5)
    save_checkpoint(tmp_path / "dictionary", "a", model.state_dict(), plain.state_dict())
    content = load_checkpoint(tmp_path / "ours", "a", model, optimizer)
    load_checkpoint(tmp_path / "dictionary", "a", model, plain)
    gc.collect()
    assert content["seen"].tolist() == list(range(5)) and len(states(optimizer)) == 4
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_an_optimizer_that_is_not_there_yet(tmp_path: Path):
    model, optimizer = stepped(linears())
    save_checkpoint(tmp_path, "a", model, optimizer)
    lazy = NxDOptimizer(model.named_parameters(), AdamW, lazy_init=True)
    for call in (load_checkpoint, save_checkpoint):
        with pytest.raises(NotInitializedError, match=r"lazy_init=True: call init_zero\(\) before"):
            call(tmp_path, "a", model, lazy)
    lazy.init_zero()
    load_checkpoint(tmp_path, "a", model, lazy)
    assert len(states(lazy)) == 4


def test_a_layer_that_is_fused_now_and_was_not(tmp_path: Path):
    """Its weights are the same logical ones, and so is their state."""

    def build(fused: bool) -> nn.Module:
        torch.manual_seed(3)
        return GQAQKVColumnParallelLinear(4, [4, 2], bias=True, gather_output=False, fuse_qkv=fused)

    for fused in (True, False):
        model, optimizer = stepped(build(fused))
        save_checkpoint(tmp_path, f"{fused}", model, optimizer)
        other, fresh = stepped(build(not fused))
        load_checkpoint(tmp_path, f"{fused}", other, fresh)
        for one in ((model, optimizer), (other, fresh)):
            step(*one)
        x = torch.ones(1, 4)
        torch.testing.assert_close(model(x), other(x))  # a fused product may round otherwise


class Counting(torch.optim.Optimizer):
    """Counts in a tensor of shape (1,), and sums in float32 whatever the dtype of the weights."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("step", torch.zeros(1)).add_(1)
                state.setdefault("sum", torch.zeros_like(param, dtype=torch.float32)).add_(param.grad.float() * 1.001)
                param -= (group["lr"] * state["sum"]).to(param.dtype)


def test_a_count_of_one_element_is_not_one_per_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in pieces of one element, as sharding over three ranks makes of the bias."""
    model, optimizer = stepped(nn.Linear(4, 3), Counting)
    save_checkpoint(tmp_path / "a", "a", model, optimizer)
    monkeypatch.setattr(Resharding, "_is_zero1", lambda self: True)
    reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=1, dp=3)
    for root in (tmp_path / "a", tmp_path / "b"):
        load_checkpoint(root, "a", *stepped(nn.Linear(4, 3), Counting))
        other, fresh = stepped(nn.Linear(4, 3), Counting)
        load_checkpoint(root, "a", other, fresh)
        assert [state["step"].tolist() for state in states(fresh)] == [[1.0], [1.0]]
        for mine, theirs in zip(states(optimizer), states(fresh), strict=True):
            assert torch.equal(mine["sum"], theirs["sum"])


def test_state_that_is_wider_than_its_weights(tmp_path: Path):
    """As it was saved; if the weights have another dtype now, it is what PyTorch makes of it."""

    def build(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, NxDOptimizer]:
        torch.manual_seed(0)
        return stepped(nn.Linear(4, 3, dtype=dtype), Counting)

    model, optimizer = build()
    save_checkpoint(tmp_path / "a", "a", model, optimizer)
    reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=1)
    for root in (tmp_path / "a", tmp_path / "b"):
        other, fresh = build()
        load_checkpoint(root, "a", other, fresh)
        for mine, theirs in zip(states(optimizer), states(fresh), strict=True):
            assert theirs["sum"].dtype == torch.float32 and torch.equal(mine["sum"], theirs["sum"])
    wide, optimizer = stepped(nn.Linear(4, 3))
    save_checkpoint(tmp_path / "c", "c", wide, optimizer)
    narrow, fresh = stepped(nn.Linear(4, 3, dtype=torch.bfloat16))
    load_checkpoint(tmp_path / "c", "c", narrow, fresh)
    assert {state["exp_avg"].dtype for state in states(fresh)} == {torch.bfloat16}
