"""Resharding and comparing, as calls and as ``nxd-infer ckpt``: equal to what a job of those degrees has."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_infer.checkpoint import compare, compare_checkpoints, consolidate_checkpoint, reshard_checkpoint
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.compare import difference_of
from nxd_infer.cli.console import slow_bar
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, ParamLayout, gqa_plan, weight_layout
from nxd_infer.layout.describe import describe_plans, read_plans
from nxd_infer.modules.lora import LoraConfig
from tests.support.e2e.command import nxd_infer_here
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, losses_of, training
from tests.support.trainer.models import decoder

FAMILY = "odd_heads"  # padded at tp 2, padded and replicated at tp 4


def parts_of(options: dict[str, Any], seed: int) -> tuple[Any, Any]:
    return training(partial(decoder, FAMILY, torch.float32), seed=seed, **options)


def saved(root: str, options: dict[str, Any]) -> None:
    parts = parts_of(options, 0)
    losses_of(*parts, 2)
    save_checkpoint(root, "trained", *parts, user_content={"step": 2})


def resumed(root: str, copy: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Three losses after loading the checkpoint itself, and after loading what was made of it for these degrees."""
    found = []
    for path in (root, copy):
        parts = parts_of(options, 1)
        assert load_checkpoint(path, None, *parts)["step"] == 2
        found.append(losses_of(*parts, 3))
    return found[0], found[1]


def saved_again(root: str, out: str, options: dict[str, Any]) -> None:
    """What a job of the degrees in force makes of the checkpoint."""
    parts = parts_of(options, 1)
    load_checkpoint(root, None, *parts)
    save_checkpoint(out, "trained", *parts)


def command(capsys, monkeypatch, *arguments: object):
    return nxd_infer_here(capsys, monkeypatch, "ckpt", *arguments)


def same_files(first: Path, second: Path, pattern: str) -> None:
    names = sorted(path.name for path in first.glob(pattern))
    assert names and names == sorted(path.name for path in second.glob(pattern))
    for name in names:
        a, b = load_file(first / name), load_file(second / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a), name


def test_resharded_is_what_a_job_would_have_saved(tmp_path: Path, capsys, monkeypatch):
    """tp 2 -> tp 1 dp 2 (ZeRO-1 stays unsharded) -> tp 4 -> tp 2: tensor for tensor, and the two ends are equal."""
    start = tmp_path / "start"
    run_ranks(saved, 2, str(start), {}, tp=2)
    before = start
    for tp, dp in ((1, 2), (4, 1), (2, 1)):
        out = tmp_path / f"tp{tp}"
        done = command(capsys, monkeypatch, "reshard", before, out, "--tp", tp, "--dp", dp)
        assert done.status == 0, done.err
        assert f"tp {tp} dp {dp}" in done.out
        same = command(capsys, monkeypatch, "diff", start, out)
        assert same.status == 0 and " 0 differ" in same.out, same.out
        before = out
    same_files(start / "trained", tmp_path / "tp2" / "trained", "model.*.safetensors")
    same_files(start / "trained", tmp_path / "tp2" / "trained", "optim.*.safetensors")
    native = tmp_path / "native"
    run_ranks(saved_again, 1, str(start), str(native), {}, tp=1)
    same_files(native / "trained", tmp_path / "tp1" / "trained", "model.*.safetensors")
    for losses, again in run_ranks(resumed, 2, str(start), str(tmp_path / "tp1"), {}, tp=1):
        assert losses == again


def test_a_sharded_optimizer(tmp_path: Path, capsys, monkeypatch):
    """ZeRO-1 over two ranks -> tp 2 dp 1 and tp 2 dp 3, whose losses are those of loading the original."""
    start = tmp_path / "start"
    run_ranks(saved, 2, str(start), ZERO1, tp=1)
    for tp, dp in ((2, 1), (2, 3)):
        out = tmp_path / f"dp{dp}"
        assert command(capsys, monkeypatch, "reshard", start, out, "--tp", tp, "--dp", dp).status == 0
        assert len(list((out / "trained").glob("optim.*"))) == tp * dp
        assert " 0 differ" in command(capsys, monkeypatch, "diff", out, start).out
        manifest = json.loads((out / "trained" / "manifest.json").read_text())
        assert manifest["resharded_from"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1} and manifest["blake3"]
    for losses, again in run_ranks(resumed, 2, str(start), str(tmp_path / "dp3"), {}, tp=2):
        assert losses == again


