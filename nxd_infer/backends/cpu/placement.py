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
from nxd_infer.backends.cpu.encodings import PACKED_ACROSS, PACKED_INT8, PACKED_STORED
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.ops import packed

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
    """A rank's packed weights, one copy for the graphs of all buckets: memory for the weights of ``specs`` that have an
    encoding, in one piece; :meth:`fill` puts them there."""

    def __init__(self, specs: Sequence[WeightSpec], library: Any):
        self.specs = {spec.name: spec for spec in specs if spec.encoding}
        self.tensors: dict[str, Tensor] = {}
        self._library = library
        places, end = {}, 0
        held = [encoded_spec(spec, spec.encoding) for spec in self.specs.values()]
        for spec in held:
            places[spec.name] = end
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return
        arena = Memory(end, large=True).bytes
        for spec in held:
            piece = arena[places[spec.name] : places[spec.name] + spec.nbytes]
            self.tensors[spec.name] = piece.view(spec.torch_dtype).view(spec.shape)

    def fill(self, read: Callable[[str], Tensor], names: Iterable[str] | None = None) -> None:
        """Pack the plain tensors that ``read`` returns, one at a time, over the present ones. Default: all."""
        for name in self.specs if names is None else names:
            small = self.specs[name].encoding in (PACKED_INT8, PACKED_STORED)
            pack = packed.pack_int8 if small else packed.pack
            plain = read(name).mT if self.specs[name].encoding == PACKED_ACROSS else read(name)
            pack(plain, out=self.tensors[name], library=self._library)


class HostPlacement:
    """States and weights of one rank (``backends.Placement``)."""

    def __init__(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime):
        self._packed = PackedWeights(manifest.weights, packer(manifest, runtime))
        self._packed.fill(lambda name: load_weights(weight_file, [self._packed.specs[name]])[name])
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
        """Packed weights change in place; plain ones are in the new mapping, which the graphs must be given."""
        self._packed.fill(read, [name for name in names if name in self._packed.specs])
        plain = {name: read(name) for name in names if name not in self._packed.specs}
        self.weights.update(plain)
        return plain

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
    needed = "pack_int8" if PACKED_INT8 in encodings else "pack"
    libraries = [runtime.library(content_hash) for content_hash in manifest.ops]
    return next((library for library in libraries if needed in library.ops), None)


def extent(spec: TensorSpec | WeightSpec) -> int:
    """Bytes from the first element of a tensor of ``spec`` to the end of its last."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.torch_dtype.itemsize


def placed(spec: TensorSpec, memory: Tensor) -> Tensor:
    """A tensor of ``spec`` in ``memory``."""
    return memory.view(spec.torch_dtype).as_strided(spec.shape, spec.stride)
