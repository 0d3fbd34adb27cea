"""Checkpoints of a pipeline move to any other degrees, and tied weights are in them once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.checkpoint import reshard_checkpoint
from nxd_infer.context import current_context
from tests.support.pipeline.jobs import alone, job, train
from tests.support.ranks import run_ranks

HALF, STEPS = 2, 4


# (degrees of the save, degrees of the load): pp, tp, ZeRO-1, chunks; data parallelism takes the rest of four ranks
MOVES = [
    ((2, 1, True, 1), (1, 2, False, 1), "tied"),
    ((4, 1, False, 1), (2, 2, False, 1), "llama"),
    ((2, 2, False, 2), (4, 1, False, 1), "tied"),
]


def move(folder: str) -> list[str]:
    found = []
    for number, (before, after, family) in enumerate(MOVES):
        path = f"{folder}/{number}"
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
    records = sorted((tmp_path / "0").rglob("rank_*.json"))
    names = [name for one in records for name in json.loads(one.read_text()).get("model", {}).get("pieces", ())]
    assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names


def rates(folder: str) -> list[str]:
    """Each stage has rates of its own, and the last one more groups; they are those of the stage again."""
    found = []
    for pp, zero1 in ((2, True), (4, False)):
        path = f"{folder}/{pp}"
        model, _ = job(pp, 1, zero1, "llama")
        stage = current_context().pp.rank
        wanted = [0.1 * (1 + stage), 0.2 * (1 + stage)]
        saved = _grouped(model, zero1, stage == pp - 1)
        for number, group in enumerate(saved.param_groups):
            group["lr"] = wanted[number]
        nxd.save_checkpoint(path, "a", model, saved)
        fresh = _grouped(model, zero1, stage == pp - 1)
        nxd.load_checkpoint(path, "a", model, fresh)
        got = [group["lr"] for group in fresh.param_groups]
        if got != wanted[: len(got)]:
            found.append(f"pp {pp}: {got}, wanted {wanted}")
    parallel_state.destroy_model_parallel()
    return found


def _grouped(model: nn.Module, zero1: bool, several: bool) -> nxd.optimizer.NxDOptimizer:
    params = list(model.named_parameters())
    groups = [{"params": params[:1]}, {"params": params[1:]}] if several else [{"params": params}]
    return nxd.optimizer.NxDOptimizer(groups, torch.optim.AdamW, zero1=zero1)


def test_stages_keep_their_hyperparameters(tmp_path: Path):
    for rank, found in enumerate(run_ranks(rates, 4, str(tmp_path), comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)
    reshard_checkpoint(tmp_path / "4", tmp_path / "resharded", tp=1, dp=1, pp=4)
    for rank in range(4):
        a, b = (json.loads((tmp_path / name / f"a/rank_{rank:05d}.json").read_text()) for name in ("4", "resharded"))
        assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"], rank
