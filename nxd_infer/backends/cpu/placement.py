"""A rank's tensors in this machine's memory: weights mapped from their file or packed, states in pages that are
allocated on first use."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import Manifest, TensorSpec, WeightSpec
from nxd_infer.artifact.rank_weights import load_initial_states, load_weights
from nxd_infer.backends.base import RankRuntime
from nxd_infer.backends.cpu.encodings import PACKED_ACROSS, PACKED_INT8, PACKED_STORED, int4_form
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.ops import int4, packed

_ALIGNMENT = 64
_LARGE = 2 << 20
"""Size of a large page; a smaller mapping would only waste one."""
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class Memory:
    """``nbytes`` zeros in :attr:`bytes` (uint8), mapped while a tensor of them lives; pages are allocated on first use.

    ``large`` requests large pages: with small ones a sequential read misses the TLB every 4 KiB, which cost up to half
    of the bandwidth. Not for sparsely filled memory, which would then use full large pages.
    """

    def __init__(self, nbytes: int, *, large: bool = False):
        self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE)
        if large and nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)[:nbytes]

    def clear(self) -> None:
        """Reset to zeros. On Linux the pages are released instead of written."""
        if sys.platform == "linux":
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.zero_()


class PackedWeights:
    """A rank's packed weights, one copy for the graphs of all buckets, of the weights of ``specs`` that have an
    encoding: ``mapped`` from a file, which they stay until :meth:`fill` replaces them, or in memory that it fills."""

    def __init__(self, specs: Sequence[WeightSpec], library: Any, mapped: Mapping[str, Tensor]):
        self.specs = {spec.name: spec for spec in specs if spec.encoding}
        self.tensors = dict(mapped)
        self._mapped = set(mapped)
        self._library = library
        self._make_room([name for name in self.specs if name not in mapped])

    def _make_room(self, names: Iterable[str]) -> None:
        """Give these memory, in one piece."""
        places, end = {}, 0
        held = [encoded_spec(self.specs[name], self.specs[name].encoding) for name in names]
        for spec in held:
            places[spec.name] = end
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return
        arena = Memory(end, large=True).bytes
        for spec in held:
            piece = arena[places[spec.name] : places[spec.name] + spec.nbytes]
            self.tensors[spec.name] = piece.view(spec.torch_dtype).view(spec.shape)

    def fill(self, read: Callable[[str], Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Pack the plain tensors that ``read`` returns, one at a time, over the present ones. Return those that have
        moved: a file's pages, which other processes share, are not written to."""
        moved = [name for name in names if name in self._mapped]
        self._make_room(moved)
        self._mapped.difference_update(moved)
        for name in names:
            pack(self.specs[name], read(name), self.tensors[name], self._library)
        return {name: self.tensors[name] for name in moved}


def pack(spec: WeightSpec, plain: Tensor, out: Tensor, library: Any) -> None:
    """Write ``plain`` in the encoding of ``spec`` into ``out``."""
    plain = plain.mT if spec.encoding == PACKED_ACROSS else plain
    if form := int4_form(spec.encoding):
        int4.pack(plain, *form, out=out, library=library)
    elif spec.encoding in (PACKED_INT8, PACKED_STORED):
        packed.pack_int8(plain, out=out, library=library)
    else:
        packed.pack(plain, out=out, library=library)


def _mapped(manifest: Manifest, weight_file: Path) -> dict[str, Tensor]:
    """Return the weights that a rank's file holds packed, where they are. Raises ArtifactCorruptError for another form
    than their encoding's."""
    specs = {spec.name: spec for spec in manifest.weights}
    held = [spec for spec in manifest.packed if spec.name in specs]  # the others are of other stages
    for spec in held:
        form = encoded_spec(specs[spec.name], specs[spec.name].encoding)
        if (spec.dtype, spec.shape, spec.stride) != (form.dtype, form.shape, form.stride):
            raise ArtifactCorruptError(
                f"{weight_file.name}: {spec.name!r} is packed as {spec.dtype}{spec.shape}, and {form.encoding!r} of it "
                f"is {form.dtype}{form.shape}"
            )
    return load_weights(weight_file, held)


class HostPlacement:
    """States and weights of one rank (``backends.Placement``)."""

    def __init__(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime):
        mapped = _mapped(manifest, weight_file)
        self._packed = PackedWeights(manifest.weights, packer(manifest, runtime), mapped)
        plainly = [name for name in self._packed.specs if name not in mapped]
        self._packed.fill(lambda name: load_weights(weight_file, [self._packed.specs[name]])[name], plainly)
        plain = [spec for spec in manifest.weights if not spec.encoding]
        self.weights: dict[str, Any] = {**load_weights(weight_file, plain), **self._packed.tensors}
        self._initial = load_initial_states(weight_file, manifest.states)
        self._memory = {spec.name: Memory(extent(spec)) for spec in manifest.states}
        self.states: dict[str, Any] = {
            spec.name: placed(spec, self._memory[spec.name].bytes) for spec in manifest.states
        }
        self.reset_states()

    def reset_states(self) -> None:
        """In place: the graphs keep their references."""
        for name, state in self.states.items():
            if name in self._initial:
                state.copy_(self._initial[name])
            else:
                self._memory[name].clear()

    def replace_weights(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        """Packed weights change in place, if they are not a file's; plain ones are in the new mapping. What has moved
        the graphs must be given."""
        moved = self._packed.fill(read, [name for name in names if name in self._packed.specs])
        moved |= {name: read(name) for name in names if name not in self._packed.specs}
        self.weights.update(moved)
        return moved

    def replace_entry(self, name: str, slot: int, entry: Tensor) -> None:
        self.weights[name][slot] = entry

    def close(self) -> None:
        self._packed.tensors.clear()
        self.weights, self.states, self._initial, self._memory = {}, {}, {}, {}


def packer(manifest: Manifest, runtime: RankRuntime) -> Any | None:
    """A library of the artifact that can pack weights; None if no graph reads packed ones, or the artifact has none."""
    encodings = {spec.encoding for spec in manifest.weights if spec.encoding}
    if not encodings:
        return None
    needed = {"pack_int4" if int4_form(one) else "pack_int8" if one == PACKED_INT8 else "pack" for one in encodings}
    libraries = [runtime.library(content_hash) for content_hash in manifest.ops]
    return next((library for library in libraries if needed <= set(library.ops)), None)


def extent(spec: TensorSpec | WeightSpec) -> int:
    """Bytes from the first element of a tensor of ``spec`` to the end of its last."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.torch_dtype.itemsize


def placed(spec: TensorSpec, memory: Tensor) -> Tensor:
    """A tensor of ``spec`` in ``memory``."""
    return memory.view(spec.torch_dtype).as_strided(spec.shape, spec.stride)
