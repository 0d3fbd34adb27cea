"""The checkpoint of one rank: nested values with tensors, in one file, or in JSON and a file for each tensor.

Its structure is JSON, in which a tensor is a number (:mod:`~nxd_infer.layout.files.values`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import TEMPORARY, replacing
from nxd_infer.layout.files.pickles import tensors_folder
from nxd_infer.layout.files.unpack import unpack
from nxd_infer.layout.sources import DTYPES, open_safetensors
from nxd_infer.util.reading import parse_json

FORMAT = "nxd_infer.checkpoint"
VERSION = 1
_KEY = "nxd_infer"


def require_sliceable(dtype: torch.dtype, what: str) -> None:
    """Raise CheckpointError for a type that could be written, and not be read in slices."""
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"{what} is a tensor of {dtype}, which a checkpoint does not hold; convert it (a complex one with "
            "torch.view_as_real, an unsigned one to int64)"
        )


def storable(tensors: Mapping[str, Tensor], copy: bool = False) -> dict[str, Tensor]:
    """On the CPU, dense, no two of them in one memory, and with ``copy`` in no memory of the caller's.

    Raises CheckpointError for a type that a checkpoint does not hold.
    """
    out: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        require_sliceable(tensor.dtype, repr(name))
        stored = tensor.detach().cpu().contiguous()
        memory = stored.untyped_storage()
        mine = tensor.untyped_storage().data_ptr() != memory.data_ptr()
        if memory.data_ptr() in used or memory.nbytes() != stored.nbytes or (copy and not mine):
            stored = stored.clone()
        used.add(stored.untyped_storage().data_ptr())
        out[name] = stored
    return out


def remove_leftovers(folder: Path, keep: set[str] | None = None) -> None:
    """Remove what an interrupted save left, and with ``keep`` every tensor file that is not named in it."""
    for file in folder.iterdir():
        unused = keep is not None and file.suffix == ".safetensors" and file.name not in keep
        if TEMPORARY in file.name or unused:
            file.unlink(missing_ok=True)


def write_one_file(path: Path, structure: Any, tensors: list[Tensor], facts: Mapping[str, Any]) -> None:
    """A checkpoint as one safetensors file with its structure in the header."""
    stored = storable({str(i): tensor for i, tensor in enumerate(tensors)})
    with replacing(path) as temporary:
        save_file(stored, temporary, metadata={_KEY: _record(structure, facts)})
    remove_leftovers(path.parent)


def read_one_file(path: Path) -> tuple[Any, dict[str, Any]]:
    """``(value, facts)`` of :func:`write_one_file`."""
    with open_safetensors(path) as file:
        record = _parsed((file.metadata() or {}).get(_KEY, ""), path)
        return unpack(record["structure"], lambda number: _read_tensor(file, str(number), path)), record["facts"]


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint of either kind, without its tensors."""
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            return _parsed((file.metadata() or {}).get(_KEY, ""), path)["facts"]
    return _parsed(_text(path), path)["facts"]


def write_many_files(path: Path, structure: Any, tensors: list[Tensor], facts: Mapping[str, Any]) -> None:
    """A checkpoint as a reference file at ``path`` and one file a tensor in the folder ``<path>.tensors``.

    Tensors are written one by one under new names, then the reference file, then the old tensors are removed.
    """
    folder = tensors_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    save = secrets.token_hex(4)
    names = [f"tensor_{i}.{save}.safetensors" for i in range(len(tensors))]
    try:
        for name, tensor in zip(names, tensors, strict=True):
            with replacing(folder / name) as temporary:
                save_file(storable({"tensor": tensor}), temporary)
        with replacing(path) as temporary:
            temporary.write_text(_record(structure, dict(facts) | {"tensors": names}), encoding="utf-8")
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        raise
    remove_leftovers(folder, set(names))


def read_many_files(path: Path) -> tuple[Any, dict[str, Any]]:
    """``(value, facts)`` of :func:`write_many_files`."""
    record = _parsed(_text(path), path)
    folder, names = tensors_folder(path), record["facts"].get("tensors", [])

    def tensor(number: int) -> Tensor:
        if not 0 <= number < len(names) or Path(str(names[number])).name != names[number]:
            raise CheckpointError(f"{path} names no file for tensor {number}")
        with open_safetensors(folder / names[number]) as file:
            return _read_tensor(file, "tensor", folder / names[number])

    return unpack(record["structure"], tensor), record["facts"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not the reference file of a checkpoint: {error}") from error


def _read_tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} has no tensor {name!r}: {error}") from error


def _record(structure: Any, facts: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, "facts": dict(facts), "structure": structure})


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        record = parse_json(text)
        found = (record["format"], record["version"])
        known = isinstance(record["facts"], dict) and "structure" in record
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this package: {error}") from error
    if found != (FORMAT, VERSION) or not known:
        raise CheckpointError(f"{path} is a checkpoint of format {found}; this release reads {(FORMAT, VERSION)}")
    return record
