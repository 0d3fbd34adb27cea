"""Folders of the reference that are damaged, or made to hurt whoever reads them: each is a CheckpointError, at once."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_infer.checkpoint.neuronx.archive import open_reference
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.pickles import read_pickle, read_reference_xser
from tests.support.checkpoint.reference import TensorReference, write


def cyclic(depth: int = 1) -> list[Any]:
    outer: list[Any] = []
    inner = outer
    for _ in range(depth - 1):
        inner.append([])
        inner = inner[0]
    inner.append(outer)
    return outer


def doubled(levels: int) -> Any:
    """2^levels leaves, and as many objects as levels."""
    value: Any = [torch.ones(1)]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("tid", ["../../x", -1, True, 1 << 40, {}], ids=repr)
def test_a_tensor_of_no_number(tmp_path: Path, tid: Any):
    path = tmp_path / "tp_rank_00_pp_rank_00"
    write(path, {"model": {"w": TensorReference(tid)}}, True)
    with pytest.raises(CheckpointError, match="refers to the tensor"):
        read_reference_xser(path)


def test_cycles_and_what_stands_in_many_places(tmp_path: Path):
    """A list that holds itself has no end, and one that holds one twice, that holds one twice, ends too late."""
    for depth in (1, 3):
        torch.save({"model": cyclic(depth)}, tmp_path / "cyclic")
        with pytest.raises(CheckpointError, match="contains itself"):
            read_reference_xser(tmp_path / "cyclic")
    torch.save(doubled(60), tmp_path / "doubled")
    value = read_reference_xser(tmp_path / "doubled")
    assert value[0] is value[1]


def test_a_file_that_unpacks_to_more_than_it_is(tmp_path: Path):
    """Compressed, or the same bytes under several names."""
    torch.save({"model": torch.zeros(100_000)}, tmp_path / "plain")
    read_pickle(tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(tmp_path / "small", "w", 8) as small:
        for part in plain.infolist():
            small.writestr(part.filename, plain.read(part))
    shutil.copy(tmp_path / "plain", tmp_path / "several")
    with zipfile.ZipFile(tmp_path / "several", "a") as several:
        several.filelist += [several.getinfo("plain/data/0")] * 3
        several._didModify = True
    for name in ("small", "several"):
        with pytest.raises(CheckpointError, match=r"its parts have \d+ bytes and the file \d+: it is compressed"):
            read_pickle(tmp_path / name)


def test_a_rank_of_any_number(tmp_path: Path):
    """The count of ranks comes from a file's name, so no code may loop over all of them."""
    for name in ("tp_rank_00_pp_rank_00", f"tp_rank_{10**17}_pp_rank_{10**17}"):
        (tmp_path / "a" / name).mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a" / name / "checkpoint.pt")
    with pytest.raises(CheckpointError, match=r"lacks the model of \d{30,} rank.*pp_rank_08; restore"):
        open_reference(tmp_path / "a", None)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {0: {"m": torch.ones(1)}}},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [7]},
        {"base_state": {0: {5: torch.ones(1)}}, "param_groups": [{"params": [0]}]},
        {"base_state": {}, "sharded_master_weights": {0: "x"}, "param_groups": [{"params": [0]}]},
    ],
    ids=str,
)
def test_an_optimizer_that_is_none(tmp_path: Path, optimizer: dict[str, Any]):
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": optimizer}, _place(tmp_path))
    archive = open_reference(tmp_path / "a", None)
    archive.know({}, ["w"])
    with pytest.raises(CheckpointError, match="the optimizer's '"):
        list(archive.parts("optimizer"))
    with pytest.raises(CheckpointError, match="the optimizer's '"):
        archive.pieces("optimizer")


def test_a_tensor_whose_name_is_no_text(tmp_path: Path):
    torch.save({"model": {7: torch.ones(1), "w": torch.ones(1)}}, _place(tmp_path))
    archive = open_reference(tmp_path / "a", None)
    archive.know({})
    with pytest.raises(CheckpointError, match="named 7, which is not text"):
        archive.pieces("model")


def _place(root: Path) -> Path:
    folder = root / "a" / "tp_rank_00_pp_rank_00"
    folder.mkdir(parents=True)
    return folder / "checkpoint.pt"
