"""A rank of four stages holds at most 0.3 of what one process holds: weights, gradients, optimizer, while training."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from tests.support.ranks import run_ranks

LAYERS, WIDTH, ROWS = 16, 1024, 4
M_MMAP_THRESHOLD = -3


class Equal(nn.Module):
    """Layers of one size, and nothing else."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def status(field: str) -> int:
    """Bytes of this process, from the system."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def train(stages: int, width: int, meta: bool) -> None:
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=stages,
        pipeline_config={"auto_partition": True, "num_microbatches": 4},
        model_init_config={"meta_device_init": meta},
    )
    model = nxd.initialize_parallel_model(config, Equal, width)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model.run_train(x=torch.ones(ROWS, width))
        optimizer.step()


def peak(stages: int, meta: bool) -> int:
    """The most memory of this rank, from before the model is built until after two steps."""
    # What is freed goes back to the system at once, so that what is measured is what is held.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    train(stages, 8, meta)  # what is imported and allocated once is not the model's
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests of this process have freed would be used again
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    train(stages, WIDTH, meta)
    return status("VmHWM") - before


def test_a_rank_of_four_holds_a_quarter():
    model = LAYERS * WIDTH * (WIDTH + 1) * 4
    (alone,) = run_ranks(peak, 1, 1, False)
    assert alone > 3.5 * model, "weights, gradients and two moments"
    for meta in (True, False):
        several = run_ranks(peak, 4, 4, meta, pp=4)
        assert max(several) <= 0.3 * alone, [size / alone for size in several]
