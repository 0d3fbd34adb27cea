"""Folders as the reference writes them: as the documents and ``torch_xla``'s ZeRO-1 optimizer describe them."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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


def reference_of(root: Path, states: list[dict[str, Any]], tag: str = "a") -> Path:
    """A trainer's folder with the model's state of each tensor-parallel rank."""
    for rank, state in enumerate(states):
        write(root / tag / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", state, False)
    (root / tag / "checkpoint").touch()
    (root / tag / "done").write_text("1")
    return root / tag


def plain(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"up.weight": torch.randn(4, 3), "up.bias": torch.randn(4), "down.weight": torch.randn(3, 4)}


def cut(whole: dict[str, Tensor], norm: Tensor) -> list[dict[str, Tensor]]:
    """Two ranks: the first matrix and its bias by rows, the second by columns, the norm on both."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    parts = [{name: value.chunk(2, dims[name])[rank].clone() for name, value in whole.items()} for rank in (0, 1)]
    return [{**part, "norm.weight": norm.clone()} for part in parts]
