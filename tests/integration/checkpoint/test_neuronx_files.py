"""Folders that the reference wrote: loaded at the same and at other degrees, inspected, resharded, consolidated.

The files are written here as the documents and ``torch_xla``'s ZeRO-1 optimizer describe them, by ``torch.save``.
"""

from __future__ import annotations

import json
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.neuronx.archive import one_by_one
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import MergedSource, iter_shards, weight_layout
from nxd_infer.trainer import ResumableLoader
from nxd_models import registry
from tests.support.e2e.command import nxd_infer_here
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny
from tests.support.trainer.jobs import ZERO1, mine, training
from tests.support.trainer.models import MLP, vectors

WIDE = partial(MLP, torch.float64)
BATCH = vectors(torch.float64)


class TensorReference:
    """What ``torch_xla`` writes in place of a tensor."""

    def __init__(self, tid: int):
        self.tid = tid


def write(path: Path, value: Any, xser: bool) -> None:
    """One rank's file: a pickle of everything, or one of references beside a file a tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not xser:
        torch.save(value, path)
        return
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    count = 0

    def visit(item: Any) -> Any:
        nonlocal count
        if isinstance(item, Tensor):
            torch.save(item.clone(), folder / f"tensor_{count}.pt")
            count += 1
            return TensorReference(count - 1)
        if isinstance(item, dict):
            return {key: visit(entry) for key, entry in item.items()}
        return [visit(entry) for entry in item] if isinstance(item, list) else item

    module = types.ModuleType("torch_xla.utils.serialization")
    module.TensorReference = TensorReference  # pyright: ignore[reportAttributeAccessIssue]
    TensorReference.__module__ = module.__name__
    packages = ("torch_xla", "torch_xla.utils", module.__name__)
    real = {name: sys.modules[name] for name in packages if name in sys.modules}
    try:
        sys.modules.update(dict.fromkeys(packages, module))
        torch.save(visit(value), path)
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(real)
    torch.save({"shapes": []}, path.with_name(f"{path.name}.info.pt"))


def sharded_state(state: dict[str, Any], shapes: list[torch.Size], rank: int, ranks: int) -> dict[str, Any]:
    """``torch_xla``'s ZeRO-1 state: each tensor padded along its first dimension, one of equal parts of it."""

    def part(value: Any, shape: torch.Size) -> Any:
        if not isinstance(value, Tensor) or value.shape != shape:
            return value
        filling = -shape[0] % ranks
        return F.pad(value, [0, 0] * (value.dim() - 1) + [0, filling]).chunk(ranks)[rank].clone()

    base = {i: {key: part(v, shapes[i]) for key, v in entry.items()} for i, entry in state["state"].items()}
    return {"state": {}, "param_groups": state["param_groups"], "base_state": base}


