"""The reference's folders of checkpoints, which are cut elsewhere, are read into stages with their optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from tests.support.pipeline.jobs import F64, alone, job, train, train_alone
from tests.support.pipeline.models import decoder
from tests.support.ranks import run_ranks

HALF, ALL = 2, 4


def of_first_stage(name: str) -> bool:
    """The reference's first stage ends after the first of four layers."""
    return "embed" in name or "layers.0." in name


def resumed(folder: str) -> list[list[float]]:
    """The losses after loading the reference's folders with their optimizer, at several degrees of four ranks."""
    found = []
    for pp, tp, zero1 in ((4, 1, False), (1, 2, True)):
        model, optimizer = job(pp, tp, zero1, "llama")
        nxd.load_checkpoint(folder, "step_2", model, optimizer)
        found.append(train(model, optimizer, range(HALF, ALL)))
    parallel_state.destroy_model_parallel()
    return found


def test_optimizers_go_on(tmp_path: Path):
    """Each of its stages numbers its own parameters, by group."""
    model, optimizer, _ = train_alone("llama", HALF)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage in range(2):
        names = [name for name in model.state_dict() if of_first_stage(name) is (stage == 0)]
        state, groups, count = {}, [], 0
        for group in optimizer.param_groups:
            here = [p for p in group["params"] if name_of[id(p)] in names]
            state |= {count + place: optimizer.state[p] for place, p in enumerate(here)}
            groups.append({**group, "params": list(range(count, count + len(here)))})
            count += len(here)
        weights = {name: model.state_dict()[name].clone() for name in names}
        for kind, value in (("model", weights), ("optim", {"state": state, "param_groups": groups})):
            path = tmp_path / "step_2" / kind / f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)
    for mark in ("checkpoint", "done"):
        (tmp_path / "step_2" / mark).touch()
    for found in run_ranks(resumed, 4, str(tmp_path), comm_timeout=120):
        for losses in found:
            assert losses == pytest.approx(alone("llama", ALL)[HALF:], rel=1e-9)
    for file in (tmp_path / "step_2/model").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="which name them, are not there: restore them"):
        nxd.load_checkpoint(tmp_path, "step_2", optimizer=job(1, family="llama")[1])


def gathered(folder: str) -> list[dict[str, Tensor]]:
    """What rank 0 is given of a model as it began, with the reference's weights, and with those of one file."""
    model, _ = job(2, 2)
    found = [nxd.trainer.gather_weights(model)]
    nxd.load_checkpoint(folder, "step_1", model)
    found.append(nxd.trainer.gather_weights(model))
    nxd.parallel_layers.load(f"{folder}/whole.pt", model, sharded=False)
    found.append(nxd.trainer.gather_weights(model))
    parallel_state.destroy_model_parallel()
    return found if current_context().rank == 0 else []


def whole(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return decoder("tied", F64).state_dict()


def test_both_stages_have_the_tied_embedding(tmp_path: Path):
    for stage in range(2):
        part = {n: t.clone() for n, t in whole(4).items() if "embed" in n or of_first_stage(n) is (stage == 0)}
        path = tmp_path / f"step_1/tp_rank_00_pp_rank_{stage:02d}/checkpoint.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": part}, path)
    torch.save(whole(5), tmp_path / "whole.pt")
    for held, seed in zip(run_ranks(gathered, 4, str(tmp_path))[0], (3, 4, 5), strict=True):
        wanted = whole(seed)
        assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)
