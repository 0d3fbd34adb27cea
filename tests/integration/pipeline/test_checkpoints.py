"""Checkpoints of a pipeline move to any other degrees, offline too; the reference's are read into stages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.checkpoint import reshard_checkpoint
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from tests.support.e2e.command import here
from tests.support.pipeline.jobs import F64, alone, job, train, train_alone
from tests.support.pipeline.models import decoder
from tests.support.ranks import run_ranks

HALF, STEPS = 2, 4


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


DEGREES = {"a": (4, 1, 1), "b": (1, 2, 2)}
"""pp, tp, dp: of four ranks; with ZeRO-1 where ``dp`` is above 1."""


def save_at_all(folder: str) -> list[list[float]]:
    """A job saves at one pair of degrees; one of each others loads that, saves it again and goes on: its losses."""
    found = []
    model, optimizer = job(2, 1, True, "tied")
    train(model, optimizer, range(HALF))
    nxd.save_checkpoint(f"{folder}/start", "half", model, optimizer, user_content={"step": HALF})
    for name, (pp, tp, _) in DEGREES.items():
        model, optimizer = job(pp, tp, True, "tied")
        nxd.load_checkpoint(f"{folder}/start", "half", model, optimizer)
        nxd.save_checkpoint(f"{folder}/{name}", "half", model, optimizer)
        found.append(train(model, optimizer, range(HALF, STEPS)))
    model, optimizer = job(2, 2, False, "tied", 2)
    train(model, optimizer, range(HALF))
    nxd.save_checkpoint(f"{folder}/interleaved", "half", model, optimizer)
    parallel_state.destroy_model_parallel()
    return found


def resume(path: str, pp: int, tp: int) -> list[float]:
    model, optimizer = job(pp, tp, False, "tied")
    nxd.load_checkpoint(path, "half", model, optimizer)
    losses = train(model, optimizer, range(HALF, STEPS))
    parallel_state.destroy_model_parallel()
    return losses


def same_files(first: Path, second: Path, optimizer: bool) -> None:
    """``optimizer``: compare its files too; with ZeRO-1 a job divides buckets of several parameters."""
    kinds = ("model", "optimizer")[: 1 + optimizer]
    pattern = "*.*_rank_*.safetensors" if optimizer else "model.*.safetensors"
    names = sorted(path.name for path in first.glob(pattern))
    assert names and names == sorted(path.name for path in second.glob(pattern))
    for name in names:
        a, b = load_file(first / name), load_file(second / name)
        assert a.keys() == b.keys(), (name, a.keys() ^ b.keys())
        # A job with ZeRO-1 but without data parallelism keeps the shapes.
        differing = [key for key in a if not torch.equal(a[key].flatten(), b[key].flatten())]
        assert not differing, (name, differing)
    for path in first.glob("rank_*.json"):
        ours, theirs = (json.loads((folder / path.name).read_text()) for folder in (first, second))
        for kind in kinds:
            mine, other = ours.get(kind, {}), theirs.get(kind, {})
            assert mine.get("pieces") == other.get("pieces") and mine.get("group_names") == other.get("group_names")
            assert mine.get("file") == other.get("file") and mine.get("degrees") == other.get("degrees")


def test_a_job_goes_on_at_other_degrees_and_resharded_is_what_it_saves(tmp_path: Path):
    def command(*arguments: object) -> str:
        done = here("ckpt", *arguments)
        assert done.status == 0, done.err
        return done.out

    wanted = pytest.approx(alone("tied", STEPS)[HALF:], rel=1e-9)
    for found in run_ranks(save_at_all, 4, str(tmp_path), comm_timeout=120):
        assert found == [wanted] * len(DEGREES)
    # Of the tied weight two stages hold a copy, and the first one saves it.
    records = [json.loads(record.read_text()) for record in (tmp_path / "start").rglob("rank_*.json")]
    names = [name for record in records for name in record.get("model", {}).get("pieces", ())]
    assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names
    for name, (pp, tp, dp) in DEGREES.items():
        out = tmp_path / f"to_{name}"
        told = command("reshard", tmp_path / "start", out, "--tp", tp, "--pp", pp, "--dp", dp)
        assert ("for 4 rank(s)" in told) and (f"pp {pp}" in told or pp == 1)
        same_files(out / "half", tmp_path / name / "half", dp == 1)
        assert " 0 differ" in command("diff", tmp_path / "start", out)
    # Tied weights from an interleaved pipeline, at cuts of one's own.
    before, after = tmp_path / "interleaved", tmp_path / "cut"
    command("reshard", before, after, "--tp", 1, "--pp", 4, "--cuts", "model.layers.0,model.layers.1,model.layers.2")
    held = [set(load_file(after / "half" / f"model.tp_rank_00.pp_rank_{rank:02d}.safetensors")) for rank in range(4)]
    assert {name.split(".")[2] for name in held[1]} == {"1"} and not set.intersection(*held)
    for path in (before, after):
        assert run_ranks(resume, 4, str(path), 4, 1, comm_timeout=120) == [wanted] * 4
    command("consolidate", before, "--out", tmp_path / "weights")
    whole = load_file(tmp_path / "weights" / "model.safetensors")
    assert whole.keys() == decoder("tied").state_dict().keys() - {"lm_head.weight"}


def of_first_stage(name: str) -> bool:
    """The reference's first stage ends after the first of four layers."""
    return "embed" in name or "layers.0." in name


def resumed(folder: str) -> list[list[float]]:
    """The losses after loading the reference's folders with their optimizer, at several degrees of four ranks."""
    found = []
    for pp, tp, zero1 in ((4, 1, False), (1, 2, True)):
        model, optimizer = job(pp, tp, zero1, "llama")
        nxd.load_checkpoint(folder, "step_2", model, optimizer)
        found.append(train(model, optimizer, range(HALF, STEPS)))
    parallel_state.destroy_model_parallel()
    return found


def test_optimizers_go_on(tmp_path: Path):
    """Each of its stages numbers its own parameters, by group."""
    model, optimizer, _ = train_alone(partial(decoder, "llama", F64), HALF)
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
            assert losses == pytest.approx(alone("llama", STEPS)[HALF:], rel=1e-9)
    for file in (tmp_path / "step_2/model").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="which name them, are not there: restore them"):
        nxd.load_checkpoint(tmp_path, "step_2", optimizer=job(1, make="llama")[1])


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
