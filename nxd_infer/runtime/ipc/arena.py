"""Tensors shared by the caller's process and its ranks: one memfd, laid out from the manifest alone, so that both
compute the same offsets.

====================  ============================================================================
a counter page        per rank: steps begun, steps finished, clock of the last begin (nanoseconds)
the inputs, twice     every bucket's inputs, each aligned to 64 bytes; buckets overlay each other
the outputs, twice    every bucket's outputs, likewise; written by the first rank of the stage
                      that computes them
what is handed        with a pipeline: per side and tensor parallel rank, the values that every
                      bucket's stages hand to later ones
====================  ============================================================================

There are two *sides* of inputs and outputs, so that a step can be submitted while the previous one runs (with a
pipeline one more than it has stages); each step uses one of them, and untouched pages take no memory. Regions start on
page boundaries. A rank maps what it takes read-only, so a graph that wrote to its inputs, which all ranks share, would
fault instead of silently corrupting them.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, TensorSpec
from nxd_infer.errors import InputMismatchError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensors = Sequence[Sequence[torch.Tensor]]

ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_COUNTERS = 8
"""Eight 64-bit counters per rank: one cache line."""


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _round_up(spec.nbytes, ALIGNMENT)
    return offsets, end


class Region:
    """Equal ``parts`` of the arena from ``start``; each has a place for every tensor of any one bucket."""

    def __init__(self, start: int, parts: int, specs: Iterable[Sequence[TensorSpec]]):
        """``specs[bucket]``: those of a bucket's tensors, in order."""
        self.specs = [list(row) for row in specs]
        offsets = [_offsets(row) for row in self.specs]
        self._places = [row for row, _ in offsets]
        self._ends = [end for _, end in offsets]
        self._part = _round_up(max(self._ends, default=0), _PAGE)
        self.start, self.end = start, start + parts * self._part

    def map(self, fd: int, *, writable: bool) -> Any:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = self.end - self.start
        return mmap.mmap(fd, size, mmap.MAP_SHARED, protection, offset=self.start) if size else bytearray()

    def views(self, memory: Any, part: int, view: Callable[[Any, int, TensorSpec], Any]) -> Any:
        """Return ``[bucket][tensor]``: ``view`` of each tensor's place in a part of the mapped ``memory``."""
        start = part * self._part
        return tuple(
            tuple(view(memory, start + place, spec) for place, spec in zip(row, specs, strict=True))
            for row, specs in zip(self._places, self.specs, strict=True)
        )

    def whole(self, memory: Any, part: int) -> list[memoryview]:
        """Return each bucket's tensors in a part of the mapped ``memory`` as raw bytes."""
        return [memoryview(memory)[part * self._part :][:end] for end in self._ends]


class ArenaLayout:
    """Where everything in the arena is; a pure function of the manifest."""

    def __init__(self, manifest: Manifest):
        buckets = manifest.buckets
        self.sides = manifest.pp_degree + 1
        """Most steps that may be begun and not taken: one runs in each stage, and one waits."""
        self.counters = _round_up(manifest.world_size * _COUNTERS * 8, _PAGE)
        self.inputs = Region(self.counters, self.sides, (bucket.inputs for bucket in buckets))
        self.outputs = Region(self.inputs.end, self.sides, (bucket.outputs for bucket in buckets))
        self.handing = manifest.tp_degree
        """Number of ranks that hand values on from a stage."""
        self.handed = Region(self.outputs.end, self.sides * self.handing, (bucket.handed for bucket in buckets))
        self.size = self.handed.end