class Partly(nn.Module):
    """Has parameters without dimensions and without elements, as of a layer that was cut away."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer, self.none = nn.Linear(6, 3), nn.Linear(6, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x).sum() + self.none(x).sum()


def trained_partly(options: dict[str, Any]) -> tuple[Any, Any]:
    parts = training(Partly, **options)
    parts[0].run_train(torch.ones(2, 6))
    parts[1].step()
    return parts


def saved_partly(root: str, options: dict[str, Any]) -> None:
    model, optimizer = trained_partly(options)
    save_checkpoint(root, "trained", model, optimizer)
    save_checkpoint(f"{root}/optimizer", "trained", optimizer=optimizer)


def resumed_partly(root: str, options: dict[str, Any]) -> bool:
    wanted = trained_partly(options)[0].state_dict()
    model, optimizer = training(Partly, seed=1, **options)
    load_checkpoint(f"{root}/optimizer", optimizer=optimizer)
    load_checkpoint(root, "trained", model, optimizer)
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_parameters_without_elements_are_not_missed(tmp_path: Path):
    """ZeRO-1 over several ranks gives them to no rank, and without they are one rank's."""
    for name, options in (("sharded", ZERO1), ("whole", {})):
        root = tmp_path / name
        run_ranks(saved_partly, 2, str(root), options, tp=1)
        reshard_checkpoint(root, tmp_path / f"{name}1", tp=1, dp=1)
        reshard_checkpoint(root / "optimizer", tmp_path / f"{name}1" / "optimizer", tp=1, dp=1)
        assert not compare_checkpoints(root, tmp_path / f"{name}1").differences
        for there in (root, tmp_path / f"{name}1"):
            for again in (ZERO1, {}):
                assert run_ranks(resumed_partly, 2, str(there), again, tp=1) == [True, True]


def alone(root: Path, tag: str = "a", change: float = 0.0, **options: Any) -> None:
    """A job of one rank, all of whose weights are ``change`` larger."""
    parts = parts_of(options, 0)
    losses_of(*parts, 1)
    with torch.no_grad():
        for param in parts[0].parameters():
            param.add_(change)
    save_checkpoint(root, tag, *parts)


def test_what_differs_is_listed(tmp_path: Path, capsys, monkeypatch):
    alone(tmp_path / "a", "one")
    alone(tmp_path / "a", "two", 1e-3)
    two = (tmp_path / "a" / "one", tmp_path / "a" / "two")
    done = command(capsys, monkeypatch, "diff", *two)
    assert done.status == 1 and "0.001" in done.out and "weights" in done.out and "exp_avg" not in done.out
    assert command(capsys, monkeypatch, "diff", *two, "--tolerance", 1).status == 0
    assert command(capsys, monkeypatch, "diff", *two, "--tolerance", 1e-4).status == 1
    weights = tmp_path / "weights"
    assert command(capsys, monkeypatch, "consolidate", two[0], "--out", weights, "--dtype", "bfloat16").status == 0
    half = ("diff", two[0], weights, "--weights-only")
    done = command(capsys, monkeypatch, *half)
    assert done.status == 1 and "type float32 and bfloat16" in done.out
    assert command(capsys, monkeypatch, *half, "--tolerance", 1e-2).status == 0
    done = command(capsys, monkeypatch, "diff", two[0], weights, "--tolerance", 1)
    assert done.status == 1 and "only in A" in done.out  # the optimizer's state
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    save_checkpoint(tmp_path / "b", "one", model)
    save_checkpoint(tmp_path / "c", "one", torch.nn.Sequential(torch.nn.Linear(3, 2)))
    done = command(capsys, monkeypatch, "diff", tmp_path / "b", tmp_path / "c", "--tolerance", 9)
    assert done.status == 1 and "shape [2, 2] and [2, 3]" in done.out


