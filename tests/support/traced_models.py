"""Models and functions that tests trace; importable by the rank processes."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

VOCAB, WIDTH, INNER, SLOTS, LENGTH = 24, 8, 16, 3, 6


class Net(nn.Module):
    """Tokens to logits, with a cache of hidden values that a step writes at ``position`` and sums over."""

    def __init__(self, length: int = LENGTH):
        super().__init__()
        self.embed = ParallelEmbedding(VOCAB, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, INNER, gather_output=False)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, gather_output=True)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        self.register_buffer("cache", torch.zeros(SLOTS, length, WIDTH), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(F.gelu(self.up(hidden))) * self.scale.sum()
        rows = torch.arange(tokens.shape[0])
        cache = self.cache.index_put((rows, position), hidden)
        return self.head(cache[: tokens.shape[0]].sum(1)), cache


def net(length: int = LENGTH, seed: int = 0) -> tuple[nn.Module, dict[Any, int]]:
    torch.manual_seed(seed)
    model = Net(length)
    return model, {model.cache: 1}


def inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.arange(batch) % VOCAB, torch.zeros(batch, dtype=torch.int64)


def expected(steps: list[tuple[Tensor, Tensor]], seed: int = 0) -> list[Tensor]:
    """What plain PyTorch (degree 1) returns for these steps in order."""
    model, _ = net(seed=seed)
    outputs = []
    with torch.no_grad():
        for tokens, position in steps:
            logits, cache = model(tokens, position)
            model.cache.copy_(cache)
            outputs.append(logits)
    return outputs


def state_dict(seed: int = 0) -> dict[str, Tensor]:
    """The logical weights of :func:`net`."""
    return {name: tensor.detach() for name, tensor in net(seed=seed)[0].state_dict().items()}


class Plus(nn.Module):
    def __init__(self, value: float | int = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.value


def plus(value: float = 1.0, bucket_rank: int = 0) -> tuple[nn.Module, dict]:
    return Plus(value), {}


def baked_rank() -> nn.Module:
    """A rank as a Python number: another graph on every rank, which is allowed and must be right."""
    return Plus(current_context().tp.rank * 10)


class Uneven(nn.Module):
    """Rank 0 communicates once more than the others."""

    def __init__(self):
        super().__init__()
        self.context = current_context()

    def forward(self, x: Tensor) -> Tensor:
        y = comm.all_reduce(x, self.context)
        return comm.all_reduce(y * 2, self.context) if self.context.tp.rank == 0 else y


def uneven() -> nn.Module:
    return Uneven()


class BiasOnFirst(nn.Module):
    """A weight that only rank 0 reads, and constants that differ between ranks."""

    def __init__(self):
        super().__init__()
        self.context = current_context()
        self.bias = nn.Parameter(torch.full((4,), 5.0))
        self.offset = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 + self.context.tp.rank)

    def forward(self, x: Tensor) -> Tensor:
        mine = x + self.bias if self.context.tp.rank == 0 else x
        return comm.all_reduce(mine + self.offset, self.context)


def bias_on_first() -> nn.Module:
    return BiasOnFirst()


def fails_on_rank_one() -> nn.Module:
    if os.environ["RANK"] == "1":
        raise ValueError("no weights for this rank")
    time.sleep(600)
    return Plus()


def dies() -> nn.Module:
    os._exit(3)


def sleeps() -> nn.Module:
    time.sleep(600)
    return Plus()


def communicates() -> nn.Module:
    """Initialises by itself, as ported code does, and agrees on a number with the other ranks."""
    from nxd_infer.parallel_layers import parallel_state

    context = current_context()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=context.tp.degree)
    total = comm.all_reduce(torch.tensor([float(parallel_state.get_tensor_model_parallel_rank() + 1)]), context)
    return Plus(total.item())


class Counter(nn.Module):
    """Counts calls: ``count`` is written here, ``memory`` only by the other kind of bucket."""

    nxd_inputs = {"x": {"pad": {0: 0.0}}}
    nxd_outputs = {"y": {"cut": {0: ["x", 0]}}}

    def __init__(self, writes: bool):
        super().__init__()
        self.writes = writes
        self.register_buffer("memory", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.writes:
            self.memory += 1
        return {"y": x + self.memory}


def counter(writes: bool = True) -> nn.Module:
    return Counter(writes)


def padding_kernel():
    return torch.jit.script(_pad_to_bucket)


def _pad_to_bucket(tensors: list[Tensor], sizes: Tensor) -> tuple[list[Tensor], Tensor]:
    x = tensors[0]
    index = 0
    for i in range(sizes.shape[0]):
        if x.shape[0] <= int(sizes[i]):
            index = i
            break
    missing = int(sizes[index]) - x.shape[0]
    return [torch.cat([x, torch.zeros([missing, x.shape[1]])])], torch.tensor([index])


class Window(nn.Module):
    """A state whose length is the bucket's: the shared buffer's last entries."""

    def __init__(self, length: int):
        super().__init__()
        self.register_buffer("window", torch.zeros(1, length))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        updated = self.window + x
        return updated.sum().reshape(1), updated


def window(length: int) -> tuple[nn.Module, dict[Any, int]]:
    model = Window(length)
    return model, {model.window: 1}


def window_preprocessor():
    return torch.jit.script(_last_entries)


def _last_entries(shapes: list[list[list[int]]], states: list[Tensor], bucket: Tensor) -> list[Tensor]:
    index = int(bucket)
    found: list[Tensor] = []
    for i in range(len(states)):
        length = states[i].shape[1]
        found.append(torch.ops.aten.slice(states[i], 1, length - shapes[index][i][1], length))
    return found


def by_length() -> Any:
    """A bucket kernel: the first bucket for two values, the other one for more."""
    return torch.jit.script(_by_length)


def _by_length(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    return tensors, torch.tensor(0 if tensors[0].shape[1] == 2 else 1)


class ReadsFirst(nn.Module):
    """Answers with what its state was, and keeps something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last * 2, self.last * 0.5 + x


def reads_first() -> tuple[nn.Module, dict[Any, int]]:
    model = ReadsFirst()
    return model, {model.last: 1}