def create_arena(layout: ArenaLayout) -> int:
    """Create a memfd of the arena's size that cannot be resized. It has no name and ends with its last holder."""
    fd = os.memfd_create("nxd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Arena:
    """The arena mapped into this process.

    ``writable_inputs`` is for the caller's process; ranks map the inputs read-only.
    """

    def __init__(self, fd: int, manifest: Manifest, *, writable_inputs: bool):
        self.layout = layout = ArenaLayout(manifest)
        self._words = memoryview(mmap.mmap(fd, layout.counters)).cast("Q")
        inputs = layout.inputs.map(fd, writable=writable_inputs)
        outputs = layout.outputs.map(fd, writable=True)
        self.sides = [Side(layout, inputs, outputs, number) for number in range(layout.sides)]
        self._handed = {writable: layout.handed.map(fd, writable=writable) for writable in (False, True)}

    def handed(self, side: int, tp_rank: int, *, writable: bool) -> Tensors:
        """Return ``[bucket][value]``: what ranks in place ``tp_rank`` of their stage hand on in a step on ``side``."""
        return self.layout.handed.views(self._handed[writable], side * self.layout.handing + tp_rank, _view)

    def begin(self, rank: int, clock: int) -> None:
        """Record that rank ``rank`` starts a step at ``clock`` (monotonic nanoseconds)."""
        place = rank * _COUNTERS
        self._words[place + 2] = clock
        self._words[place] += 1

    def finish(self, rank: int) -> None:
        self._words[rank * _COUNTERS + 1] += 1

    def progress(self, rank: int) -> tuple[int, int, int]:
        """Return steps begun, steps finished, and the clock of the last begin (0 before the first)."""
        place = rank * _COUNTERS
        return self._words[place], self._words[place + 1], self._words[place + 2]


class Side:
    """Inputs and outputs of one step at a time: every bucket's tensors, as torch tensors and, if NumPy has their
    dtypes, as arrays. Both keep the mapping alive."""

    def __init__(self, layout: ArenaLayout, inputs: Any, outputs: Any, number: int):
        self.taken = False
        """Whether a step has begun here whose outputs were not taken yet."""
        self.last: Any = None
        """The exchange of the last step that began here."""
        self._layout, self._inputs, self._outputs, self._number = layout, inputs, outputs, number

    @cached_property
    def inputs(self) -> Tensors:
        return self._layout.inputs.views(self._inputs, self._number, _view)

    @cached_property
    def outputs(self) -> Tensors:
        return self._layout.outputs.views(self._outputs, self._number, _view)

    @cached_property
    def output_arrays(self) -> Sequence[dict[str, np.ndarray]]:
        """Outputs by name."""
        region = self._layout.outputs
        rows = zip(region.specs, region.views(self._outputs, self._number, _array), strict=True)
        return [{spec.name: array for spec, array in zip(specs, row, strict=True)} for specs, row in rows]

    @cached_property
    def input_bytes(self) -> Sequence[memoryview]:
        """Each bucket's inputs as raw bytes."""
        return self._layout.inputs.whole(self._inputs, self._number)


class InputBlock(Mapping[str, "np.ndarray"]):
    """The inputs of ``bucket`` as arrays in one block of memory, laid out as in the arena: checked in one pass and
    passed on in one copy. They start at their defaults, or zero. Raises TypeError if NumPy lacks a dtype."""

    @classmethod
    def of(cls, bucket: BucketSpec, inputs: Mapping[str, Any]) -> InputBlock:
        """Return ``inputs`` as a block; itself if it is one of ``bucket``. Raises InputMismatchError for other arrays
        than the bucket takes; :meth:`check` checks the values."""
        if isinstance(inputs, InputBlock) and inputs.bucket is bucket:
            return inputs
        block = cls(bucket)
        if unknown := sorted(inputs.keys() - block.keys()):
            raise InputMismatchError(f"bucket {bucket.name!r}: there is no input {unknown[0]!r}")
        for spec in bucket.inputs:
            array, view = inputs.get(spec.name), block[spec.name]
            if array is None:
                if spec.default is None:
                    raise InputMismatchError(
                        f"bucket {bucket.name!r}: input {spec.name!r} is missing and has no default"
                    )
            elif not isinstance(array, type(view)):
                raise InputMismatchError(f"input {spec.name!r} is a {type(array).__name__}, expected a numpy.ndarray")
            elif array.dtype != view.dtype or array.shape != view.shape:
                raise InputMismatchError(
                    f"input {spec.name!r} is {array.dtype.name}{list(array.shape)}, bucket {bucket.name!r} takes "
                    f"{spec.dtype}{spec.shape}"
                )
            else:
                view[...] = array
        return block

    def __init__(self, bucket: BucketSpec):
        import numpy as np

        places, size = _offsets(bucket.inputs)
        self.bucket = bucket
        self.memory = np.zeros(size, np.uint8)
        self.bytes = self.memory.data
        self._arrays = {
            spec.name: _array(self.memory, place, spec) for place, spec in zip(places, bucket.inputs, strict=True)
        }
        self._words = self.memory.view(np.int64)
        self._count = np.count_nonzero
        limits = np.iinfo(np.int64)
        self._low, self._high = np.full_like(self._words, limits.min), np.full_like(self._words, limits.max)
        self._limited = [spec for spec in bucket.inputs if spec.minimum is not None or spec.maximum is not None]
        self._others = [spec for spec in self._limited if spec.dtype != "int64"]
        for place, spec in zip(places, bucket.inputs, strict=True):
            if spec.default is not None:
                self[spec.name][...] = spec.default
            if spec.dtype == "int64":
                words = slice(place // 8, (place + spec.nbytes) // 8)
                low, high = spec.minimum, spec.maximum
                self._low[words] = limits.min if low is None or low < limits.min else math.ceil(low)
                self._high[words] = limits.max if high is None or high > limits.max else math.floor(high)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self) -> None:
        """Raise InputMismatchError for a value outside its input's limits."""
        count = self._count
        if count(self._words < self._low) or count(self._words > self._high):
            self._check_each(self._limited)
        if self._others:
            self._check_each(self._others)

    def _check_each(self, specs: Sequence[InputSpec]) -> None:
        for spec in specs:
            array = self._arrays[spec.name]
            if array.size:
                spec.check(array.min().item())
                spec.check(array.max().item())


def _view(buffer: mmap.mmap, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return a contiguous tensor over shared memory."""
    import torch

    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable", which is intended for the inputs
        flat = torch.frombuffer(buffer, dtype=spec.torch_dtype, count=math.prod(spec.shape), offset=offset)
    return flat.view(spec.shape)


def _array(buffer: Any, offset: int, spec: TensorSpec) -> np.ndarray:
    """Like ``_view``, as an array."""
    import numpy as np

    return np.ndarray(spec.shape, np.dtype(spec.dtype), buffer, offset if spec.nbytes else 0)
