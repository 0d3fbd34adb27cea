"""The part of an artifact that one process runs: one rank, or all if the backend says so. Knows no processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.artifact.manifest import StageSpec, TensorSpec
from nxd_infer.artifact.rank_weights import load_entries, load_weights
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends import registry
from nxd_infer.backends.base import Executable, RankGraph
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.runtime.bucket_kernel import answer, load_kernel
from nxd_infer.runtime.ipc.channel import Kind


@dataclass
class Runtime:
    """The services of this process for the graphs it loads (``backends.RankRuntime``)."""

    context: ParallelContext
    threads: int
    artifact: LoadedArtifact
    _libraries: dict[str, Any] = field(default_factory=dict)

    def library(self, content_hash: str) -> Any:
        """Return the artifact's operator library ``ops/<hash>.so``, registered once in this process.

        A rank process connects it to its peers before any graph is loaded.
        """
        if content_hash not in self._libraries:
            self._libraries[content_hash] = native.load_file(self.artifact.op_file(content_hash))
        return self._libraries[content_hash]

    def engage_crews(self, cores: Sequence[int]) -> None:
        """Let the operators of the libraries loaded so far share work among their own threads, one per core."""
        for library in self._libraries.values():
            library.engage_crew(self.threads, cores)


class Rank:
    """The tensors and graphs of rank ``rank`` of an artifact, or of all its ranks. The caller has verified its files
    (``verify_again``)."""

    def __init__(self, artifact: LoadedArtifact, rank: int, runtime: Runtime):
        self.artifact = artifact
        self.rank = rank
        self._manifest = manifest = artifact.manifest.of_rank(rank)
        self.tp_rank = rank % manifest.tp_degree
        backend = registry.get(manifest.backend)
        self.ranks = range(manifest.tp_degree) if backend.one_process else range(rank, rank + 1)
        self._places = [backend.place(manifest, artifact.weight_file(each), runtime) for each in self.ranks]
        loaded: dict[tuple[str, ...], Executable] = {}
        self._buckets: list[Executable] = []
        for bucket in manifest.buckets:
            digests = tuple(bucket.graphs[each] for each in self.ranks)
            if digests not in loaded:
                graphs = [
                    RankGraph(artifact.graph_dir(digest), manifest.graphs[digest], place.states, place.weights)
                    for digest, place in zip(digests, self._places, strict=True)
                ]
                loaded[digests] = backend.load(graphs, runtime)
            self._buckets.append(loaded[digests])
        self._graphs = list(loaded.values())
        self._kernel = load_kernel(artifact) if rank == 0 else None
        self._staged: list[_Staged] = []
        self._broken = ""

    def stage(self, bucket: int) -> StageSpec:
        """Return what the rank's graph of a bucket takes after the inputs, and what it gives."""
        spec = self._manifest.buckets[bucket]
        if spec.stages:
            return spec.stages[self.rank // self._manifest.tp_degree]
        return StageSpec(gives=[output.name for output in spec.outputs])

    def bind(self, bucket: int, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Return a function that runs steps of bucket number ``bucket`` on these tensors, in the manifest's order, as
        its results are. They are checked now, and results at the first step, because a decoding rank has only a few
        hundred microseconds between two steps, as much as the check takes."""
        graph = self._buckets[bucket].bind(inputs)
        known = self.artifact.manifest.buckets[bucket]
        named = {spec.name: spec for spec in (*known.outputs, *known.handed)}
        specs = [named[name] for name in self.stage(bucket).gives]
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

    def serve(self, kind: Kind, fds: Sequence[int]) -> None:
        """Handle any request except a step; ``fds`` are its descriptors, which the caller closes."""
        if kind == Kind.RESET:
            for place in self._places:
                place.reset_states()
        elif kind == Kind.ROUTE and self._kernel is not None:  # on rank 0 only
            answer(self._kernel, fds[0])
        elif kind == Kind.PREPARE_WEIGHTS:
            self.prepare_weights([f"/proc/self/fd/{fd}" for fd in fds])
        elif kind == Kind.COMMIT_WEIGHTS:
            self.commit_weights()
        elif kind == Kind.ABORT_WEIGHTS:
            self.abort_weights()

    def prepare_weights(self, files: Sequence[str | os.PathLike[str]]) -> None:
        """Map new weights, one file per rank, check them and read them from disk, without using them yet. Raises
        WeightSchemaError."""
        self.abort_weights()
        specs = self._manifest.weights
        encoded = {spec.name for spec in specs if spec.encoding}
        for file in files:
            try:
                new = load_weights(Path(file), specs, partial=True)
                entries = load_entries(Path(file), specs)
            except ArtifactCorruptError as error:
                raise WeightSchemaError(str(error)) from error
            plain = {name: tensor for name, tensor in new.items() if name not in encoded}
            for tensor in plain.values():  # read it now, with the time limit of a start, not of the next call
                if tensor.is_contiguous() and tensor.numel() > 0:  # others were copied from their file
                    tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
            self._staged.append(_Staged(plain, list(new), entries, os.open(file, os.O_RDONLY | os.O_CLOEXEC)))

    def commit_weights(self) -> None:
        """Use the prepared weights from the next step on."""
        if not self._staged:
            raise WeightSchemaError("no new weights were prepared")
        staged, self._staged = self._staged, []
        try:
            for place, (number, new) in zip(self._places, enumerate(staged), strict=True):
                moved = place.replace_weights(new.names, self._reader(new))
                for graph in self._graphs:
                    own = {weight.name for weight in graph.graph.weights} & moved.keys()
                    if own:
                        graph.update_weights({name: moved[name] for name in own}, number)
                for (name, slot), entry in new.entries.items():
                    place.replace_entry(name, slot, entry)
        except BaseException as error:
            self._broken = f"new weights replaced only some of the old ones ({error}); restart the model"
            raise
        finally:
            for new in staged:
                os.close(new.fd)

    def _reader(self, new: _Staged) -> Callable[[str], Tensor]:
        """Return a reader of the new weights. Encoded ones are read one by one, and their pages released at once."""
        source = Path(f"/proc/self/fd/{new.fd}")
        specs = {spec.name: spec for spec in self._manifest.weights}

        def read(name: str) -> Tensor:
            return new.tensors[name] if name in new.tensors else load_weights(source, [specs[name]])[name]

        return read

    def abort_weights(self) -> None:
        for new in self._staged:
            os.close(new.fd)
        self._staged = []

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self.abort_weights()
        for place in self._places:
            place.close()


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
    """One rank's new weights, checked: the plain ones mapped, the names of all, entries of adapter tables by table and
    slot, and their open file."""

    tensors: dict[str, Tensor]
    names: list[str]
    entries: dict[tuple[str, int], Tensor]
    fd: int
