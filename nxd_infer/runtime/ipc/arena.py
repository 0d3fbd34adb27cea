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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ArenaLayout:
    """The offsets of everything in the arena; a pure function of the manifest."""

    inputs: list[list[int]]
    """``inputs[bucket][input]``: offset within a side's inputs."""
    outputs: list[list[int]]
    input_start: int
    input_size: int
    """Size of one side in bytes."""
    output_start: int
    output_size: int
    handed: list[list[int]]
    """``handed[bucket][value]``: offset within what one rank hands on."""
    handed_start: int
    handed_size: int
    """Size of what one rank hands on in one step; 0 without a pipeline."""
    sides: int
    """Most steps that may be begun and not taken: one runs in each stage, and one waits."""
    handing: int
    """Number of ranks that hand values on from a stage."""

    @property
    def size(self) -> int:
        return self.handed_start + self.sides * self.handing * self.handed_size


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _offsets(specs: list[TensorSpec]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _round_up(spec.nbytes, ALIGNMENT)
    return offsets, end


def arena_layout(manifest: Manifest) -> ArenaLayout:
    inputs = [_offsets(list(bucket.inputs)) for bucket in manifest.buckets]
    outputs = [_offsets(list(bucket.outputs)) for bucket in manifest.buckets]
    handed = [_offsets(list(bucket.handed)) for bucket in manifest.buckets]
    counters = _round_up(manifest.world_size * _COUNTERS * 8, _PAGE)
    input_size = _round_up(max([end for _, end in inputs] + [1]), _PAGE)
    output_size = _round_up(max([end for _, end in outputs] + [1]), _PAGE)
    sides = manifest.pp_degree + 1
    return ArenaLayout(
        inputs=[offsets for offsets, _ in inputs],
        outputs=[offsets for offsets, _ in outputs],
        input_start=counters,
        input_size=input_size,
        output_start=counters + sides * input_size,
        output_size=output_size,
        handed=[offsets for offsets, _ in handed],
        handed_start=counters + sides * (input_size + output_size),
        handed_size=_round_up(max([end for _, end in handed] + [0]), _PAGE),
        sides=sides,
        handing=manifest.tp_degree,
    )


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
        self.layout = layout = arena_layout(manifest)
        self._counters = mmap.mmap(fd, layout.input_start)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable_inputs else 0)
        size = layout.sides * layout.input_size
        inputs = mmap.mmap(fd, size, mmap.MAP_SHARED, protection, offset=layout.input_start)
        outputs = mmap.mmap(fd, layout.sides * layout.output_size, offset=layout.output_start)
        self.sides = [Side(manifest.buckets, layout, inputs, outputs, number) for number in range(layout.sides)]
        self._handed = {
            writable: mmap.mmap(
                fd,
                layout.size - layout.handed_start,
                mmap.MAP_SHARED,
                mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
                offset=layout.handed_start,
            )
            for writable in ((False, True) if layout.handed_size else ())
        }
        self._handed_specs: list[list[TensorSpec]] = [list(bucket.handed) for bucket in manifest.buckets]
        self._words = memoryview(self._counters).cast("Q")

    def handed(self, side: int, tp_rank: int, *, writable: bool) -> Tensors:
        """Return ``[bucket][value]``: what ranks in place ``tp_rank`` of their stage hand on in a step on ``side``."""
        if not self._handed:
            return [[] for _ in self._handed_specs]
        start = (side * self.layout.handing + tp_rank) * self.layout.handed_size
        return _Region(self._handed[writable], start, self.layout.handed, self._handed_specs).each(_view)

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

    def __init__(self, buckets: Sequence[BucketSpec], layout: ArenaLayout, inputs: Any, outputs: Any, number: int):
        self.taken = False
        """Whether a step has begun here whose outputs were not taken yet."""
        self.last: Any = None
        """The exchange of the last step that began here."""
        self._inputs = _Region(
            inputs, number * layout.input_size, layout.inputs, [list(bucket.inputs) for bucket in buckets]
        )
        self._outputs = _Region(
            outputs, number * layout.output_size, layout.outputs, [list(bucket.outputs) for bucket in buckets]
        )

    @cached_property
    def inputs(self) -> Tensors:
        return self._inputs.each(_view)

    @cached_property
    def outputs(self) -> Tensors:
        return self._outputs.each(_view)

    @cached_property
    def output_arrays(self) -> Sequence[dict[str, np.ndarray]]:
        """Outputs by name."""
        arrays = zip(self._outputs.specs, self._outputs.each(_array), strict=True)
        return [{spec.name: array for spec, array in zip(specs, row, strict=True)} for specs, row in arrays]

    @cached_property
    def input_bytes(self) -> Sequence[memoryview]:
        """Each bucket's inputs as raw bytes."""
        return self._inputs.whole()


@dataclass
class _Region:
    """The places of every bucket's tensors in ``memory``."""

    memory: mmap.mmap
    start: int
    places: list[list[int]]
    specs: list[list[TensorSpec]]

    def each(self, view: Callable[[Any, int, TensorSpec], Any]) -> Any:
        """Return ``[bucket][tensor]``: ``view`` of each tensor's place."""
        return tuple(
            tuple(view(self.memory, self.start + place, spec) for place, spec in zip(row, specs, strict=True))
            for row, specs in zip(self.places, self.specs, strict=True)
        )

    def whole(self) -> list[memoryview]:
        return [memoryview(self.memory)[self.start :][: _offsets(specs)[1]] for specs in self.specs]


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

        places, size = _offsets(list(bucket.inputs))
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