def test_as_calls(tmp_path: Path):
    """With progress for each tensor, and what the command prints as data."""
    alone(tmp_path / "a")
    seen: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        seen.append((stage, done, total))

    made = reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=2, progress=progress)
    assert made.where == str(tmp_path / "b" / "a") and made.notes == ()
    assert made.degrees == {"tp": 2, "pp": 1, "dp": 1} and made.before == dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    stage = f"writing {tmp_path / 'b'}"
    assert made.tensors and seen == [(stage, number + 1, made.tensors) for number in range(made.tensors)]
    found = compare_checkpoints(tmp_path / "a", tmp_path / "b", progress=progress)
    assert found.differences == [] and found.optimizers == (True, True) and found.places[1] == made.where
    assert seen[-1] == ("comparing", found.total, found.total) and len(seen) == made.tensors + found.total
    written = consolidate_checkpoint(tmp_path / "b", tmp_path / "c").weights
    found = compare_checkpoints(tmp_path / "a", written)
    assert found.optimizers == (True, False) and {one.problem for one in found.differences} == {"only in A"}
    assert all(one.exceeds(9) for one in found.differences) and found.places[1] == str(written)
    assert compare_checkpoints(tmp_path / "a", written, weights_only=True).differences == []
    wrong: list[dict[str, Any]] = [{"tp": 0}, {"tp": "2"}, {"tp": 1, "dp": 0}, {"tp": 1, "pp": -1}, {"tp": 10**9}]
    for degrees in wrong:
        with pytest.raises(ParallelConfigError, match="must be a whole number"):
            reshard_checkpoint(tmp_path / "a", tmp_path / "d", **degrees)
    assert not (tmp_path / "d").exists()


