"""The files of a checkpoint: nested values with tensors, as safetensors and JSON, written all or nothing.

Its structure is JSON, in which a tensor is a number (:mod:`~nxd_infer.layout.files.values`); the tensors
are safetensors. Nothing here is ever unpickled with the right to run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.unpack import unpack
from nxd_infer.layout.sources import DTYPES, open_safetensors
from nxd_infer.util.devices import HOST
from nxd_infer.util.reading import MOST_LEVELS, sha256_and_size, unique_keys

FORMAT = "nxd_infer.checkpoint"
VERSION = 1
_KEY = "nxd_infer"
_TEMPORARY = ".writing-"
REMOVING = ".removing-"
"""Begins the name of a folder that is being removed."""


def require_sliceable(dtype: torch.dtype, what: str) -> None:
    """Raise CheckpointError for a type that could be written, and not be read in slices."""
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"{what} is a tensor of {dtype}, which a checkpoint does not hold; convert it (a complex one with "
            "torch.view_as_real, an unsigned one to int64)"
        )


# --- files -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; synced and renamed to ``path`` at the end, removed on failure.

    Whoever reads ``path`` sees the old file or the new one, whole.
    """
    temporary = path.with_name(f"{path.name}{_TEMPORARY}{secrets.token_hex(4)}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_of(path: str | os.PathLike[str], progress: Callable[[int], object] | None = None) -> str:
    """The checksum of a file, read once from front to back; without the GIL, so beside other work.

    ``progress`` is called with the bytes of each part.
    """
    with open(path, "rb", buffering=0) as file:
        return sha256_and_size(file, progress)[0]


def parse_json(text: bytes | str) -> Any:
    """A JSON value. Raises ValueError, for an object with two values of one key too: readers differ in which counts."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply to be one of ours") from None


def remove_leftovers(folder: Path, keep: set[str] | None = None) -> None:
    """Remove what an interrupted save left, and with ``keep`` every tensor file that is not named in it."""
    for file in folder.iterdir():
        unused = keep is not None and file.suffix == ".safetensors" and file.name not in keep
        if _TEMPORARY in file.name or unused:
            file.unlink(missing_ok=True)


def write_one_file(path: Path, structure: Any, tensors: list[Tensor], facts: Mapping[str, Any]) -> None:
    """A checkpoint as one safetensors file with its structure in the header."""
    stored = {str(i): _storable(tensor) for i, tensor in enumerate(tensors)}
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
                save_file({"tensor": _storable(tensor)}, temporary)
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


def tensors_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.tensors")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not the reference file of a checkpoint: {error}") from error


def _storable(tensor: Tensor) -> Tensor:
    """Dense, on the CPU, and sharing memory with no other: what safetensors takes."""
    return tensor.cpu().contiguous().clone()


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


# --- the reference's files -------------------------------------------------------------------------------


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
        _require_stored(path)
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


def _require_stored(path: Path) -> None:
    """Raise ValueError for an archive that holds more than the file has bytes; ``torch.save`` compresses nothing."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    total, most = sum(part.file_size for part in parts), os.path.getsize(path)
    if total > most or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ValueError(f"its parts have {total} bytes and the file {most}: it is compressed; save it with torch.save")


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
            found = read_pickle(folder / f"tensor_{number}.pt", mapped)
            if not isinstance(found, Tensor):
                raise CheckpointError(f"{folder / f'tensor_{number}.pt'} holds {type(found).__name__}, not a tensor")
            tensors[number] = found
        return tensors[number]

    def visit(item: Any, level: int) -> Any:
        if isinstance(item, _TensorReference):
            return tensor(item)
        if not isinstance(item, dict | list | tuple):
            return item
        if id(item) not in visited:
            if level == MOST_LEVELS:
                raise CheckpointError(f"{path} is nested more than {MOST_LEVELS} levels deep, or holds itself")
            if isinstance(item, dict):
                visited[id(item)] = {key: visit(value, level + 1) for key, value in item.items()}
            else:
                visited[id(item)] = type(item)([visit(value, level + 1) for value in item])
        return visited[id(item)]

    return visit(root, 0)
