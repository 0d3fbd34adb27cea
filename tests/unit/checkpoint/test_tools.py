"""Resharding, comparing and inspecting without ranks, as calls and as ``nxd-infer ckpt``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nxd_infer.checkpoint import compare, compare_checkpoints, consolidate_checkpoint, reshard_checkpoint
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.compare import difference_of
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, ParamLayout, weight_layout
from nxd_infer.layout.describe import describe_plans, read_plans
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.support.checkpoint.resigned import resign
from tests.support.e2e.command import here, refused
from tests.support.trainer.jobs import losses_of, training
from tests.support.trainer.models import decoder

run = partial(here, "ckpt")


def parts_of(options: dict[str, Any], seed: int) -> tuple[Any, Any]:
    return training(partial(decoder, "odd_heads"), seed=seed, **options)


def alone(root: Path, tag: str = "a", change: float = 0.0, **options: Any) -> None:
    """A job of one rank, all of whose weights are ``change`` larger."""
    parts = parts_of(options, 0)
    losses_of(*parts, 1)
    with torch.no_grad():
        for param in parts[0].parameters():
            param.add_(change)
    save_checkpoint(root, tag, *parts)


def test_what_differs_is_listed(tmp_path: Path):
    alone(tmp_path / "a", "one")
    alone(tmp_path / "a", "two", 1e-3)
    two = (tmp_path / "a" / "one", tmp_path / "a" / "two")
    done = run("diff", *two)
    assert done.status == 1 and "0.001" in done.out and "weights" in done.out and "exp_avg" not in done.out
    assert f"A: {two[0]}" in done.out and f"B: {two[1]}" in done.out
    assert run("diff", tmp_path / "a", tmp_path / "a", "--tag", "one", "--other-tag", "one").status == 0
    assert run("diff", *two, "--tolerance", 1).status == 0
    assert run("diff", *two, "--tolerance", 1e-4).status == 1
    weights = tmp_path / "weights"
    assert run("consolidate", two[0], "--out", weights, "--dtype", "bfloat16").status == 0
    half = ("diff", two[0], weights, "--weights-only")
    done = run(*half)
    assert done.status == 1 and "type float32 and bfloat16" in done.out
    assert run(*half, "--tolerance", 1e-2).status == 0
    done = run("diff", two[0], weights, "--tolerance", 1)
    assert done.status == 1 and "only in A" in done.out
    assert "only A has optimizer state: pass --weights-only" in done.out
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    save_checkpoint(tmp_path / "b", "one", model)
    save_checkpoint(tmp_path / "c", "one", torch.nn.Sequential(torch.nn.Linear(3, 2)))
    done = run("diff", tmp_path / "b", tmp_path / "c", "--tolerance", 9)
    assert done.status == 1 and "shape [2, 2] and [2, 3]" in done.out


def test_as_calls(tmp_path: Path):
    alone(tmp_path / "a")
    seen: list[tuple[Any, ...]] = []
    made = reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=2, progress=lambda *told: seen.append(told[:3]))
    assert made.where == str(tmp_path / "b" / "a") and made.notes == ()
    assert made.degrees == {"tp": 2, "pp": 1, "dp": 1} and made.before == dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    stage = f"writing {tmp_path / 'b'}"
    assert made.tensors and seen == [(stage, number + 1, made.tensors) for number in range(made.tensors)]
    found = compare_checkpoints(tmp_path / "a", tmp_path / "b", progress=lambda *told: seen.append(told[:3]))
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


def test_what_cannot_be_resharded(tmp_path: Path):
    alone(tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a").rglob("*"))
    for out in (tmp_path / "a", tmp_path / "a" / "a", tmp_path / "a" / "a" / "x"):
        done = run("reshard", tmp_path / "a", out, "--tp", 2)
        assert done.status == 1 and "the folder of the checkpoint itself; write to another one" in done.err
    assert run("reshard", tmp_path / "a", tmp_path / "b", "--tp", 2).status == 0
    done = run("reshard", tmp_path / "a", tmp_path / "b", "--tp", 2)
    assert done.status == 1 and "already holds a checkpoint 'a'; choose another folder" in done.err
    done = run("reshard", tmp_path / "a", tmp_path / "c", "--tp", 0)
    assert done.status == 2
    file = next((tmp_path / "b" / "a").glob("model.tp_rank_01*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = run("reshard", tmp_path / "b", tmp_path / "c", "--tp", 1)
    assert done.status == 1 and f"{file.name} differs from its checksum" in done.err
    save_checkpoint(tmp_path / "d", "dict", {"weight": torch.ones(2)})
    done = run("reshard", tmp_path / "d", tmp_path / "c", "--tp", 1)
    assert done.status == 1 and "saved as a dictionary, which fits only its own degrees" in done.err
    record_file = tmp_path / "a" / "a" / "rank_00000.json"  # as of a custom plan
    record = json.loads(record_file.read_text())
    for piece in record["model"]["pieces"].values():
        piece["plans"] = None
    record_file.write_text(json.dumps(record))
    resign(tmp_path / "a" / "a")
    done = run("reshard", tmp_path / "a", tmp_path / "c", "--tp", 2)
    assert done.status == 1 and "does not say how" in done.err and "save it there" in done.err
    assert not (tmp_path / "c").exists()
    assert before == sorted(path.name for path in (tmp_path / "a").rglob("*"))


def test_an_adapter_goes_along(tmp_path: Path):
    config = LoraConfig(enable_lora=True, lora_rank=4, target_modules=["q_proj", "down_proj"], save_lora_base=True)
    alone(tmp_path / "a", lora_config=config)
    for before, out, tp in (("a", "b", 2), ("b", "c", 1)):
        assert run("reshard", tmp_path / before, tmp_path / out, "--tp", tp).status == 0
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            file = Path("a", "lora_adapter", name)
            assert (tmp_path / out / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert done.status == 0 and " 0 differ" in done.out
    one, two = parts_of({"lora_config": config}, 1), parts_of({"lora_config": config}, 2)
    load_checkpoint(tmp_path / "a", None, *one)
    load_checkpoint(tmp_path / "c", None, *two)
    assert losses_of(*one, 2) == losses_of(*two, 2)


@pytest.mark.parametrize(
    ("a", "b", "largest", "relative"),
    [
        ([1.0, 2.0], [1.0, 4.0], 2.0, 0.5),
        ([0.0, float("nan")], [0.0, float("nan")], 0.0, 0.0),
        ([0.0, 3.0], [0.0, float("nan")], float("inf"), float("inf")),
        ([0.0, float("inf")], [0.0, -float("inf")], float("inf"), float("inf")),
        ([], [], 0.0, 0.0),
        ([3, 2**53], [3, 2**53 + 1], 1.0, 2.0**-53),
        ([True, False], [True, True], 1.0, 1.0),
    ],
)
def test_how_much_two_tensors_differ(monkeypatch, a: list[float], b: list[float], largest: float, relative: float):
    monkeypatch.setattr(compare, "CHUNK", 1)
    assert difference_of(torch.tensor(a), torch.tensor(b)) == (largest, relative)


def test_plans_written_down():
    for layout in (
        ParamLayout.of([AxisPlan.padded(61, 8, fill=float("-inf")), 5], "x"),
        *weight_layout(decoder("odd_heads")).values(),
    ):
        assert read_plans(json.loads(json.dumps(describe_plans(layout)))) == layout
    for broken in ({}, {"axes": [1], "sources": []}, {"axes": [{"$": "Popen"}], "sources": []}, None):
        with pytest.raises(ShardingError, match="not the description of a weight's plans"):
            read_plans(broken)


def test_what_is_not_there_and_what_is(tmp_path: Path):
    done = run("inspect", tmp_path / "nope")
    refused(done, "nope does not exist")
    assert "has_checkpoint" not in done.err
    refused(run("diff", tmp_path / "nope", tmp_path), "nope does not exist")
    save_checkpoint(tmp_path, "a", torch.nn.Linear(2, 2))
    weights = tmp_path / "model.safetensors"
    weights.write_text("mine")
    refused(run("consolidate", tmp_path, "--out", tmp_path), "already exists", "choose another")
    assert weights.read_text() == "mine"


def test_an_adapter_of_a_joint_layer_is_none_of_pefts(tmp_path: Path):
    """Its factors have the names of q, k and v, as those of PEFT have their adapter's."""
    qkv = GQAQKVColumnParallelLinear(4, [4, 2], bias=False, gather_output=False)
    model = LoRAModel(
        torch.nn.ModuleDict({"qkv": qkv}), {"lora_rank": 2, "target_modules": ["qkv"], "save_lora_base": True}
    )
    save_checkpoint(tmp_path, "a", model)
    (tmp_path / "config.json").write_text("{}")
    done = consolidate_checkpoint(tmp_path, tmp_path / "out")
    assert "unmerged adapter: qkv.lora_A.k.weight" in done.notes[0]
    assert {"qkv.lora_A.q.weight", "qkv.lora_B.v.weight"} <= load_file(done.weights).keys()
