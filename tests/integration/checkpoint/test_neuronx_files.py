"""Folders that the reference wrote on ranks: loaded at the same and at other degrees, and with a configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint
from nxd_infer.checkpoint.neuronx.archive import one_by_one
from nxd_infer.context import current_context
from nxd_infer.layout import iter_shards, weight_layout
from nxd_models import registry
from tests.support.checkpoint.reference import write
from tests.support.e2e.command import here
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny
from tests.support.trainer.jobs import ZERO1, mine, train, training
from tests.support.trainer.models import MLP, vectors

WIDE = partial(MLP, torch.float64)
BATCH = vectors(torch.float64)


def sharded_state(state: dict[str, Any], shapes: list[torch.Size], rank: int, ranks: int) -> dict[str, Any]:
    """``torch_xla``'s ZeRO-1 state: each tensor padded along its first dimension, one of equal parts of it."""

    def part(value: Any, shape: torch.Size) -> Any:
        if not isinstance(value, Tensor) or value.shape != shape:
            return value
        filling = -shape[0] % ranks
        return F.pad(value, [0, 0] * (value.dim() - 1) + [0, filling]).chunk(ranks)[rank].clone()

    base = {i: {key: part(v, shapes[i]) for key, v in entry.items()} for i, entry in state["state"].items()}
    return {"state": {}, "param_groups": state["param_groups"], "base_state": base}


def written(root: str, form: str, zero1: bool) -> list[float]:
    """Train, write what the reference would have written, and go on."""
    context = current_context()
    model, optimizer = training(WIDE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, mine(BATCH), 2)
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
    return train(model, optimizer, mine(BATCH), 3)


def loaded(root: str, options: dict[str, Any], with_scheduler: bool) -> list[float]:
    parts = training(WIDE, seed=9, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(parts[1], 1, 0.5)
    assert has_checkpoint(root)
    found = load_checkpoint(root, None, *parts, scheduler if with_scheduler else None)
    assert found["total_steps"] == 2 and found["names"] == ["a", None]
    return train(*parts, mine(BATCH), 3)


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["trainer-xser", "layers"])
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


def test_offline_with_a_configuration(tmp_path: Path):
    """Cut for two ranks with a padded vocabulary, put together again: the very weights of the directory; and loaded."""
    directory = write_tiny("qwen2", tmp_path / "model", vocab_size=289)
    theirs = tmp_path / "theirs"
    run_ranks(of_a_llama, 2, str(theirs), str(directory), tp=2)
    run = partial(here, "ckpt")
    assert "it cannot be seen: " in run("reshard", theirs, tmp_path / "ours", "--tp", 1).err
    (theirs / "config.json").write_bytes((directory / "config.json").read_bytes())
    assert run("diff", theirs, theirs, "--weights-only").status == 0, "the configuration is found in the folder"
    (theirs / "config.json").unlink()
    done = run("export-hf", theirs, "--config", directory, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert run("reshard", theirs, tmp_path / "ours", "--tp", 3, "--config", directory).status == 0
    whole = load_file(directory / "model.safetensors")
    assert run("consolidate", tmp_path / "ours", "--out", tmp_path / "one").status == 0
    for found in (load_file(tmp_path / name / "model.safetensors") for name in ("out", "one")):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], value) for name, value in whole.items())
    model = registry.build(directory, dtype=torch.float32)
    load_checkpoint(theirs, model=model)  # into fused projections
    wanted = registry.load_model(directory, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
