"""What the files of a reference checkpoint show of the layouts, and what they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_infer.checkpoint.neuronx.archive import open_reference
from nxd_infer.checkpoint.neuronx.layouts import infer_layouts
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import AxisPlan, ParamLayout


def archive(root: Path, *ranks: dict[str, Tensor]):
    for tp, state in enumerate(ranks):
        folder = root / f"tp_rank_{tp:02d}_pp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"model": state}, folder / "checkpoint.pt")
    return open_reference(root, None)


def shapes(layouts: dict[str, ParamLayout]) -> dict[str, list[int]]:
    return {name: list(layout.rank_shape(1)) for name, layout in layouts.items()}


def two(shape: tuple[int, ...], value: float | None = None) -> tuple[Tensor, Tensor]:
    """Two ranks' tensors: constant, or of different numbers."""
    if value is not None:
        return torch.full(shape, value), torch.full(shape, value)
    return torch.randn(shape), torch.randn(shape)


def ranks_of(**pairs: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    named = {name.replace("__", "."): pair for name, pair in pairs.items()}
    return [{name: pair[rank] for name, pair in named.items()} for rank in range(2)]


def test_untouched_biases_follow_their_weights(tmp_path: Path):
    """A bias of zeros is the same on all ranks, whether each has all of it or a part."""
    ranks = ranks_of(q__weight=two((4, 8)), q__bias=two((4,), 0.0), o__weight=two((8, 4)), o__bias=two((8,), 0.0))
    found = archive(tmp_path, *ranks)
    layouts = infer_layouts(found, {"q.weight": 0, "o.weight": 1})
    assert shapes(layouts) == {"q.weight": [8, 8], "q.bias": [8], "o.weight": [8, 8], "o.bias": [8]}
    assert shapes(infer_layouts(found, {"q.weight": -2, "o.weight": -1})) == shapes(layouts)
    known = {"q.weight": ParamLayout.of([AxisPlan.even(8), 8], "q.weight")}
    layouts = infer_layouts(found, {"o.weight": 1}, known)
    assert shapes(layouts) == {"q.bias": [8], "o.weight": [8, 8], "o.bias": [8]}
    assert shapes(infer_layouts(found, {"*.bias": None, "q.weight": 0, "o.weight": 1}))["q.bias"] == [4]


def test_constants_whose_layout_nothing_says_are_refused(tmp_path: Path):
    ranks = ranks_of(q__bias=two((4,), 0.0), gate=two((4,), 1.0), scale=two((2, 3), 1.0), table=two((1,), 3.0))
    ranks = [{**rank, "q_norm.weight": torch.ones(4)} for rank in ranks]
    wanted = r"q.bias \[4\], gate \[4\], scale \[2, 3\], table \[1\], q_norm.weight \[4\]"
    with pytest.raises(CheckpointError, match=wanted) as raised:
        infer_layouts(archive(tmp_path, *ranks))
    assert "--rules" in str(raised.value) and "one number" in str(raised.value)


def test_what_the_tensors_show(tmp_path: Path):
    same = torch.randn(5)
    number = torch.tensor(3)
    ranks = ranks_of(
        input_layernorm__weight=two((4,), 1.0),
        ln_f__bias=two((4,), 0.0),
        frequencies=(same, same.clone()),
        up__bias=two((6,)),
        count=(number, number.clone()),
    )
    wanted = {"input_layernorm.weight": [4], "ln_f.bias": [4], "frequencies": [5], "up.bias": [12], "count": []}
    assert shapes(infer_layouts(archive(tmp_path / "two", *ranks))) == wanted
    alone = archive(tmp_path / "one", {"q.bias": torch.zeros(4)})
    assert shapes(infer_layouts(alone)) == {"q.bias": [4]}