def test_what_cannot_be_resharded(tmp_path: Path, capsys, monkeypatch):
    alone(tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    for out in (tmp_path / "a", tmp_path / "a" / "a", tmp_path / "a" / "a" / "x"):
        done = command(capsys, monkeypatch, "reshard", tmp_path / "a", out, "--tp", 2)
        assert done.status == 1 and "the folder of the checkpoint itself; write to another one" in done.err
    assert command(capsys, monkeypatch, "reshard", tmp_path / "a", tmp_path / "b", "--tp", 2).status == 0
    done = command(capsys, monkeypatch, "reshard", tmp_path / "a", tmp_path / "b", "--tp", 2)
    assert done.status == 1 and "already holds a checkpoint 'a'; choose another folder" in done.err
    done = command(capsys, monkeypatch, "reshard", tmp_path / "a", tmp_path / "c", "--tp", 0)
    assert done.status == 2
    file = next((tmp_path / "b" / "a").glob("model.tp_rank_01*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = command(capsys, monkeypatch, "reshard", tmp_path / "b", tmp_path / "c", "--tp", 1)
    assert done.status == 1 and f"{file.name} differs from its checksum" in done.err
    save_checkpoint(tmp_path / "d", "dict", {"weight": torch.ones(2)})
    done = command(capsys, monkeypatch, "reshard", tmp_path / "d", tmp_path / "c", "--tp", 1)
    assert done.status == 1 and "saved as a dictionary, which fits only its own degrees" in done.err
    for record_file in (tmp_path / "a" / "a").glob("rank_*.json"):  # as the first version wrote it
        record = json.loads(record_file.read_text())
        for piece in record["model"]["pieces"].values():
            del piece["plans"]
        record_file.write_text(json.dumps(record))
        manifest = json.loads((tmp_path / "a" / "a" / "manifest.json").read_text())
        manifest["files"][record_file.name] = record_file.stat().st_size
        del manifest["blake3"]
        (tmp_path / "a" / "a" / "manifest.json").write_text(json.dumps(manifest))
        (tmp_path / "a" / "a" / "done").write_text("")
    done = command(capsys, monkeypatch, "reshard", tmp_path / "a", tmp_path / "c", "--tp", 2)
    assert done.status == 1 and "does not say how" in done.err and "save it there" in done.err
    assert not (tmp_path / "c").exists()
    assert before == sorted(path.name for path in (tmp_path / "a").rglob("*"))


def test_an_adapter_goes_along(tmp_path: Path, capsys, monkeypatch):
    """Of a model with LoRA: its factors and its optimizer at other degrees, PEFT's files as they are."""
    config = LoraConfig(enable_lora=True, lora_rank=4, target_modules=["q_proj", "down_proj"], save_lora_base=True)
    alone(tmp_path / "a", lora_config=config)
    for before, out, tp in (("a", "b", 2), ("b", "c", 1)):
        assert command(capsys, monkeypatch, "reshard", tmp_path / before, tmp_path / out, "--tp", tp).status == 0
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            file = Path("a", "lora_adapter", name)
            assert (tmp_path / out / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    done = command(capsys, monkeypatch, "diff", tmp_path / "a", tmp_path / "b")
    assert done.status == 0 and " 0 differ" in done.out
    one, two = parts_of({"lora_config": config}, 1), parts_of({"lora_config": config}, 2)
    load_checkpoint(tmp_path / "a", None, *one)
    load_checkpoint(tmp_path / "c", None, *two)
    assert losses_of(*one, 2) == losses_of(*two, 2)


def test_a_bar_after_a_while_only(capsys):
    with slow_bar(after=600) as progress:
        progress("quick", 1, 2)
    assert capsys.readouterr().out == ""
    with slow_bar(after=0.01) as progress:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(60)
        progress("slow", 1, 2)
    assert "slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("a", "b", "largest", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, 2.0], [1.0, 4.0], 2.0, 0.5),
        ([0.0, float("nan")], [0.0, float("nan")], 0.0, 0.0),
        ([0.0, float("inf")], [0.5, float("inf")], 0.5, 1.0),
        ([0.0, 3.0], [0.0, float("nan")], float("inf"), float("inf")),
        ([0.0, float("inf")], [0.0, -float("inf")], float("inf"), float("inf")),
        ([], [], 0.0, 0.0),
        ([3, 2**53], [3, 2**53 + 1], 1.0, 2.0**-53),
        ([3, 9], [3, 5], 4.0, 4 / 9),
        ([True, False], [True, True], 1.0, 1.0),
    ],
)
def test_how_much_two_tensors_differ(monkeypatch, a: list[float], b: list[float], largest: float, relative: float):
    monkeypatch.setattr(compare, "CHUNK", 1)
    assert difference_of(torch.tensor(a), torch.tensor(b)) == (largest, relative)


def test_plans_written_down_are_the_same_plans():
    heads = gqa_plan(6, 3, 4)
    plans = [
        AxisPlan.padded(61, 8, fill=float("-inf")),
        AxisPlan.heads(3, 4),
        AxisPlan.strided(12, 2),
        AxisPlan.recut(AxisPlan.even(7), 4),
        AxisPlan.from_runs(AxisPlan.even(7).runs(2, 1)),
        heads.q_axis(4),
        AxisPlan.fused({"q": heads.q_axis(4), "k": heads.kv_axis(4)}),
    ]
    layouts = [ParamLayout.of([plan, 5], {part: f"x.{part}" for part in plan.parts}) for plan in plans]
    layouts += weight_layout(decoder(FAMILY)).values()
    for layout in layouts:
        assert read_plans(json.loads(json.dumps(describe_plans(layout)))) == layout
    for broken in ({}, {"axes": [1], "sources": []}, {"axes": [{"$": "Popen"}], "sources": []}, None):
        with pytest.raises(ShardingError, match="not the description of a weight's plans"):
            read_plans(broken)
    assert current_context().world_size == 1
