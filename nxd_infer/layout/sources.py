"""Sources of logical tensors: a small protocol that reads slices, and its implementations.

Nothing here unpickles. Callers read only the slice that a rank needs, so no step holds more than one tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nxd_infer.errors import CheckpointError, ShardingError
from nxd_infer.layout.flat import bounds_of, slices_of
from nxd_infer.util.dtypes import SAFETENSORS_DTYPES

Slices = Sequence[slice]

INDEX_SUFFIX = ".safetensors.index.json"
MOST_HEADER = 32 << 20
"""Largest header of a safetensors file in bytes, parsed in memory: a few hundred thousand tensors."""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, known) for name, known in SAFETENSORS_DTYPES.items()}
"""Dtypes by their safetensors names."""


@runtime_checkable
class WeightSource(Protocol):
    """Logical tensors by name. Unknown names raise CheckpointError."""

    def keys(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return the tensor, or ``tensor[slices]`` (one slice per dimension, step 1). Do not modify the result."""
        ...


class DictSource:
    """Tensors in memory, by reference."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def _find(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise unknown_name(name, self._tensors) from None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).dtype

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        tensor = self._find(name).detach()
        return tensor if slices is None else tensor[tuple(slices)]


class SafetensorsSource:
    """A safetensors file, or a directory of them with or without an ``*.safetensors.index.json``.

    Files are opened on first use and memory-mapped. Damage raises CheckpointError with the file's name.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self._slices: dict[str, Any] = {}
        self._files = _locate(self.path)

    def keys(self) -> Iterable[str]:
        return self._files.keys()

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            if name not in self._files:
                raise unknown_name(name, self._files, str(self.path))
            file = self._files[name]
            if file not in self._open:
                self._open[file] = open_safetensors(file)
            try:
                self._slices[name] = self._open[file].get_slice(name)
            except SafetensorError as error:
                raise CheckpointError(f"{file} has no tensor {name!r}, though the index says so: {error}") from error
        return self._slices[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise CheckpointError(f"{self._files[name]}: {name!r} has the unsupported dtype {stored}")
        return DTYPES[stored]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        stored = self._slice(name)
        if not stored.get_shape():
            return self._open[self._files[name]].get_tensor(name)
        return stored[tuple(slices)] if slices is not None else stored[:]

    def close(self) -> None:
        """Close the mappings; later reads open them again."""
        self._slices.clear()
        self._open.clear()


class FirstOf:
    """Several sources as one; a name is read from the first that has it."""

    def __init__(self, *sources: WeightSource):
        self._owners = {name: source for source in reversed(sources) for name in source.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self._owners

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owners[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._owners[name].dtype(name)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._owners[name].read(name, slices)


class WrappedSource:
    """The tensors of ``self._source``, which a subclass sets; it overrides what it changes."""

    _source: WeightSource

    def keys(self) -> Iterable[str]:
        return self._source.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._source.read(name, slices)


class SelectedSource(WrappedSource):
    """The tensors of ``source`` whose names are wanted."""

    def __init__(self, source: WeightSource, wanted: Callable[[str], bool]):
        self._source, self._wanted = source, wanted

    def keys(self) -> Iterable[str]:
        return [name for name in self._source.keys() if self._wanted(name)]  # noqa: SIM118  (a source is not a mapping)


class RemappedSource:
    """Another source under other names: ``{new: old}``, or ``{new: (old, dim, start, stop)}`` for a piece of it.

    Used to adapt state dicts: rename, drop, and split tensors that a checkpoint stores fused.
    """

    def __init__(self, source: WeightSource, table: Mapping[str, str | tuple[str, int, int, int]]):
        self._source = source
        self._table = {new: old if isinstance(old, tuple) else (old, -1, 0, 0) for new, old in table.items()}

    def keys(self) -> Iterable[str]:
        return self._table.keys()

    def _find(self, name: str) -> tuple[str, int, int, int]:
        try:
            return self._table[name]
        except KeyError:
            raise unknown_name(name, self._table) from None

    def shape(self, name: str) -> tuple[int, ...]:
        old, dim, start, stop = self._find(name)
        shape = list(self._source.shape(old))
        if dim >= 0:
            if not 0 <= start <= stop <= shape[dim]:
                raise ShardingError(f"{name!r} is {start}..{stop} of dimension {dim} of {old!r}, shape {tuple(shape)}")
            shape[dim] = stop - start
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._find(name)[0])

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        old, dim, start, _ = self._find(name)
        if dim < 0:
            return self._source.read(old, slices)
        bounds = list(bounds_of(slices, self.shape(name)))
        bounds[dim] = (bounds[dim][0] + start, bounds[dim][1] + start)
        return self._source.read(old, slices_of(bounds))


Weights = WeightSource | Mapping[str, Tensor] | str | os.PathLike[str]


def as_source(weights: Weights) -> WeightSource:
    """Return a source for a source, a state dict, or a path of safetensors files."""
    if isinstance(weights, Mapping):
        return DictSource(weights)
    if isinstance(weights, str | os.PathLike):
        return SafetensorsSource(weights)
    return weights


def open_safetensors(file: Path) -> Any:
    """Open with ``safe_open``; failures raise CheckpointError with the file's name. Nothing is unpickled."""
    try:
        with open(file, "rb") as start:
            header = int.from_bytes(start.read(8), "little")
        if header > MOST_HEADER:
            raise ValueError(f"its header would have {header} bytes, but at most {MOST_HEADER} are read")
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: torch's mapping of a file
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({error}); it is truncated, damaged or of another format. "
            "Pickled checkpoints are never loaded: convert them to safetensors first"
        ) from error


def unknown_name(name: str, known: Iterable[str], where: str = "the weights") -> CheckpointError:
    names = sorted(known)
    shown = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    return CheckpointError(f"{where}: no tensor {name!r}; there are {shown or 'none'}")


def _locate(path: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that no file system takes, for one
        raise CheckpointError(f"{str(path)[:200]} cannot be opened: {error.strerror}") from None
    if is_file:
        return dict.fromkeys(open_safetensors(path).keys(), path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a safetensors file nor a directory")
    whole = path / "model.safetensors"
    if whole.is_file():
        return dict.fromkeys(open_safetensors(whole).keys(), whole)
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{path} has several indexes, {[i.name for i in indexes]}: keep one")
    if indexes:
        return dict(_indexed(indexes[0]))
    out: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name in open_safetensors(file).keys():  # noqa: SIM118  (it is not a mapping)
            if name in out:
                raise CheckpointError(f"{name!r} is in both {out[name].name} and {file.name} of {path}")
            out[name] = file
    if not out:
        pickles = sorted(f.name for suffix in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in path.glob(suffix))
        hint = f"; it has {pickles}, but pickles are never loaded: convert them first" if pickles else ""
        raise CheckpointError(f"{path} has no safetensors file{hint}")
    return out


def _indexed(index: Path) -> Iterator[tuple[str, Path]]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = list(table.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name, file in items:
        # A name with a directory in it could point outside the checkpoint.
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CheckpointError(f"{index}: {name!r} must be in a file beside the index, not in {file!r}")
        yield name, index.parent / file


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer under each of its names."""
    params = module.named_parameters(remove_duplicate=False)
    return {**dict(params), **dict(module.named_buffers(remove_duplicate=False))}
