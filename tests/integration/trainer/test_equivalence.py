"""Training in parallel is training in one process: losses, every gradient on every rank, norms, weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from nxd_infer import parallel_state
from nxd_infer.testing.compare import Reference, Training, compare_with, train_single
from nxd_models.llama.model import Attention, FeedForward
from tests.support.ranks import run_ranks
from tests.support.trainer.models import MLP, decoder, tokens, vectors

F64 = torch.float64
STEPS = 6


def builder(model: str, dtype: torch.dtype):
    return partial(MLP, dtype) if model == "mlp" else partial(decoder, model, dtype)


def batch_for(model: str, dtype: torch.dtype) -> dict[str, Any]:
    return vectors(dtype) if model == "mlp" else tokens()


Case = tuple[str, torch.dtype, dict[str, Any]]


def cases(degrees: list[tuple[int, int]]) -> list[Case]:
    """(model, dtype, options of Training) for every degree."""
    found: list[Case] = []
    for tp, dp in degrees:
        here = {"tp": tp, "dp": dp}
        all_of_it = {**here, "sequence_parallel": tp > 1, "zero1": dp > 1}
        found.append(("llama", torch.float32, {**all_of_it, "steps": STEPS}))
        found.append(("mlp", F64, {**all_of_it, "steps": STEPS, "accumulate": 2}))
        few = {**all_of_it, "steps": 3}
        found.append(("odd_heads", F64, {**few, "activation_checkpoint": "full"}))
        found += [(model, F64, few) for model in ("tied", "qwen3", "biases")]
        # The load balancing loss is of a rank's own rows, so data parallel ranks have another than one process.
        found.append(("experts", F64, {**few, "accumulate": 2, "activation_checkpoint": "full"}))
        found.append(("experts", torch.float32, {**all_of_it, "steps": STEPS}))
        if dp == 1:
            found += [
                ("balanced", F64, {**few, "sequence_parallel": on, "activation_checkpoint": "full"})
                for on in (False, True)
            ]
        # Some of what these degrees have; no clipping, momentum; and checkpointing of chosen classes with all the rest.
        if dp > 1:
            found.append(("mlp", F64, {**few, "zero1": False, "accumulate": 2}))
        sgd = {"optimizer_class": torch.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}
        found.append(("llama", F64, {**few, **sgd, "sequence_parallel": False, "max_grad_norm": None}))
        chosen = {"activation_checkpoint": (Attention, FeedForward), "accumulate": 2}
        found.append(("llama", torch.float32, {**few, **chosen}))
    return found


def name_of(case: Case) -> str:
    model, dtype, options = case
    return f"{model} {str(dtype)[6:]} " + " ".join(f"{k}={v}" for k, v in options.items() if v)


def reference_of(case: Case, kept: dict[Any, Reference]) -> Reference:
    model, dtype, options = case
    key = model, dtype, options["steps"], options.get("optimizer_class"), options.get("max_grad_norm", 1.0)
    if key not in kept:
        kept[key] = train_single(builder(model, dtype), batch_for(model, dtype), Training(**options))
    return kept[key]


def run(degrees: list[tuple[int, int]]) -> list[str]:
    """On one rank: every case, in a context of its own; what differs, and how many cases there were."""
    found, kept = [], {}
    for case in cases(degrees):
        model, dtype, options = case
        reference = reference_of(case, kept)
        parallel_state.destroy_model_parallel()
        differences = compare_with(reference, builder(model, dtype), batch_for(model, dtype), Training(**options))
        found += [f"{name_of(case)}: {line}" for line in differences]
    return found


@pytest.mark.parametrize("degrees", [[(1, 2), (2, 1)], [(2, 2), (4, 1)]], ids=["two", "four"])
def test_several_ranks(degrees: list[tuple[int, int]]):
    world = degrees[0][0] * degrees[0][1]
    for rank, found in enumerate(run_ranks(run, world, degrees, comm_timeout=240)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


@pytest.mark.parametrize("model", ["mlp", "llama", "tied"])
def test_one_process(model: str):
    """The trainer at degree 1 is plain PyTorch, bit by bit."""
    training = Training(steps=STEPS)
    built, batch = builder(model, torch.float32), batch_for(model, torch.float32)
    found = compare_with(train_single(built, batch, training), built, batch, training, tolerance=0.0)
    assert not found, "\n".join(found)
