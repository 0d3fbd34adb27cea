"""ParallelEmbedding equals nn.Embedding, with every option, split either way; the reference's defects are absent."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.parallel_layers import ParallelEmbedding
from tests.support.parallel_layers.compare import LIMITS, error, failures, own_part, piece
from tests.support.ranks import run_ranks

VOCABULARY, WIDTH = 12, 8


def pair(dtype: torch.dtype, size: int = VOCABULARY, width: int = WIDTH, options: dict | None = None, **shared):
    torch.manual_seed(11)
    layer = ParallelEmbedding(size, width, dtype=dtype, **(options or {}), **shared)
    torch.manual_seed(11)
    return layer, nn.Embedding(size, width, dtype=dtype, **shared)


def ids_of(*shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, VOCABULARY, shape)


def all_cases(dtype: torch.dtype) -> list[str]:
    found: dict[str, float] = {}
    weights: Tensor
    options = [
        {},
        {"padding_idx": -2},
        {"max_norm": 2.0, "norm_type": 1.0},
        {"max_norm": 0.5, "norm_type": math.inf},
        {"max_norm": 1.5, "padding_idx": 3, "scale_grad_by_freq": True},
        {"sparse": True, "padding_idx": 0},
    ]
    shapes = itertools.cycle(((6,), (4, 6), (2, 3, 4)))
    for (across, shared), shape in zip(itertools.product((False, True), options), shapes, strict=False):
        name = f"{shape} across={across} {shared}"
        layer, reference = pair(dtype, options={"shard_across_embedding": across}, **shared)
        found[f"{name} init"] = 0.0 if torch.equal(layer.weight, own_part(layer, "weight", reference.weight)) else 9.0
        ids = ids_of(*shape)
        y, expected = layer(ids), reference(ids)
        weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        found[name] = error(y, expected)
        found[f"{name} table"] = error(layer.weight, own_part(layer, "weight", reference.weight.detach()))
        grads = [g.to_dense() if g.is_sparse else g for g in (layer.weight.grad, reference.weight.grad)]
        found[f"{name} grad"] = error(grads[0], own_part(layer, "weight", grads[1]))
        if shared.get("sparse"):
            found[f"{name} grad is sparse"] = 0.0 if layer.weight.grad.is_sparse else 9.0
    for dim, across in itertools.product((0, 1), (False, True)):
        name = f"sequence {dim} across={across}"
        extra = {"sequence_parallel_enabled": True, "sequence_dimension": dim, "shard_across_embedding": across}
        layer, reference = pair(dtype, options=extra)
        ids = ids_of(8, 4)
        y, expected = layer(ids), reference(ids)
        weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
        (y * piece(weights, dim)).sum().backward()
        (expected * weights).sum().backward()
        found[name] = error(y, piece(expected, dim))
        found[f"{name} grad"] = error(layer.weight.grad, own_part(layer, "weight", reference.weight.grad))
    for across in (False, True):  # sizes that do not divide, padded
        layer, reference = pair(dtype, 13, 7, options={"pad": True, "shard_across_embedding": across})
        ids = torch.tensor([[0, 12, 5, 6], [12, 3, 7, 0]])
        y, expected = layer(ids), reference(ids)
        y.square().sum().backward()
        expected.square().sum().backward()
        found[f"pad across={across}"] = error(y, expected)
        found[f"pad across={across} grad"] = error(layer.weight.grad, own_part(layer, "weight", reference.weight.grad))
        layer, reference = pair(dtype, options={"collect_output": False, "shard_across_embedding": across})
        part = layer(ids_of(5))
        whole = reference(ids_of(5))
        if across:
            found["own slice"] = error(part, piece(whole, -1))
        else:
            held = whole.new_zeros(whole.shape)
            tp = current_context().tp
            rows = VOCABULARY // tp.degree
            own = (ids_of(5) // rows) == tp.rank
            held[own] = whole[own]
            found["own rows"] = error(part, held)
    return failures(found, LIMITS[dtype])


def low_precision() -> list[str]:
    """The output has the table's type and its exact values: a sum with zeros rounds nothing."""
    bad = []
    for dtype, across in ((torch.bfloat16, False), (torch.float16, True)):
        layer, reference = pair(dtype, options={"shard_across_embedding": across})
        y, expected = layer(ids_of(3, 4)), reference(ids_of(3, 4))
        if y.dtype != dtype or not torch.equal(y, expected):
            bad.append(f"{dtype} across={across}: {y.dtype}")
    return bad


def refused() -> list[str]:
    """What is told of an id outside the vocabulary, split either way, and of sizes that do not divide."""
    said = []
    for layer, bad in (
        (pair(torch.float32)[0], VOCABULARY),
        (pair(torch.float32, options={"shard_across_embedding": True})[0], -1),
        (ParallelEmbedding(9, 4), 1),
        (ParallelEmbedding(8, 5, shard_across_embedding=True), 1),
    ):
        try:
            layer(torch.tensor([1, bad]))
        except (IndexError, ShardingError) as problem:
            said.append(f"{type(problem).__name__}: {problem}")
    return said


def dropped_in_place() -> float:
    """As BERT's embeddings do: the piece of the sequence is changed in place, and its gradient comes back."""
    layer = ParallelEmbedding(8, 4, sequence_parallel_enabled=True, shard_across_embedding=True)
    layer(torch.zeros(4, 2, dtype=torch.int64)).mul_(2).sum().backward()
    return layer.weight.grad.sum().item()


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)], ids=str)
def test_equal_to_plain(tp: int, dtype: torch.dtype):
    for rank, bad in enumerate(run_ranks(all_cases, tp, dtype) if tp > 1 else [all_cases(dtype)]):
        assert not bad, f"rank {rank}: " + "; ".join(bad)


def on_two_ranks() -> tuple[list[str], list[str], float]:
    return low_precision(), refused(), dropped_in_place()


def test_two_ranks():
    """Types are kept, and an id outside the vocabulary is an IndexError: the reference returns zeros at degree 2."""
    for low, (above, below, rows, width), summed in run_ranks(on_two_ranks, 2):
        assert low == [] and summed == 32.0
        assert above.startswith("IndexError") and str(VOCABULARY) in above and below.startswith("IndexError")
        assert "ShardingError: " in rows and "num_embeddings = 9 does not divide over 2 ranks" in rows
        assert "embedding_dim = 5 does not divide over 2 ranks" in width
