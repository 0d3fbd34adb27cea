"""parallel_layers.save and load in one process: other packages' files, damage, and code that is never run."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.parallel_layers.checkpointing import load, save


def test_unsharded_of_another_model(tmp_path: Path):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {**kept, "extra": torch.zeros(1), "0.weight": torch.zeros(16, 7)}
    del state["1.bias"]
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(WeightMismatchError) as caught:
        load(tmp_path / "model.pt", model, sharded=False)
    for text in ("extra", "0.weight", "1.bias"):
        assert text in str(caught.value)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="pass model="):
        load(tmp_path / "model.pt", sharded=False)


class Payload:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path):
    proof = tmp_path / "executed"
    malicious = {"model": {"weight": torch.zeros(2)}, "payload": Payload(proof)}
    folder = tmp_path / "tp_rank_00_pp_rank_00"
    folder.mkdir()
    torch.save(malicious, folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="never run"):
        load(tmp_path, master_dp_only=True, weights_only=False)
    with pytest.raises(CheckpointError, match="master_dp_only=False: data-parallel ranks hold the same"):
        save({}, tmp_path, master_dp_only=False)
    (folder / "checkpoint.pt").rename(folder / "checkpoint.safetensors")  # a pickle in place of safetensors
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load(tmp_path)
    torch.save(malicious, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="never run"):
        load(tmp_path / "whole.pt", nn.Linear(1, 1), sharded=False)
    xser = tmp_path / "xser"
    xser.mkdir()
    torch.save(malicious, xser / "tp_rank_00_pp_rank_00")
    with pytest.raises(CheckpointError, match="never run"):
        load(xser, load_xser=True)
    assert not proof.exists()
    torch.load(tmp_path / "whole.pt", weights_only=False)
    assert proof.exists()  # the payload works; it was refused above


def test_the_references_files_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {"model": nn.Linear(3, 2).state_dict(), "epoch": 4, "list": [torch.ones(2), "text"]}
    folder = tmp_path / "plain" / "tp_rank_00_pp_rank_00"
    folder.mkdir(parents=True)
    torch.save(state, folder / "checkpoint.pt")
    loaded = load(tmp_path / "plain")
    assert loaded["epoch"] == 4 and torch.equal(loaded["model"]["weight"], state["model"]["weight"])

    # torch_xla's form: the pickle holds references, the tensors lie beside it
    module = types.ModuleType("torch_xla.utils.serialization")
    exec("class TensorReference:\n  def __init__(self, tid):\n    self.tid = tid", module.__dict__)
    module.TensorReference.__module__ = module.__name__
    path = tmp_path / "xser" / "tp_rank_00_pp_rank_00"
    (tensors := path.with_name(f"{path.name}.tensors")).mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
        patch.setitem(sys.modules, "torch_xla.utils", types.ModuleType("torch_xla.utils"))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save({"model": {"weight": module.TensorReference(0)}, "x": [module.TensorReference(1)]}, path)
    torch.save(state["model"]["weight"], tensors / "tensor_0.pt")
    torch.save(torch.ones(3), tensors / "tensor_1.pt")
    model = nn.Linear(3, 2, bias=False)
    rest = load(tmp_path / "xser", model, load_xser=True)
    assert torch.equal(model.weight, state["model"]["weight"]) and torch.equal(rest["x"][0], torch.ones(3))


def test_wrong_use_and_damage_are_named(tmp_path: Path):
    model = nn.Linear(2, 2)
    save({"model": model.state_dict()}, tmp_path / "a")
    save({"model": model.state_dict()}, tmp_path / "x", save_xser=True)
    a, x = tmp_path / "a", tmp_path / "x"
    for told, action in (
        ("saved without save_xser; save to another directory", lambda: save({}, a, save_xser=True)),
        ("saved with save_xser=True; save to another directory", lambda: save({}, x)),
        ("it has 'model'", lambda: load(a, model, "weights")),
        ("no tp_rank_00_pp_rank_00", lambda: load(tmp_path)),
        ("Missing key", lambda: load(a, nn.Sequential(nn.Linear(2, 2)))),
        (
            r"\['hook'\] is a function, which a checkpoint cannot store",
            lambda: save({"hook": save_file}, tmp_path / "b"),
        ),
    ):
        with pytest.raises(CheckpointError, match=told):
            action()
    optimizers = [torch.optim.SGD([{"params": [p]} for p in params]) for params in (model.parameters(), [model.bias])]
    save({"model": optimizers[0].state_dict(), "step": 3}, tmp_path / "optimizer")
    for target, key in ((optimizers[1], "model"), (optimizers[1], "step"), (model, "step")):
        with pytest.raises(CheckpointError, match=f"does not fit the {type(target).__name__}: "):
            load(tmp_path / "optimizer", target, key)
    assert "model" in load(a, load_xser=True) and "model" in load(x)  # still whole, whatever they are said to be
    file = tmp_path / "a" / "tp_rank_00_pp_rank_00" / "checkpoint.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path / "a")
    save_file({"0": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="not a checkpoint of this package"):
        load(tmp_path / "a")
    part = tmp_path / "x" / "tp_rank_00_pp_rank_00"
    renamed = part.read_text().replace('"degrees": {"tp"', '"degrees": {"tq"')
    for damaged in ("{", '{"format": "x", "version": 9, "facts": {}, "structure": 1}', renamed):
        part.write_text(damaged)
        with pytest.raises(CheckpointError):
            load(tmp_path / "x", load_xser=True)


def test_a_damaged_pickle_is_named(tmp_path: Path):
    """Whatever the damage makes of the unpickler: an empty stack, a bad index, an unknown code."""
    file = tmp_path / "weights.pt"
    for body in (b"\x80\x02.", b"\x80\x02a.", b"\x80\x02K\x01s.", b"\x80\x02h\x05.", b"\x80", b""):
        file.write_bytes(body)
        with pytest.raises(CheckpointError, match=r"weights\.pt was refused"):
            load(file, nn.Linear(2, 2), sharded=False)


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the checkpoint could not be written: .*Not a directory"):
        save({"step": 1}, tmp_path / "file" / "below")
