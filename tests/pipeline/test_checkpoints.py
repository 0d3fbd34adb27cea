"""Checkpoints of a pipeline move to any other degrees, and tied weights are in them once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.trainer import gather_weights
from tests.pipeline.models import decoder, tokens
from tests.ranks import run_ranks

F64 = torch.float64
HALF, STEPS = 2, 4


def job(pp: int, tp: int = 1, zero1: bool = False, family: str = "tied", chunks: int = 1) -> tuple[Any, Any]:
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config={"auto_partition": True, "num_microbatches": 4, "virtual_pipeline_size": chunks},
        optimizer_config={"zero_one_enabled": zero1},
    )
    torch.manual_seed(3)
    model = nxd.initialize_parallel_model(config, partial(decoder, family, F64))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=1e-2)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """The same batch on every data-parallel rank."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(model.run_train(**tokens(seed=step))))
        optimizer.step()
    return losses


# (degrees of the save, degrees of the load): pp, tp, ZeRO-1, chunks; data parallelism takes the rest of four ranks
MOVES = [
    ((2, 1, True, 1), (1, 2, False, 1)),
    ((1, 1, True, 1), (4, 1, False, 1)),
    ((4, 1, False, 1), (2, 2, False, 1)),
    ((2, 2, False, 1), (2, 1, True, 2)),
]


def move(folder: str) -> list[str]:
    found = []
    for number, (before, after) in enumerate(MOVES):
        for family in ("tied", "llama")[: 2 - number % 2]:
            path = f"{folder}/{number}{family}"
            model, optimizer = job(before[0], before[1], before[2], family, before[3])
            losses = train(model, optimizer, range(HALF))
            nxd.save_checkpoint(path, "half", model, optimizer)
            model, optimizer = job(after[0], after[1], after[2], family, after[3])
            nxd.load_checkpoint(path, "half", model, optimizer)
            losses += train(model, optimizer, range(HALF, STEPS))
            parallel_state.destroy_model_parallel()
            wanted = alone(family)
            if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9, atol=0):
                found.append(f"{before} to {after}, {family}: {losses}, wanted {wanted}")
    return found


_alone: dict[str, list[float]] = {}


def alone(family: str) -> list[float]:
    """Trained here, in one process without groups."""
    if family not in _alone:
        torch.manual_seed(3)
        model = decoder(family, F64)
        decay = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
        rest = {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decay, rest], lr=1e-2)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(**tokens(seed=step))[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        _alone[family] = losses
    return _alone[family]


def test_to_other_degrees(tmp_path: Path):
    for rank, found in enumerate(run_ranks(move, 4, str(tmp_path), comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)
    # Tied, at pp 2: saved by the first stage only.
    records = sorted((tmp_path / "0tied").rglob("rank_*.json"))
    names = [name for one in records for name in json.loads(one.read_text()).get("model", {}).get("pieces", ())]
    assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names


def gathered() -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    model, _ = job(2, 2)
    found = gather_weights(model)
    torch.manual_seed(3)
    rank = current_context().rank
    parallel_state.destroy_model_parallel()
    return rank, found, decoder("tied", F64).state_dict() if rank == 0 else {}


def test_gathered_weights_are_those_of_the_whole_model():
    for rank, found, wanted in run_ranks(gathered, 4):
        assert found.keys() == wanted.keys() and (found or rank)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
