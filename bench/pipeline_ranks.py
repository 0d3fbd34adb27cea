"""One of the two ranks of the pipeline benchmark: every participant's step on one chain of equal layers.

``python -m bench.pipeline_ranks RANK FOLDER ROUNDS QUICK SECONDS``. All share the same two processes of one thread each
and take turns; rank 0 writes ``FOLDER/figures.json``.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.stats import interleaved
from nxd_infer.parallel_state import initialize_model_parallel
from nxd_infer.pipeline import NxDPPModel

STAGES, LAYERS = 2, 8
MICROBATCHES = (4, 8)
ROWS = 256
"""Of a microbatch. With fewer, adding gradients up takes a step as long as computing them, and the two ranks wait for
the memory that they share."""
SAME = 1e-4

Step = Callable[[], float]


class Layer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return loss_of(x, y)


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


class Benchmark:
    """The model, the batch, and all participants with one number of microbatches."""

    def __init__(self, rank: int, microbatches: int, size: int):
        self.rank, self.count, self.size = rank, microbatches, size
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(2, microbatches * ROWS, size, generator=generator)

    def model(self) -> Chain:
        torch.manual_seed(0)
        return Chain(self.size)

    def one_process(self) -> Step:
        """Run all microbatches on rank 0 alone, while the other rank waits."""
        if self.rank:
            return lambda: 0.0
        model = self.model()

        def step() -> float:
            model.zero_grad()
            total = 0.0
            for x, y in zip(self.x.chunk(self.count), self.y.chunk(self.count), strict=True):
                loss = model(x, y) / self.count
                loss.backward()
                total += loss.item()
            return total

        return step

    def ours(self, **options: Any) -> Step:
        cuts = LAYERS // (STAGES * options.get("virtual_pipeline_size", 1))
        names = [f"layers.{number}" for number in range(cuts - 1, LAYERS - 1, cuts)]
        model = NxDPPModel(self.model(), num_microbatches=self.count, pipeline_cuts=names, **options)

        def step() -> float:
            model.zero_grad()
            return float(model.run_train(x=self.x, y=self.y))

        return step

    def torchs(self) -> Step:
        """PyTorch's own 1F1B on the same stages."""
        half = LAYERS // STAGES
        module = nn.Sequential(*self.model().layers[self.rank * half : (self.rank + 1) * half])
        stage = PipelineStage(module, self.rank, STAGES, torch.device("cpu"))
        pipelined = Schedule1F1B(stage, self.count, loss_fn=loss_of)

        def step() -> float:
            module.zero_grad()
            losses: list[Tensor] = []
            if self.rank == 0:
                pipelined.step(self.x)
            else:
                pipelined.step(target=self.y, losses=losses)
            found = torch.stack(losses).mean().detach() if losses else torch.zeros(())
            dist.broadcast(found, STAGES - 1)
            return found.item()

        return step


def timed(step: Step) -> Callable[[int], tuple[float, float]]:
    def run(_: int) -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        return time.perf_counter() - start, loss

    return run


def main() -> None:
    rank, folder, rounds, quick, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=STAGES,
        timeout=datetime.timedelta(seconds=float(seconds)),
    )
    initialize_model_parallel(1, STAGES)
    figures: dict[str, Any] = {"seconds": {}, "losses": {}}
    for count in MICROBATCHES:
        benchmark = Benchmark(int(rank), count, 64 if quick == "True" else 512)
        steps = {
            "one process": benchmark.one_process(),
            "1F1B": benchmark.ours(),
            "interleaved": benchmark.ours(virtual_pipeline_size=2),
            "GPipe": benchmark.ours(schedule="gpipe"),
            "zero-bubble": benchmark.ours(schedule="zero-bubble"),
            "PyTorch's 1F1B": benchmark.torchs(),
        }
        work = {name: timed(step) for name, step in steps.items()}
        for run in work.values():
            run(0)
            run(0)
        for name, found in interleaved(work, int(rounds)).items():
            figures["seconds"][f"{name}, m={count}"] = [value for value, _ in found]
            figures["losses"][f"{name}, m={count}"] = found[0][1]
    if rank == "0":
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
