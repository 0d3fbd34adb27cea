"""Files of ``torch.save``, and of neuronx_distributed's ``save_xser``: read without the right to run code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.util.devices import HOST
from nxd_infer.util.reading import MOST_LEVELS


def tensors_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.tensors")


class _TensorReference:
    """Stands for torch_xla's class of that name: the number of a tensor in the folder beside the file."""

    tid: int


def is_pickle(path: Path) -> bool:
    """Whether it is a file of ``torch.save``."""
    with open(path, "rb") as file:
        start = file.read(2)
    return start[:1] == b"\x80" or start == b"PK"


def read_pickle(path: Path, mapped: bool = False) -> Any:
    """A file of ``torch.save``, tensors and plain values only.

    ``mapped`` leaves the tensors in the file until they are read, where its form allows that.
    Raises CheckpointError for anything else, naming what it would have called; none of it is run.
    """
    stand_in: Any = (_TensorReference, "torch_xla.utils.serialization.TensorReference")
    try:
        with torch.serialization.safe_globals([stand_in]):
            return torch.load(path, map_location=HOST, weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # whatever a damaged file makes of the unpickler
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} was refused: it is damaged, or holds more than tensors and plain values, and code in a "
            f"checkpoint is never run ({' '.join(reason[:6])[:600]})"
        ) from error


def read_reference_xser(path: Path, mapped: bool = False) -> Any:
    """The reference's ``save_xser`` form: a pickle at ``path`` whose tensors are ``<path>.tensors/tensor_<i>.pt``.

    What stands in several places is visited, and a tensor read, once. Raises CheckpointError.
    """
    folder, root = tensors_folder(path), read_pickle(path)
    tensors: dict[int, Tensor] = {}
    visited: dict[int, Any] = {}
    """What became of the containers, by ``id``; ``root`` keeps them."""

    def tensor(reference: _TensorReference) -> Tensor:
        number = getattr(reference, "tid", None)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 31:
            raise CheckpointError(f"{path} refers to the tensor {number!r:.80}, and they are numbered from 0 on")
        if number not in tensors:
            loaded = read_pickle(folder / f"tensor_{number}.pt", mapped)
            if not isinstance(loaded, Tensor):
                raise CheckpointError(f"{folder / f'tensor_{number}.pt'} holds {type(loaded).__name__}, not a tensor")
            tensors[number] = loaded
        return tensors[number]

    def visit(item: Any, level: int) -> Any:
        if isinstance(item, _TensorReference):
            return tensor(item)
        if not isinstance(item, dict | list | tuple):
            return item
        if id(item) not in visited:
            if level == MOST_LEVELS:
                raise CheckpointError(f"{path} is nested more than {MOST_LEVELS} levels deep, or contains itself")
            if isinstance(item, dict):
                visited[id(item)] = {key: visit(value, level + 1) for key, value in item.items()}
            else:
                visited[id(item)] = type(item)([visit(value, level + 1) for value in item])
        return visited[id(item)]

    return visit(root, 0)
