"""A rank of four stages holds at most 0.3 of what one process holds: weights, gradients, optimizer, while training."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from tests.support.distributed.memory import growth
from tests.support.ranks import run_ranks

LAYERS, WIDTH, ROWS = 16, 1024, 4


class Equal(nn.Module):
    """Layers of one size, and nothing else."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


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
    train(stages, 8, meta)  # what is imported and allocated once is not the model's
    return growth(functools.partial(train, stages, WIDTH, meta))[1]


def test_a_rank_of_four_holds_a_quarter():
    model = LAYERS * WIDTH * (WIDTH + 1) * 4
    (alone,) = run_ranks(peak, 1, 1, False)
    assert alone > 3.5 * model, "weights, gradients and two moments"
    for meta in (True, False):
        several = run_ranks(peak, 4, 4, meta, pp=4)
        assert max(several) <= 0.3 * alone, [size / alone for size in several]
