"""Checkpoints of a pipeline move to any other degrees, and tied weights are in them once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.trainer import gather_weights
from tests.pipeline.jobs import F64, alone, job, train
from tests.pipeline.models import decoder
from tests.ranks import run_ranks

HALF, STEPS = 2, 4


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
            wanted = alone(family, STEPS)
            if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9, atol=0):
                found.append(f"{before} to {after}, {family}: {losses}, wanted {wanted}")
    return found


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
