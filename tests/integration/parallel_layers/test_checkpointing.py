"""parallel_layers.save and load on real ranks: round trips, the documented folders, saves that were interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.checkpointing import load, save
from tests.support.ranks import RankTestError, run_ranks


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
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


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
    assert rest["step"] == 7
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


@pytest.mark.parametrize(("serially", "xser", "half"), [(True, False, False), (False, True, True)])
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


def save_on_grid(folder: str) -> dict:
    context = current_context()
    save({"rank": (context.pp.rank, context.tp.rank), "dp": context.dp.rank}, folder)
    return load(folder)


def test_only_data_parallel_rank_zero_writes(tmp_path: Path):
    loaded = run_ranks(save_on_grid, 4, str(tmp_path), tp=1, pp=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tp_rank_00_pp_rank_00", "tp_rank_00_pp_rank_01"]
    assert [value["rank"] for value in loaded] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert all(value["dp"] == 0 for value in loaded)


FORMS = ["bare.pt", "with_key.pt", "model.safetensors", "."]


def load_unsharded(folder: str) -> list[tuple[dict, torch.Tensor]]:
    found = []
    for form in FORMS:
        model = Model(3)
        rest = load(f"{folder}/{form}", model=model, sharded=False, strict=True)
        found.append((rest, model(torch.arange(12).view(3, 4)).detach()))
    return found


def test_unsharded(tmp_path: Path):
    """What a model of degree 1 saved loads at degree 2 and computes the same; the fused weight is one tensor there."""
    plain, _ = trained()
    expected = plain(torch.arange(12).view(3, 4)).detach()
    state = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    assert state["qkv.weight_qkv"].shape == (16, 8)
    torch.save(state, tmp_path / "bare.pt")
    torch.save({"model": state, "step": 3}, tmp_path / "with_key.pt")
    save_file(state, tmp_path / "model.safetensors")
    for found in run_ranks(load_unsharded, 2, str(tmp_path)):
        for form, (rest, y) in zip(FORMS, found, strict=True):
            assert (y - expected).abs().max() < 1e-5
            assert rest == ({"step": 3} if form == "with_key.pt" else {})


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
    assert "another rank could not" in first and "which a checkpoint cannot store" in second
    # rank 0 has written, rank 1 has not: the two parts belong to two saves
    with pytest.raises(RankTestError, match="parts of two different saves"):
        run_ranks(load, 2, str(tmp_path))
    run_ranks(save_rank_part, 2, str(tmp_path))
    assert [sorted(value) for value in run_ranks(load, 2, str(tmp_path))] == [["model"], ["model"]]


def interrupted(folder: str, xser: bool, moment: str) -> int:
    """How a copy of this process ends that is killed while it saves."""
    fsync, replace = os.fsync, os.replace

    def before_renaming(fd: int) -> None:
        fsync(fd)
        os.kill(os.getpid(), signal.SIGKILL)

    def after_renaming(source: str, target: str) -> None:
        replace(source, target)
        if not str(target).endswith("safetensors") or not xser:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        if moment == "before":
            os.fsync = before_renaming
        else:
            os.replace = after_renaming  # pyright: ignore[reportAttributeAccessIssue]
        save({"model": {"w": torch.ones(4)}}, folder, save_xser=xser)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("xser", "moment"), [(False, "after"), (True, "before"), (True, "after")])
def test_an_interrupted_save_leaves_a_whole_checkpoint(tmp_path: Path, xser: bool, moment: str):
    """SIGKILL while the second checkpoint is written: before the rename the old one stays, after it the new one is."""
    save({"model": {"w": torch.zeros(4)}}, tmp_path, save_xser=xser)
    assert run_ranks(interrupted, 1, str(tmp_path), xser, moment) == [-signal.SIGKILL]
    assert load(tmp_path, load_xser=xser)["model"]["w"].eq(0.0 if moment == "before" else 1.0).all()
    if moment == "before":
        assert [p for p in tmp_path.rglob("*") if ".writing-" in p.name]
    save({"model": {"w": torch.full((4,), 2.0)}}, tmp_path, save_xser=xser)
    assert load(tmp_path, load_xser=xser)["model"]["w"].eq(2).all()
    assert not [p for p in tmp_path.rglob("*") if ".writing-" in p.name]
    tensors = tmp_path / "tp_rank_00_pp_rank_00.tensors"
    assert not xser or len(list(tensors.iterdir())) == 1
