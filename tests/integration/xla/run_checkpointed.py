"""A checkpointed module with dropout on the real torch_xla: gradients of a scale, and what they are by hand."""

from __future__ import annotations

import json

import torch
import torch_xla  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from nxd_infer.trainer.activation_checkpoint import apply_activation_checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(8, 8), 0

    def forward(self, hidden: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        return nn.functional.dropout(torch.tanh(self.up(hidden)) * scale, 0.5), None


def main() -> None:
    device = torch_xla.device()
    model = nn.ModuleList([Block()]).to(device)
    apply_activation_checkpoint(model, Block)
    found, expected = [], []
    for _ in range(2):
        hidden, scale = torch.ones(4, 8, device=device), torch.full((8,), 2.0, device=device, requires_grad=True)
        out = model[0](hidden, scale=scale)[0]
        torch.rand(4, device=device)  # another random number between forward and recomputation
        out.sum().backward()
        torch_xla.sync()
        assert scale.grad is not None
        found.append(scale.grad.tolist())
        expected.append((out / scale).sum(0).tolist())
    print(json.dumps({"found": found, "expected": expected, "calls": model[0].calls}))


if __name__ == "__main__":
    main()
