"""Loader mode: ranks that code cannot tell apart are exported once, all others by themselves."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_state import get_tensor_model_parallel_rank

RUNS: list[int] = []
BUILT: list[int] = []
GLOBAL = {"rank": 0}


def rank() -> int:
    return get_tensor_model_parallel_rank()


class Base(nn.Module):
    """Column and row parallel layers, padded, the rank as data, and a buffer of other values on each: equal graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(7, 8, pad=True)
        self.up = ColumnParallelLinear(8, 5, gather_output=False, pad=True)
        self.down = RowParallelLinear(5, 8, input_is_parallel=True, pad=True)
        self.context = current_context()
        self.register_buffer("offset", torch.full((8,), float(len(BUILT))))
        BUILT.append(1)
        self.prepare()

    def prepare(self) -> None:
        """Let a model below know its rank."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)
        y = self.down(torch.relu(self.up(self.embed(x)))) * self.context.tp.degree
        y = y + self.offset + comm.axis_rank(self.context)
        return self.change(y)

    def change(self, y: Tensor) -> Tensor:
        return y


class Attribute(Base):
    def prepare(self) -> None:
        self.value = rank() * 2

    def change(self, y: Tensor) -> Tensor:
        return y + self.value


class Nested(Attribute):
    def prepare(self) -> None:
        self.config = {"values": [1, (2, rank())]}

    def change(self, y: Tensor) -> Tensor:
        return y + self.config["values"][1][1]


class Function(Base):
    def prepare(self) -> None:
        self.bias = functools.partial(max, rank())

    def change(self, y: Tensor) -> Tensor:
        return y + self.bias(0)


class Forward(Base):
    def change(self, y: Tensor) -> Tensor:
        return y + rank()


class OwnContext(Base):
    def change(self, y: Tensor) -> Tensor:
        return y + self.context.tp.rank


class Copied(Base):
    def prepare(self) -> None:
        self.copied = copy.deepcopy(self.up)

    def change(self, y: Tensor) -> Tensor:
        return y + self.copied.rank


class Pickled(Base):
    def prepare(self) -> None:
        self.pickled = pickle.loads(pickle.dumps(self.context))

    def change(self, y: Tensor) -> Tensor:
        return y + self.pickled.tp.rank


class OwnAxis(Base):
    def prepare(self) -> None:
        self.axis = self.context.tp

    def change(self, y: Tensor) -> Tensor:
        return y + self.axis.rank


class OfALayer(Base):
    def change(self, y: Tensor) -> Tensor:
        return y + self.up.rank


class Global(Base):
    def prepare(self) -> None:
        GLOBAL["rank"] = self.up.rank

    def change(self, y: Tensor) -> Tensor:
        return y + GLOBAL["rank"]


class GlobalData(Global):
    def prepare(self) -> None:
        GLOBAL["rank"] = int(comm.axis_rank(self.context))


class Constant(Base):
    def prepare(self) -> None:
        self.constant = self.offset.clone()

    def change(self, y: Tensor) -> Tensor:
        return y + self.constant


def closure() -> nn.Module:
    own = rank()

    class Closure(Base):
        def change(self, y: Tensor) -> Tensor:
            return y + own

    return Closure()


class Extra(Base):
    def prepare(self) -> None:
        if self.context.rank:
            self.extra = nn.Identity()


def traced(func: Any, degree: int, tmp_path: Any, **more: Any) -> tuple[Any, int]:
    """Return the model and how often its forward ran."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (7, 8), "up.weight": (5, 8), "up.bias": (5,), "down.weight": (8, 5), "down.bias": (8,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    RUNS.clear()
    BUILT.clear()
    model = nxd.trace.parallel_model_trace(
        func,
        [{"x": torch.tensor([1, 6])}, {"x": torch.tensor([1, 2, 3])}],
        bucket_config={"func_kwargs": {}, "names": ["two", "three"]},
        checkpoint_loader_callable=lambda: weights,
        **{"backend": "eager", "tp_degree": degree, "inline_weights_to_neff": False, "artifact_dir": tmp_path, **more},
    )
    return model, len(RUNS)


def test_equal_ranks_are_exported_once(tmp_path):
    model, runs = traced(Base, 3, tmp_path / "equal")
    assert runs == 2  # buckets
    assert [len(set(bucket.graphs)) for bucket in model.buckets] == [1, 1]
    each, runs = traced(lambda: (current_context().rank, Base())[1], 3, tmp_path / "each")  # func reads the rank
    assert runs == 6
    assert [bucket.graphs for bucket in each.buckets] == [bucket.graphs for bucket in model.buckets]
    for name in ("rank_00.safetensors", "rank_02.safetensors"):
        files = [next((tmp_path / way).rglob(name)).read_bytes() for way in ("equal", "each")]
        assert files[0] == files[1]


@pytest.mark.parametrize(
    "func",
    [Attribute, Nested, Function, Forward, OwnContext, Copied, Pickled, OwnAxis, OfALayer, Global, GlobalData, closure],
    ids=lambda func: func.__name__,
)
def test_a_rank_that_is_a_number_gives_a_graph_of_its_own(func, tmp_path):
    model, runs = traced(func, 2, tmp_path)
    assert runs == 4
    assert [len(set(bucket.graphs)) for bucket in model.buckets] == [2, 2]


@pytest.mark.parametrize("func", [Constant, Extra], ids=lambda func: func.__name__)
def test_in_doubt_a_rank_is_exported_by_itself(func, tmp_path):
    """The graphs are equal after all, but nobody could know."""
    model, runs = traced(func, 2, tmp_path)
    assert runs == 4
    assert [len(set(bucket.graphs)) for bucket in model.buckets] == [1, 1]
