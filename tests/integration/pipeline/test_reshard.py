"""``nxd-infer ckpt`` on checkpoints of pipelines: other degrees offline are what a job of those degrees saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nxd_infer as nxd
from nxd_infer import parallel_state
from tests.support.e2e.command import nxd_infer_here
from tests.support.pipeline.jobs import alone, job, train
from tests.support.pipeline.models import decoder
from tests.support.ranks import run_ranks

HALF, STEPS = 2, 4
DEGREES = {"a": (4, 1, 1), "b": (1, 2, 2)}
"""pp, tp, dp: of four ranks; with ZeRO-1 where ``dp`` is above 1."""


def save_at_all(folder: str) -> None:
    """A job saves at one pair of degrees; one of each others loads that and saves it again."""
    model, optimizer = job(2, 1, True, "llama")
    train(model, optimizer, range(HALF))
    nxd.save_checkpoint(f"{folder}/start", "half", model, optimizer, user_content={"step": HALF})
    for name, (pp, tp, _) in DEGREES.items():
        model, optimizer = job(pp, tp, True, "llama")
        nxd.load_checkpoint(f"{folder}/start", "half", model, optimizer)
        nxd.save_checkpoint(f"{folder}/{name}", "half", model, optimizer)
    model, optimizer = job(2, 2, False, "tied", 2)
    train(model, optimizer, range(HALF))
    nxd.save_checkpoint(f"{folder}/interleaved", "half", model, optimizer)
    parallel_state.destroy_model_parallel()


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


def test_resharded_is_what_a_job_saves(tmp_path: Path, capsys, monkeypatch):
    def command(*arguments: object) -> str:
        done = nxd_infer_here(capsys, monkeypatch, "ckpt", *arguments)
        assert done.status == 0, done.err
        return done.out

    run_ranks(save_at_all, 4, str(tmp_path), comm_timeout=120)
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
    for losses in run_ranks(resume, 4, str(after), 4, 1, comm_timeout=120):
        assert losses == pytest.approx(alone("tied", STEPS)[HALF:], rel=1e-9)
    command("consolidate", before, "--out", tmp_path / "weights")
    whole = load_file(tmp_path / "weights" / "model.safetensors")
    assert whole.keys() == decoder("tied").state_dict().keys() - {"lm_head.weight"}