def go_on(parts: tuple[Any, Any], count: int = 3) -> list[float]:
    model, optimizer = parts
    losses = []
    for _ in range(count):
        losses.append(float(model.run_train(**mine(BATCH))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def written(root: str, form: str, zero1: bool) -> list[float]:
    """Train, write what the reference would have written, and go on."""
    context = current_context()
    model, optimizer = training(WIDE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    go_on((model, optimizer), 2)
    inner = optimizer.state_dict()
    if zero1:
        shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
        inner = sharded_state(inner, shapes, context.dp.rank, context.dp.degree)
    rank = f"tp_rank_{context.tp.rank:02d}_pp_rank_00"
    xser = form.endswith("xser")
    content = {"total_steps": 2, "names": ["a", None]}
    if form.startswith("trainer"):
        tag = Path(root) / "step_2"
        if context.dp.rank == 0:
            write(tag / "model" / f"dp_rank_00_{rank}.pt", model.state_dict(), xser)
        if context.dp.rank == 0 or zero1:
            write(tag / "optim" / f"dp_rank_{context.dp.rank:02d}_{rank}.pt", inner, xser)
        if context.rank == 0:
            write(tag / "user_content.pt", content, False)
            write(tag / "scheduler.pt", scheduler.state_dict(), False)
            (tag / "checkpoint").touch()
            (tag / "done").touch()
    elif context.dp.rank == 0:
        value = {"model": model.state_dict(), "optimizer": inner, **content}
        write(Path(root) / rank if xser else Path(root) / rank / "checkpoint.pt", value, xser)
    return go_on((model, optimizer))


def loaded(root: str, options: dict[str, Any], with_scheduler: bool) -> list[float]:
    parts = training(WIDE, seed=9, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(parts[1], 1, 0.5)
    assert has_checkpoint(root)
    found = load_checkpoint(root, None, *parts, scheduler if with_scheduler else None)
    assert found["total_steps"] == 2 and found["names"] == ["a", None]
    return go_on(parts)


@pytest.mark.parametrize("form", ["trainer", "trainer-xser", "layers", "layers-xser"])
def test_training_goes_on_at_any_degree(tmp_path: Path, form: str):
    """Written at tp 2, loaded at tp 2 and at tp 1, with the state of the optimizer: the same losses."""
    wanted, _ = run_ranks(written, 2, str(tmp_path), form, False, tp=2)
    scheduler = form.startswith("trainer")
    for losses in run_ranks(loaded, 2, str(tmp_path), {}, scheduler, tp=2):
        assert losses == pytest.approx(wanted, rel=1e-12)
    (losses,) = run_ranks(loaded, 1, str(tmp_path), {}, scheduler, tp=1)
    assert losses == pytest.approx(wanted, rel=1e-9)


def test_a_sharded_optimizer(tmp_path: Path):
    """``torch_xla``'s ZeRO-1 over two ranks, some parameters padded: loaded at dp 2 with and without it, at tp 2."""
    ranks = run_ranks(written, 2, str(tmp_path), "trainer", True, tp=1)
    for options in (ZERO1, {}):
        found = run_ranks(loaded, 2, str(tmp_path), options, True, tp=1)
        for losses, wanted in zip(found, ranks, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-9)
    mean = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    for losses in run_ranks(loaded, 2, str(tmp_path), {}, True, tp=2):
        assert losses == pytest.approx(mean, rel=1e-9)


def reference_of(root: Path, states: list[dict[str, Any]], tag: str = "a") -> Path:
    """A trainer's folder with the model's state of each tensor-parallel rank."""
    for rank, state in enumerate(states):
        write(root / tag / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", state, False)
    (root / tag / "checkpoint").touch()
    (root / tag / "done").touch()
    return root / tag


def test_a_mark_that_holds_a_text(tmp_path: Path):
    """It is no checksum of a manifest that is missing; a checksum is one."""
    whole, model = plain(), nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})
    folder = reference_of(tmp_path, [whole])
    (folder / "done").write_text("1")
    assert has_checkpoint(tmp_path)
    for tag in (None, "a"):
        load_checkpoint(tmp_path, tag, model)
        assert torch.equal(model["up"].weight, whole["up.weight"])
    (folder / "done").write_text(64 * "a")
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        load_checkpoint(tmp_path, model=model)


def plain(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"up.weight": torch.randn(4, 3), "up.bias": torch.randn(4), "down.weight": torch.randn(3, 4)}


def cut(whole: dict[str, Tensor], norm: Tensor) -> list[dict[str, Tensor]]:
    """Two ranks: the first matrix and its bias by rows, the second by columns, the norm on both."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    parts = [{name: value.chunk(2, dims[name])[rank].clone() for name, value in whole.items()} for rank in (0, 1)]
    return [{**part, "norm.weight": norm.clone()} for part in parts]


def test_offline_with_rules(tmp_path: Path, capsys, monkeypatch):
    """What the tensors show is used, what they do not is asked for; then it is a checkpoint like any other."""
    whole, norm = plain(), torch.rand(3)
    folder = reference_of(tmp_path / "theirs", cut(whole, norm))
    run = partial(nxd_infer_here, capsys, monkeypatch, "ckpt")
    shown = run("inspect", folder.parent)
    assert "written by neuronx_distributed, degrees tp 2" in shown.out and "[2, 3]" in shown.out
    refused = run("consolidate", folder.parent, "--out", tmp_path / "out")
    assert refused.status == 1 and "of 2 it cannot be seen: up.weight [2, 3], down.weight [3, 2]" in refused.err
    assert "--config" in refused.err and "--rules" in refused.err
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"down.*": 1, "*.weight": 0}))
    wrong = run("consolidate", folder.parent, "--out", tmp_path / "wrong", "--rules", rules)
    assert wrong.status == 0 and load_file(tmp_path / "wrong" / "model.safetensors")["norm.weight"].shape == (6,)
    rules.write_text(json.dumps({"norm.*": None, "down.*": 1, "*.weight": 0}))
    assert run("consolidate", folder.parent, "--out", tmp_path / "out", "--rules", rules).status == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in {**whole, "norm.weight": norm}.items())
    done = run("reshard", folder, tmp_path / "ours", "--tp", 4, "--rules", rules)
    assert done.status == 0, done.err
    assert run("diff", folder.parent, tmp_path / "ours", "--rules", rules).status == 0
    model = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False), "norm": nn.RMSNorm(3)})
    load_checkpoint(tmp_path / "ours", "a", model)
    assert torch.equal(model.state_dict()["down.weight"], whole["down.weight"])
    for text in ("[]", '{"a": "b"}', "{"):
        rules.write_text(text)
        assert run("consolidate", folder, "--out", tmp_path / "x", "--rules", rules).status == 1


def of_a_llama(root: str, directory: str) -> None:
    """This rank's part of a model directory's weights, as a job of the reference holds it: q, k and v one by one."""
    context = current_context()
    model = registry.load_model(directory, dtype=torch.float32)
    layouts = one_by_one(weight_layout(model))
    source = registry.weights(directory)
    names = set(source.keys())
    layouts = {name: layout for name, layout in layouts.items() if name in names}
    state = dict(iter_shards(layouts, source, context.tp.rank, context.tp.degree))
    write(Path(root) / f"tp_rank_{context.tp.rank:02d}_pp_rank_00" / "checkpoint.pt", {"model": state}, False)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_offline_with_a_configuration(tmp_path: Path, capsys, monkeypatch, family: str):
    """Cut for two ranks with a padded vocabulary, put together again: the very weights of the directory; and loaded."""
    directory = write_tiny(family, tmp_path / "model", vocab_size=289)
    theirs = tmp_path / "theirs"
    run_ranks(of_a_llama, 2, str(theirs), str(directory), tp=2)
    run = partial(nxd_infer_here, capsys, monkeypatch, "ckpt")
    assert "it cannot be seen: " in run("reshard", theirs, tmp_path / "ours", "--tp", 1).err
    done = run("export-hf", theirs, "--config", directory, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert run("reshard", theirs, tmp_path / "ours", "--tp", 3, "--config", directory).status == 0
    whole = load_file(directory / "model.safetensors")
    for found in (load_file(tmp_path / "out" / "model.safetensors"), merged(tmp_path / "ours", tmp_path / "one", run)):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], value) for name, value in whole.items())
    model = registry.build(directory, dtype=torch.float32)
    load_checkpoint(theirs, model=model)  # into fused projections
    wanted = registry.load_model(directory, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def merged(root: Path, out: Path, run: Any) -> dict[str, Tensor]:
    assert run("consolidate", root, "--out", out).status == 0
    return load_file(out / "model.safetensors")


def test_one_rank_needs_no_rules(tmp_path: Path, capsys, monkeypatch):
    folder = reference_of(tmp_path, [plain()])
    done = nxd_infer_here(capsys, monkeypatch, "ckpt", "consolidate", folder, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert f"wrote {tmp_path / 'out' / 'model.safetensors'}, " in done.out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in plain().items())


def test_the_newest_and_a_mixed_folder(tmp_path: Path):
    """The reference counts by the time of ``done``; a checkpoint of ours in the same folder is newer than all."""
    model = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})
    for number, tag in enumerate(("b", "a")):
        folder = reference_of(tmp_path, [plain(number)], tag)
        torch.save({"tag": tag}, folder / "user_content.pt")
        os.utime(folder / "done", (1000 + number, 1000 + number))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "checkpoint").touch()  # begun and never done
    assert load_checkpoint(tmp_path, model=model) == {"tag": "a"}
    assert load_checkpoint(tmp_path, "b", model=model) == {"tag": "b"}
    with pytest.raises(CheckpointError, match="no complete checkpoint with the tag 'c'"):
        load_checkpoint(tmp_path, "c", model=model)
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint; it is left alone"):
        save_checkpoint(tmp_path, "a", model)
    save_checkpoint(tmp_path, "ours", model, user_content=1)
    assert load_checkpoint(tmp_path, model=model) == 1 and load_checkpoint(tmp_path, "b") == {"tag": "b"}


def test_missing_double_and_foreign_files(tmp_path: Path):
    model = WIDE()
    whole = plain()
    folder = reference_of(tmp_path / "gap", cut(whole, torch.ones(3)))
    (folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the model of 1 rank.*dp_rank_00_tp_rank_00_pp_rank_00"):
        load_checkpoint(tmp_path / "gap", model=model)
    folder = reference_of(tmp_path / "double", [whole])
    write(folder / "model" / "tp_rank_00_pp_rank_00.pt", whole, False)
    with pytest.raises(CheckpointError, match="are of the same rank; keep one"):
        load_checkpoint(tmp_path / "double", model=model)
    write(tmp_path / "xser" / "tp_rank_00_pp_rank_00", {"model": whole}, True)
    (tmp_path / "xser" / "tp_rank_00_pp_rank_00").unlink()
    with pytest.raises(CheckpointError, match=r"tensors lacks the file tp_rank_00_pp_rank_00 beside it"):
        load_checkpoint(tmp_path / "xser", model=model)
    reference_of(tmp_path / "other", [whole])
    with pytest.raises(WeightMismatchError, match=r"missing: .*norm.weight.*; unexpected: down.weight \[3, 4\]"):
        load_checkpoint(tmp_path / "other", model=nn.Sequential(MLP()))
    with pytest.raises(WeightMismatchError, match=r"at 1 tensor-parallel rank\(s\) .* down.weight is \[3, 4\], wanted"):
        load_checkpoint(tmp_path / "other", model=model)
    reference_of(tmp_path / "evil", [{"weight": print}])
    with pytest.raises(CheckpointError, match="code in a checkpoint is never run"):
        load_checkpoint(tmp_path / "evil", model=model)
    folder = reference_of(tmp_path / "content", [whole])
    torch.save({"arguments": Path("x")}, folder / "user_content.pt")
    with pytest.raises(CheckpointError, match=r"user_content.pt was refused.*Move user_content.pt away to load"):
        load_checkpoint(tmp_path / "content")
    with pytest.raises(CheckpointError, match="holds no optimizer; it was saved without"):
        load_checkpoint(tmp_path / "other", optimizer=training(WIDE)[1])
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        load_checkpoint(tmp_path / "other", scheduler=object())
    with pytest.raises(CheckpointError, match="no position in the data"):
        load_checkpoint(tmp_path / "other", dataloader=ResumableLoader([1]))


def test_pipeline_stages_are_put_together(tmp_path: Path):
    """Two stages, one tensor of which both hold, and optimizers of another model (test_elsewhere reads right ones)."""
    whole = plain()
    stages = [{"up.weight": whole["up.weight"], "up.bias": whole["up.bias"]}, {**whole}]
    del stages[1]["up.weight"]
    for stage, state in enumerate(stages):
        name = f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt"
        write(tmp_path / "a" / "model" / name, state, False)
        write(tmp_path / "a" / "optim" / name, {"state": {}, "param_groups": [{"params": [0]}]}, False)
    (tmp_path / "a" / "checkpoint").touch()
    (tmp_path / "a" / "done").touch()
    model = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})
    load_checkpoint(tmp_path, model=model)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    with pytest.raises(WeightMismatchError, match=r"the optimizer's state is of 1 parameters, and this one has 2"):
        load_checkpoint(tmp_path, optimizer=training(WIDE)[1])
    (tmp_path / "a" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks the model of 1 rank\(s\): dp_rank_00_tp_rank_00_pp_rank_00"):
        load_checkpoint(tmp_path, model=model)


def test_heads_replicated_in_another_order(tmp_path: Path):
    """tp 4, two key/value heads: neighbours (0 0 1 1) are read, whole blocks (0 1 0 1) are refused."""
    model = MLP()  # 4 query and 2 key/value heads of 4 rows
    layouts = weight_layout(model)
    whole = MergedSource([model.state_dict()], layouts)
    ranks = [dict(iter_shards(layouts, whole, rank, 4)) for rank in range(4)]
    reference_of(tmp_path / "neighbours", ranks)
    other = MLP()
    load_checkpoint(tmp_path / "neighbours", model=other)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    for name in ("qkv.weight_qkv", "qkv.bias_qkv"):
        first, second = ranks[1][name].clone(), ranks[2][name].clone()
        ranks[1][name][4:], ranks[2][name][4:] = second[4:], first[4:]
    reference_of(tmp_path / "blocks", ranks)
    with pytest.raises(CheckpointError, match=r"same heads on ranks \[0, 1\], and they differ: .* in another order"):
        load_checkpoint(tmp_path / "blocks", model=other)
