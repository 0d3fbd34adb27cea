"""``python -m tests.integration.xla.run_training WORLD``: train on replicas here, in every way, and on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.backends.xla.training import Replica, train_on_replicas
from nxd_infer.layout import load_weights
from nxd_infer.optimizer import NeuronZero1Optimizer, NxDOptimizer
from nxd_infer.parallel_layers import grads
from nxd_infer.parallel_layers.sequence_parallel import build_sequence_parallel, is_sequence_parallel_model
from nxd_models.llama.model import CausalLM
from tests.support.trainer.models import CONFIG, tokens

STEPS = 4
NORM = 0.5
"""Below every gradient's here, so that each step clips."""


def clipping(model: nn.Module) -> Any:
    return NxDOptimizer(model.parameters(), torch.optim.AdamW, max_grad_norm=NORM, defaults={"lr": 1e-2})


def zero1(model: nn.Module) -> Any:
    return NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, max_norm=NORM, lr=1e-2)


def plain(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Way:
    """A way to train, on ``tp * dp`` ranks."""

    optimizer: Callable[[nn.Module], Any]
    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    passes: int = 1
    """Backward passes before a step, between which the gradients so far are read."""

    @property
    def clips(self) -> bool:
        return self.optimizer is not plain


WAYS: dict[int, dict[str, Way]] = {
    2: {
        "tp 2": Way(plain, tp=2),
        "tp 2, sequence parallel": Way(plain, tp=2, sequence_parallel=True),
        "tp 2, clipped": Way(clipping, tp=2),
        "dp 2, ZeRO-1": Way(zero1, dp=2),
    },
    4: {
        "tp 4, keys and values on two ranks each": Way(clipping, tp=4),
        "tp 2, dp 2, ZeRO-1, sequence parallel, two passes": Way(zero1, tp=2, dp=2, sequence_parallel=True, passes=2),
    },
}
"""By the number of replicas, which a process has once. The vocabulary divides by none of the degrees."""
ROWS = 4


def build(sequence_parallel: bool = False) -> nn.Module:
    torch.manual_seed(0)
    with build_sequence_parallel(sequence_parallel):
        model = CausalLM(replace(CONFIG, num_layers=1), torch.float32)
    assert is_sequence_parallel_model(model) == sequence_parallel
    return model


def on_the_cpu(clip: bool) -> list[float]:
    """Plain PyTorch, degree 1."""
    model, batch, losses = build(), tokens(ROWS), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = model(**batch)[0]
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_replicas(way: Way, weights: dict[str, Tensor]) -> list[float]:
    """The mean of the data-parallel ranks' losses, each of which sees its rows."""

    def train(replica: Replica) -> list[float]:
        context = replica.context
        with replica.alone:
            model = build(way.sequence_parallel)
        load_weights(model, weights, rank=context.tp.rank, degree=way.tp)
        model = model.to(replica.device)
        optimizer = way.optimizer(model)
        batch = {name: rows.chunk(way.dp)[context.dp.rank].to(replica.device) for name, rows in tokens(ROWS).items()}
        losses = []
        for _ in range(STEPS):
            loss = torch.zeros((), device=replica.device)
            for number in range(way.passes):
                if number > 0:
                    optimizer.synchronize_gradients()
                part = model(**{name: rows.chunk(way.passes)[number] for name, rows in batch.items()})[0] / way.passes
                part.backward()
                loss += part.detach()
            if way.sequence_parallel and way.optimizer is plain:
                grads.allreduce_sequence_parallel_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert loss.device.type == "xla"
            losses.append(loss.item())
        return losses

    found = train_on_replicas(train, tp=way.tp, dp=way.dp)
    assert all(losses == found[rank - rank % way.tp] for rank, losses in enumerate(found)), "a group's ranks differ"
    return [sum(step) / len(found) for step in zip(*found, strict=True)]


def main(world: int) -> None:
    weights = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    xla = {name: on_replicas(way, weights) for name, way in WAYS[world].items()}
    import torch_xla.debug.metrics as metrics

    left = [name for name in metrics.counter_names() if name.startswith("aten::")]
    cpu = {name: on_the_cpu(way.clips) for name, way in WAYS[world].items()}
    print(json.dumps({"xla": xla, "cpu": cpu, "left": left}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
