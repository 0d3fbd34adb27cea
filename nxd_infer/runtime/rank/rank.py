"""One rank: its weights mapped, its states allocated, every bucket's graph loaded. Knows nothing of processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer import backends
from nxd_infer.artifact.manifest import PACKED_INT8, TensorSpec, WeightSpec
from nxd_infer.artifact.rank_weights import load_entries, load_initial_states, load_weights
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends.base import Executable
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.runtime.bucket_kernel import answer, load_kernel
from nxd_infer.runtime.rank.memory import Memory
from nxd_infer.runtime.rank.packed_weights import PackedWeights


@dataclass
class Runtime:
    """What this rank offers the graphs it loads (``backends.RankRuntime``)."""

    context: ParallelContext
    threads: int
    artifact: LoadedArtifact
    _libraries: dict[str, Any] = field(default_factory=dict)

    def library(self, content_hash: str) -> Any:
        """The operator library ``ops/<hash>.so`` of the artifact, registered once in this process.

        A rank process has connected it to its peers before any graph is loaded.
        """
        if content_hash not in self._libraries:
            from nxd_infer import native

            self._libraries[content_hash] = native.load_file(self.artifact.op_file(content_hash))
        return self._libraries[content_hash]

    def engage_crews(self, cores: Sequence[int]) -> None:
        """Have the operators of the libraries loaded so far share work among threads of their own, one a core."""
        for library in self._libraries.values():
            library.engage_crew(self.threads, cores)

    def packer(self) -> Any | None:
        """A library of the artifact that can pack weights; None where no graph reads packed ones, or it has none."""
        encodings = {spec.encoding for spec in self.artifact.manifest.weights if spec.encoding}
        if not encodings:
            return None
        needed = "pack_int8" if PACKED_INT8 in encodings else "pack"
        libraries = [self.library(content_hash) for content_hash in self.artifact.manifest.ops]
        return next((library for library in libraries if needed in library.ops), None)


class Rank:
    """The tensors and graphs of one rank of an artifact, whose files the caller has verified (``verify_again``).

    Raises ArtifactCorruptError when they have changed until all is read.
    """

    def __init__(self, artifact: LoadedArtifact, rank: int, runtime: Runtime):
        self.artifact = artifact
        self.rank = rank
        manifest = artifact.manifest
        file = artifact.weight_file(rank)
        self._packed = PackedWeights(manifest.weights, runtime.packer())
        self._packed.fill(lambda spec: load_weights(file, [spec])[spec.name])
        self.weights = {**load_weights(file, _plain(manifest.weights)), **self._packed.tensors}
        self._initial = load_initial_states(artifact.weight_file(rank), manifest.states)
        self._memory = {spec.name: Memory(_extent(spec)) for spec in manifest.states}
        self.states = {spec.name: _placed(spec, self._memory[spec.name].bytes) for spec in manifest.states}
        self.reset_states()
        backend = backends.get(manifest.backend)
        self.graphs: dict[str, Executable] = {}
        for bucket in manifest.buckets:
            digest = bucket.graphs[rank]
            if digest not in self.graphs:
                spec = manifest.graphs[digest]
                self.graphs[digest] = backend.load(artifact.graph_dir(digest), spec, self.states, self.weights, runtime)
        self._kernel = load_kernel(artifact) if rank == 0 else None
        artifact.require_unchanged(rank)
        self._buckets = [self.graphs[bucket.graphs[rank]] for bucket in manifest.buckets]
        self._staged: _Staged | None = None
        self._broken = ""

    def run(self, bucket: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One step of bucket number ``bucket``. ``inputs`` and the result are in the manifest's order."""
        return self.bind(bucket, inputs)()

    def bind(self, bucket: int, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that runs steps on these very tensors. They are checked now and results at the first one: a rank
        that decodes has some hundred microseconds to spare between two steps, and would take as much for it."""
        graph = self._buckets[bucket].bind(inputs)
        specs = self.artifact.manifest.buckets[bucket].outputs
        checked = False

        def step() -> list[Tensor]:
            nonlocal checked
            if self._broken:
                raise ModelClosedError(self._broken)
            outputs = graph()
            if not checked:
                _check_outputs(outputs, specs)
                checked = True
            return outputs

        return step

    def route(self, fd: int) -> None:
        """Ask the bucket kernel; see ``kernel.py``. It is rank 0's alone."""
        if self._kernel is not None:
            answer(self._kernel, fd)

    def reset_states(self) -> None:
        """Put every state back to its traced value, in place: the graphs keep their references."""
        for name, state in self.states.items():
            if name in self._initial:
                state.copy_(self._initial[name])
            else:
                self._memory[name].clear()

    def prepare_weights(self, file: str | os.PathLike[str]) -> None:
        """Map new weights, check them and read them from disk, without using them yet. Raises WeightSchemaError."""
        self.abort_weights()
        try:
            found = load_weights(Path(file), self.artifact.manifest.weights, partial=True)
            entries = load_entries(Path(file), self.artifact.manifest.weights)
        except ArtifactCorruptError as error:
            raise WeightSchemaError(str(error)) from error
        packed = [name for name in found if name in self._packed.specs]
        plain = {name: tensor for name, tensor in found.items() if name not in self._packed.specs}
        for tensor in plain.values():
            _touch(tensor)  # here, where it may take as long as a start: the next call has a call's time
        self._staged = _Staged(plain, packed, entries, os.open(file, os.O_RDONLY | os.O_CLOEXEC))

    def commit_weights(self) -> None:
        """Use the prepared weights from the next step on."""
        if self._staged is None:
            raise WeightSchemaError("no new weights were prepared")
        staged, self._staged = self._staged, None
        try:
            # Read again, each by itself: its pages are given back as soon as it is packed.
            source = Path(f"/proc/self/fd/{staged.fd}")
            self._packed.fill(lambda spec: load_weights(source, [spec])[spec.name], staged.packed)
            self.weights = {**self.weights, **staged.plain}
            for graph in self.graphs.values():
                names = {weight.name for weight in graph.graph.weights}
                graph.update_weights({name: tensor for name, tensor in staged.plain.items() if name in names})
            for (name, slot), entry in staged.entries.items():
                self.weights[name][slot] = entry  # in place: it is the tensor that the graphs read
        except BaseException as error:
            self._broken = f"new weights replaced only some of the old ones ({error}); restart the model"
            raise
        finally:
            os.close(staged.fd)

    def abort_weights(self) -> None:
        if self._staged is not None:
            os.close(self._staged.fd)
        self._staged = None

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()
        self.abort_weights()
        self._packed.tensors.clear()
        self.weights, self.states, self._initial, self._memory = {}, {}, {}, {}


def _check_outputs(outputs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    if len(outputs) != len(specs):
        raise InputMismatchError(f"the graph returned {len(outputs)} outputs, the manifest names {len(specs)}")
    for spec, output in zip(specs, outputs, strict=True):
        if list(output.shape) != spec.shape or output.dtype != spec.torch_dtype:
            raise InputMismatchError(
                f"the graph returned {output.dtype}{list(output.shape)} for output {spec.name!r}, "
                f"traced as {spec.dtype}{spec.shape}"
            )


@dataclass
class _Staged:
    """New weights that were checked: the plain ones mapped, the names of those to pack, entries of the tables of
    adapters by table and slot, and their open file."""

    plain: dict[str, Tensor]
    packed: list[str]
    entries: dict[tuple[str, int], Tensor]
    fd: int


def _plain(specs: Sequence[WeightSpec]) -> list[WeightSpec]:
    return [spec for spec in specs if not spec.encoding]


def _touch(tensor: Tensor) -> None:
    """Have the pages of a mapped tensor in memory."""
    if tensor.is_contiguous() and tensor.numel() > 0:  # another one was copied out of its file
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


def _extent(spec: TensorSpec) -> int:
    """Bytes from the first element of a tensor of ``spec`` to the end of its last."""
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.torch_dtype.itemsize


def _placed(spec: TensorSpec, memory: Tensor) -> Tensor:
    """A tensor of ``spec`` in ``memory``."""
    return memory.view(spec.torch_dtype).as_strided(spec.shape, spec.stride)
