"""Small models that several tests trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.util.cache_dir import cache_dir
from tests.support import traced_models
from tests.support.backends import packed_models
from tests.support.ops.native_attention import Attend
from tests.support.ops.native_sampling import Draw, Sampler
from tests.support.shared import shared


@contextmanager
def cache_at(directory: Path) -> Iterator[None]:
    """The cache of compiled graphs is ``directory`` inside the block; the native operators keep theirs."""
    directory.mkdir(exist_ok=True)
    if not (directory / "native").exists():
        (directory / "native").symlink_to(cache_dir("native"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_INFER_CACHE", str(directory))
        yield


def trace(func: Any, example: Any, loader: Any, **more: Any) -> Any:
    arguments = {"inline_weights_to_neff": False, "checkpoint_loader_callable": loader, **more}
    return nxd.trace.parallel_model_trace(func, example, **arguments)


def trace_net(**more: Any) -> Any:
    """``traced_models.net`` at degree 2."""
    arguments = {"tp_degree": 2, **more}
    return trace(traced_models.net, traced_models.inputs(), traced_models.state_dict, **arguments)


def net() -> Path:
    """Its artifact on the CPU."""

    def make(folder: Path) -> None:
        with trace_net() as model:
            nxd.trace.parallel_model_save(model, folder / "artifact")

    return shared("net", make) / "artifact"


def copied(artifact: Path, target: Path) -> Path:
    return shutil.copytree(artifact, target)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Everything(nn.Module):
    """All that a graph may hold: uniform weights, small constants and scalars; a state; rows that are summed over, one
    large enough for two threads; an index; packed linears of one input; attention over caches; the sampler and its
    memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.register_buffer("offset", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2, 5, 6))
        self.ones = torch.ones(6)
        self.rows = nn.Embedding(10, 1024)
        self.three = packed_models.Siblings(packed_models.three_of_one_input)
        self.biased = packed_models.Siblings(packed_models.with_and_without_a_bias)
        self.attend = Attend()
        self.sampler = Sampler()

    def forward(
        self, x: Tensor, at: Tensor, large: Tensor, small: Tensor, ids: Tensor, siblings: Tensor, heads: Tensor,
        table: Tensor, start: Tensor, length: Tensor, logits: Tensor, tokens: Tensor, *wishes: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        hidden = self.norm(x) * torch.tensor([1.0, 1.0]).sum() + self.offset + self.ones
        cache = torch.scatter(self.cache, 1, at[:, None, None].expand(2, 1, 6), hidden[:, None])
        kept = cache.sum(1) + self.cache[:, 0]
        self.cache.copy_(cache)
        return {
            "kept": kept,
            "large": norm(large.reshape(1, -1)),
            "small": norm(small),
            "looked_up": (large * 2 + 1, self.rows(ids).exp(), large.flip(0).exp()),
            "siblings": (self.three(siblings), self.biased(siblings)),
            "attended": self.attend(heads, table, start, length),
            "drawn": self.sampler(logits, tokens, *wishes),
        }


def everything() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def everything_weights() -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in everything().state_dict().items()}


def everything_steps(count: int = 3) -> list[list[Tensor]]:
    draw, steps = Draw(8), []
    wishes = draw.settings(2)
    wishes[0][:] = torch.tensor([0.0, 1.0])
    random = draw.generator
    for number in range(count):
        steps.append(
            [
                *(torch.randn(2, 6, generator=random), torch.tensor([number, 4 - number])),
                *(torch.randn(256, 1024, generator=random), torch.randn(4, 1024, generator=random)),
                torch.randint(0, 10, (256,), generator=random),
                torch.randn(5, 8, generator=random),
                *(torch.randn(2, 3, 8, 16, generator=random), torch.tensor([[1], [0]])),
                *(torch.full((2,), 3 * number), torch.tensor([3, 3])),
                *(draw.logits(2, 50, "plain"), torch.tensor([[number], [number + 1]]), *wishes),
            ]
        )
    return steps
