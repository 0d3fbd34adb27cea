"""Folders that the reference wrote, read without ranks, or made to hurt whoever reads them; what their files show."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import MergedSource, iter_shards, weight_layout
from nxd_infer.layout.files.pickles import read_reference_xser
from nxd_infer.trainer import ResumableLoader
from tests.support.checkpoint.reference import TensorReference, cut, plain, reference_of, write
from tests.support.e2e.command import here
from tests.support.trainer.jobs import training
from tests.support.trainer.models import MLP

WIDE = partial(MLP, torch.float64)


def test_offline_with_rules(tmp_path: Path):
    """What the tensors show is used, what they do not is asked for; then it is a checkpoint like any other."""
    whole, norm = plain(), torch.rand(3)
    folder = reference_of(tmp_path / "theirs", cut(whole, norm))
    run = partial(here, "ckpt")
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
    for text in ("[]", '{"a": "b"}', "{", '{"*": [0, 0]}', '{"*": [0, "2"]}', '{"*": 2}'):  # no such dimension
        rules.write_text(text)
        assert run("consolidate", folder, "--out", tmp_path / "x", "--rules", rules).status == 1


def test_rules_with_a_stride(tmp_path: Path):
    """A weight that is two, of each of which a rank has its part."""
    gate_up = torch.randn(8, 3)
    gate, up = gate_up.chunk(2)
    states = [{"gate_up_proj.weight": torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])} for rank in (0, 1)]
    folder = reference_of(tmp_path, states)
    (tmp_path / "rules.json").write_text(json.dumps({"*gate_up_proj.weight": [0, 2]}))
    assert here("ckpt", "consolidate", folder, "--out", tmp_path / "x", "--rules", tmp_path / "rules.json").status == 0
    assert torch.equal(load_file(tmp_path / "x/model.safetensors")["gate_up_proj.weight"], gate_up)


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


def archive(root: Path, *ranks: dict[Any, Tensor], **more: Any) -> ReferenceArchive:
    for tp, state in enumerate(ranks):
        folder = root / f"tp_rank_{tp:02d}_pp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"model": state, **more}, folder / "checkpoint.pt")
    return ReferenceArchive(root)


@pytest.mark.parametrize("tid", ["../../x", -1, True, 1 << 40, {}], ids=repr)
def test_a_tensor_of_no_number(tmp_path: Path, tid: Any):
    path = tmp_path / "tp_rank_00_pp_rank_00"
    write(path, {"model": {"w": TensorReference(tid)}}, True)
    with pytest.raises(CheckpointError, match="refers to the tensor"):
        read_reference_xser(path)


def test_cycles_and_what_stands_in_many_places(tmp_path: Path):
    """A list that holds itself has no end, and one that holds one twice, that holds one twice, ends too late."""
    alone: list[Any] = []
    alone.append(alone)
    nested: list[Any] = [[]]
    nested[0].append(nested)
    for value in (alone, nested):
        torch.save({"model": value}, tmp_path / "cyclic")
        with pytest.raises(CheckpointError, match="contains itself"):
            read_reference_xser(tmp_path / "cyclic")
    doubled: Any = [torch.ones(1)]
    for _ in range(60):
        doubled = [doubled, doubled]
    torch.save(doubled, tmp_path / "doubled")
    value = read_reference_xser(tmp_path / "doubled")
    assert value[0] is value[1]


def test_an_optimizer_that_is_none(tmp_path: Path):
    loaded = archive(tmp_path, {"w": torch.ones(1)}, optimizer={"state": {0: 3}, "param_groups": [{"params": [0]}]})
    loaded.know({}, ["w"])
    for read in (loaded.parts, loaded.pieces):
        with pytest.raises(CheckpointError, match="the optimizer's state must have 'param_groups'"):
            list(read("optimizer"))
