"""parallel_layers.save and load: round trips on real ranks, the documented folders, and files that must be refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.checkpointing import load, save
from tests.support.ranks import RankTestError, run_ranks

ROOT = Path(__file__).parents[3]


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = ParallelEmbedding(12, 8)
        self.qkv = GQAQKVColumnParallelLinear(8, [8, 4], head_dim=2)
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.norm = nn.LayerNorm(8)
        self.tied = self.norm  # one module under two names

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x)
        return self.norm(self.down(self.up(x + q)) + k.sum(-1, keepdim=True) + v.mean())


def contents(model: Model, optimizer: torch.optim.Optimizer) -> dict:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "rates": (0.5, [1e-3, float("inf")], None, True),
        "names": {"a": "é", 3: torch.Size([2, 3]), "dtype": torch.bfloat16},
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2),
    }


def trained() -> tuple[Model, torch.optim.Optimizer]:
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(12).view(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def round_trip(folder: str, serially: bool, xser: bool, half: bool) -> dict:
    model, optimizer = trained()
    before = contents(model, optimizer)
    save(before, folder, save_serially=serially, save_xser=xser, down_cast_bf16=half)
    assert before["model"]["up.weight"].dtype == torch.float32
    assert len(before["model"]) == len(model.state_dict())
    other = Model(2)
    rest = load(folder, other, load_xser=xser)
    expected = {
        name: tensor.bfloat16().float() if half and tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert "model" not in rest
    assert rest["step"] == 7 and rest["rates"] == (0.5, [1e-3, float("inf")], None, True)
    assert rest["names"] == before["names"] and isinstance(rest["names"][3], torch.Size)
    assert rest["empty"].shape == (0, 4) and int(rest["scalar"]) == 2
    second = torch.optim.AdamW(other.parameters(), lr=0.5)
    left = load(folder, second, "optimizer", xser)  # model_key is the third argument, load_xser the fourth
    assert "model" in left and "optimizer" not in left
    assert second.param_groups[0]["lr"] == 0.1
    moments, kept = optimizer.state_dict()["state"], second.state_dict()["state"]
    for index, state in moments.items():
        moment = state["exp_avg"].bfloat16().float() if half else state["exp_avg"]
        assert torch.equal(kept[index]["exp_avg"], moment)
    assert load(folder, load_xser=xser)["model"].keys() == model.state_dict().keys()
    return {"files": sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())}


@pytest.mark.parametrize(
    ("serially", "xser", "half"), [(True, False, False), (False, True, False), (True, True, True), (False, False, True)]
)
def test_round_trip(tmp_path: Path, serially: bool, xser: bool, half: bool):
    """The second save replaces the first, and the folders are the documented ones."""
    for _ in range(2):
        run_ranks(round_trip, 2, str(tmp_path), serially, xser, half)
    ranks = [f"tp_rank_{rank:02d}_pp_rank_00" for rank in range(2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*ranks, *[f"{name}.tensors" for name in ranks]] if xser else ranks
    )
    for name in ranks:
        if xser:
            tensors = list((tmp_path / f"{name}.tensors").iterdir())
            assert all(p.name.startswith("tensor_") and p.suffix == ".safetensors" for p in tensors)
            assert len(tensors) == len({p.name.split(".")[0] for p in tensors})  # none of the first save is left
        else:
            assert [p.name for p in (tmp_path / name).iterdir()] == ["checkpoint.safetensors"]


def save_on_grid(folder: str) -> list[str]:
    context = current_context()
    save({"rank": (context.pp.rank, context.tp.rank), "dp": context.dp.rank}, folder)
    return sorted(p.name for p in Path(folder).iterdir())


def test_only_data_parallel_rank_zero_writes(tmp_path: Path):
    names = run_ranks(save_on_grid, 4, str(tmp_path), tp=1, pp=2)
    assert all(found == ["tp_rank_00_pp_rank_00", "tp_rank_00_pp_rank_01"] for found in names)
    loaded = run_ranks(load, 4, str(tmp_path), tp=1, pp=2)
    assert [value["rank"] for value in loaded] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert all(value["dp"] == 0 for value in loaded)


# --- one unsharded checkpoint onto sharded models ---------------------------------------------------------


def load_unsharded(path: str, strict: bool) -> tuple[dict, torch.Tensor]:
    model = Model(3)
    rest = load(path, model=model, sharded=False, strict=strict)
    return rest, model(torch.arange(12).view(3, 4)).detach()


@pytest.mark.parametrize("form", ["bare.pt", "with_key.pt", "model.safetensors", "."])
def test_unsharded(tmp_path: Path, form: str):
    """What a model of degree 1 saved loads at degree 2 and computes the same; the fused weight is one tensor there."""
    plain, _ = trained()
    expected = plain(torch.arange(12).view(3, 4)).detach()
    state = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    assert state["qkv.weight_qkv"].shape == (16, 8)
    path = tmp_path / form
    if form == "bare.pt":
        torch.save(state, path)
    elif form == "with_key.pt":
        torch.save({"model": state, "step": 3}, path)
    else:
        save_file(state, tmp_path / "model.safetensors")
    for rest, y in run_ranks(load_unsharded, 2, str(path), True):
        assert (y - expected).abs().max() < 1e-5
        assert rest == ({"step": 3} if form == "with_key.pt" else {})


def test_unsharded_of_another_model(tmp_path: Path):
    state = {name: tensor.clone() for name, tensor in Model(1).state_dict().items()}
    state["extra"] = torch.zeros(1)
    state["up.weight"] = torch.zeros(16, 7)
    del state["down.bias"]
    torch.save(state, tmp_path / "model.pt")
    before = Model(3)
    kept = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    with pytest.raises(WeightMismatchError) as caught:
        load(tmp_path / "model.pt", before, sharded=False)
    for text in ("extra", "up.weight", "down.bias"):
        assert text in str(caught.value)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in before.state_dict().items())
    with pytest.raises(CheckpointError, match="pass model="):
        load(tmp_path / "model.pt", sharded=False)


# --- what must be refused ----------------------------------------------------------------------------------


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
        load(tmp_path)
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
    with pytest.raises(CheckpointError, match="pass load_xser=False"):
        load(tmp_path / "a", load_xser=True)
    with pytest.raises(CheckpointError, match="pass load_xser=True"):
        load(tmp_path / "x")
    with pytest.raises(CheckpointError, match="saved without save_xser; save to another directory"):
        save({}, tmp_path / "a", save_xser=True)
    with pytest.raises(CheckpointError, match="saved with save_xser=True; save to another directory"):
        save({}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="it has 'model'"):
        load(tmp_path / "a", model, "weights")
    with pytest.raises(CheckpointError, match="no tp_rank_00_pp_rank_00"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="Missing key"):
        load(tmp_path / "a", nn.Sequential(nn.Linear(2, 2)))
    optimizers = [torch.optim.SGD([{"params": [p]} for p in params]) for params in (model.parameters(), [model.bias])]
    save({"model": optimizers[0].state_dict(), "step": 3}, tmp_path / "optimizer")
    for target, key in ((optimizers[1], "model"), (optimizers[1], "step"), (model, "step")):
        with pytest.raises(CheckpointError, match=f"does not fit the {type(target).__name__}: "):
            load(tmp_path / "optimizer", target, key)
    with pytest.raises(CheckpointError, match=r"\['hook'\] is a function, which a checkpoint cannot store"):
        save({"hook": test_round_trip}, tmp_path / "b")
    assert "model" in load(tmp_path / "a")  # still whole
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


def save_rank_part(folder: str) -> None:
    save({"model": {"w": torch.zeros(2)}}, folder)


def save_failing(folder: str) -> str:
    value = object() if current_context().rank == 1 else torch.ones(2)
    try:
        save({"model": {"w": value}}, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_degree_and_mixed_saves(tmp_path: Path):
    run_ranks(save_rank_part, 2, str(tmp_path))
    with pytest.raises(CheckpointError, match="saved by 2 tp ranks and is being loaded by 1"):
        load(tmp_path)
    first, second = run_ranks(save_failing, 2, str(tmp_path))
    assert "rank 1 could not save" in first and "which a checkpoint cannot store" in second
    # rank 0 has written, rank 1 has not: the two parts belong to two saves
    with pytest.raises(RankTestError, match="parts of two different saves"):
        run_ranks(load, 2, str(tmp_path))
    run_ranks(save_rank_part, 2, str(tmp_path))
    assert [sorted(value) for value in run_ranks(load, 2, str(tmp_path))] == [["model"], ["model"]]


INTERRUPTED = textwrap.dedent(
    """
    import os, signal, sys, torch
    from nxd_infer.parallel_layers.checkpointing import save
    folder, xser, moment = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
    fsync, replace = os.fsync, os.replace
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    def before_renaming(fd):
        fsync(fd)
        die()
    def after_renaming(source, target):
        replace(source, target)
        if not str(target).endswith("safetensors") or not xser:
            die()
    if moment == "before":
        os.fsync = before_renaming
    else:
        os.replace = after_renaming
    save({"model": {"w": torch.ones(4)}}, folder, save_xser=xser)
    """
)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("xser", [False, True])
def test_an_interrupted_save_leaves_a_whole_checkpoint(tmp_path: Path, xser: bool, moment: str):
    """SIGKILL while the second checkpoint is written: before the rename the old one stays, after it the new one is."""
    save({"model": {"w": torch.zeros(4)}}, tmp_path, save_xser=xser)
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(xser), moment]
    done = subprocess.run(command, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert load(tmp_path, load_xser=xser)["model"]["w"].eq(0.0 if moment == "before" else 1.0).all()
    if moment == "before":
        assert [p for p in tmp_path.rglob("*") if ".writing-" in p.name]
    save({"model": {"w": torch.full((4,), 2.0)}}, tmp_path, save_xser=xser)
    assert load(tmp_path, load_xser=xser)["model"]["w"].eq(2).all()
    assert not [p for p in tmp_path.rglob("*") if ".writing-" in p.name]
    tensors = tmp_path / "tp_rank_00_pp_rank_00.tensors"
    assert not xser or len(list(tensors.iterdir())) == 1


@pytest.mark.parametrize("xser", [False, True])
def test_a_place_that_cannot_be_written(tmp_path: Path, xser: bool):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the checkpoint could not be written: .*Not a directory"):
        save({"step": 1}, tmp_path / "file" / "below", save_xser=xser)
