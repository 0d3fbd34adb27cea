"""The checkpoint of one rank: nested values with tensors, in one file, or in JSON and a file for each tensor.

Its structure is JSON, in which a tensor is a number (:mod:`~nxd_infer.layout.files.values`). Those of the reference are
read, too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import TEMPORARY, replacing
from nxd_infer.layout.files.pickles import is_pickle, read_pickle, read_reference_xser, tensors_folder
from nxd_infer.layout.files.values import require_storable, unpack
from nxd_infer.layout.sources import SafetensorsSource, open_safetensors
from nxd_infer.util.devices import on_host
from nxd_infer.util.reading import parse_json

CHECKPOINT, REFERENCE_CHECKPOINT = "checkpoint.safetensors", "checkpoint.pt"
FORMAT = "nxd_infer.checkpoint"
VERSION = 1
_KEY = "nxd_infer"


def storable(tensors: Mapping[str, Tensor], copy: bool = False) -> dict[str, Tensor]:
    """On the CPU, dense, no two of them in one memory, and with ``copy`` in no memory of the caller's.

    Raises CheckpointError for a type that a checkpoint does not hold.
    """
    out: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        require_storable(tensor.dtype, repr(name))
        stored = tensor.detach().cpu().contiguous()
        memory = stored.untyped_storage()
        copied = not on_host(tensor) or tensor.untyped_storage().data_ptr() != memory.data_ptr()
        if memory.data_ptr() in used or memory.nbytes() != stored.nbytes or (copy and not copied):
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


def write_one_file(path: Path, structure: Any, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """A checkpoint as one safetensors file with its structure in the header."""
    with replacing(path) as temporary:
        save_file(storable(tensors), temporary, metadata={_KEY: _record(structure, facts)})
    remove_leftovers(path.parent)


def write_many_files(path: Path, structure: Any, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """A checkpoint as a reference file at ``path`` and one file a tensor in the folder ``<path>.tensors``.

    Tensors are written one by one under new names, then the reference file, then the old tensors are removed.
    """
    folder = tensors_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    save = secrets.token_hex(4)
    names = [f"tensor_{number}.{save}.safetensors" for number in tensors]
    try:
        for name, tensor in zip(names, tensors.values(), strict=True):
            with replacing(folder / name) as temporary:
                save_file(storable({"tensor": tensor}), temporary)
        with replacing(path) as temporary:
            temporary.write_text(_record(structure, dict(facts) | {"tensors": names}), encoding="utf-8")
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        raise
    remove_leftovers(folder, set(names))


def read_rank(path: Path, mapped: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return ``(value, facts)`` of one rank's file or folder, in either form, ours or the reference's (no facts).

    ``mapped``: as for :func:`read_pickle`. Raises CheckpointError for a file that is missing or damaged.
    """
    if path.is_dir():
        ours, reference = path / CHECKPOINT, path / REFERENCE_CHECKPOINT
        if ours.is_file() and reference.is_file():
            raise CheckpointError(f"{path} has both {ours.name} and {reference.name}; keep one")
        if not ours.is_file():
            return read_pickle(reference, mapped), {}
        record, whole = _recorded(ours), SafetensorsSource(ours)
        return unpack(record["structure"], whole.read), record["facts"]
    if is_pickle(path):
        return (read_reference_xser if tensors_folder(path).is_dir() else read_pickle)(path, mapped), {}
    record = _recorded(path)
    names = record["facts"].get("tensors", [])

    def tensor(number: str) -> Tensor:
        name = names[int(number)]
        if Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r:.80}, which would lie outside of its folder")
        return SafetensorsSource(tensors_folder(path) / name).read("tensor")

    return unpack(record["structure"], tensor), record["facts"]


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a rank's file or folder of ours, without its tensors; {} if there is none."""
    file = path / CHECKPOINT if path.is_dir() else path
    return _recorded(file)["facts"] if file.is_file() else {}


def _recorded(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            with open_safetensors(path) as file:
                text = (file.metadata() or {}).get(_KEY, "")
        else:
            text = path.read_text(encoding="utf-8")
        record = parse_json(text)
        kind = (record["format"], record["version"])
        known = isinstance(record["facts"], dict) and "structure" in record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this package: {error}") from error
    if kind != (FORMAT, VERSION) or not known:
        raise CheckpointError(f"{path} is a checkpoint of format {kind}; this release reads {(FORMAT, VERSION)}")
    return record


def _record(structure: Any, facts: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, "facts": dict(facts), "structure": structure})
