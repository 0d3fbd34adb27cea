"""What a backend is: a few facts about it, as data, and the calls by which graphs are compiled, placed and run.

A backend is one folder here and one line in :mod:`nxd_infer.backends.registry`, or a package of somebody else's that
the registry finds. Nothing outside knows which backends there are. What is imported with a backend's module should be
cheap: processes that hold no torch ask for its data and for :meth:`Backend.check_target`.

A compiled graph is a directory ``graphs/<digest>/`` that holds ``graph.json`` (:class:`GraphFile`: the specs of every
tensor the graph takes, in order), ``ir.json`` (the graph itself, from which any backend can be compiled again) and
whatever the backend adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxd_infer.artifact.manifest import GraphSpec, Manifest
from nxd_infer.context import ParallelContext
from nxd_infer.graph.stored import GraphFile, Lowered

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.graph.canonical import Graph


@dataclass(frozen=True)
class Availability:
    """Whether something can run here, and if not, why: ``reason`` is the text a user sees."""

    ok: bool
    reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok


class RankRuntime(Protocol):
    """What a process of ranks offers the backend that runs them."""

    @property
    def context(self) -> ParallelContext:
        """The rank of this process (the first, where it runs all); its transport runs what is not in a graph."""
        ...

    @property
    def threads(self) -> int:
        """Threads each rank may use."""
        ...

    def library(self, content_hash: str) -> Any:
        """The operator library of that hash, registered and connected. Raises ArtifactError when it cannot be."""
        ...


class Placement(Protocol):
    """Where the states and weights of one rank live, shared by the graphs of all its buckets."""

    states: dict[str, Any]
    weights: dict[str, Any]

    def reset_states(self) -> None:
        """Put every state back to its traced value, where it lies."""
        ...

    def replace_weights(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Mapping[str, Any]:
        """Put new weights in place of the old ones; ``read(name)`` gives each as the weight file holds it.

        Returns those that executables must be told of (:meth:`Executable.update_weights`): the ones that are not where
        the old ones were.
        """
        ...

    def replace_entry(self, name: str, slot: int, entry: Tensor) -> None:
        """Put ``entry`` into line ``slot`` of the table ``name``, where it lies."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@dataclass(frozen=True)
class RankGraph:
    """One rank's graph of one bucket, to be loaded: the directory, its entry in the manifest, and where its tensors
    are. Other entries of ``states`` and ``weights`` are ignored."""

    directory: Path
    spec: GraphSpec
    states: Mapping[str, Any]
    weights: Mapping[str, Any]


class Executable(Protocol):
    """A loaded graph, of the one rank or of all ranks that its process runs."""

    graph: GraphFile
    """That of the first rank."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run once. ``inputs`` are host tensors in the order of ``graph.inputs``; returns the first rank's outputs, on
        the host, in the order of ``graph.outputs``.

        States take their new values. Raises InputMismatchError when an input's count, dtype or shape is not the traced
        one (a stride that differs is made contiguous first).
        """
        ...

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that runs on what these very tensors hold then; they are checked now, as by a call."""
        ...

    def update_weights(self, weights: Mapping[str, Any], rank: int = 0) -> None:
        """Read these from the next call on (names of ``graph.weights``; others keep what they have). ``rank``: which
        of the process's ranks, by its place.

        Raises WeightSchemaError when dtype, shape or stride differ. A change made *inside* a tensor is seen at once
        and needs no call.
        """
        ...

    def close(self) -> None:
        """Let go of code, states and weights. A call afterwards raises ModelClosedError."""
        ...


class Backend(Protocol):
    """A way to compile and run graphs."""

    name: str
    native: bool
    """Whether its graphs call this package's native operators and read packed weights."""
    one_process: bool
    """Whether one process runs all ranks, with collectives of the backend's own; else each rank has its own process."""
    one_program: bool
    """Whether all ranks run one graph: a model whose ranks need different ones is refused when it is traced."""
    compiles: bool
    """Whether graphs are compiled, in processes of their own and with a cache; False when a stored graph is run."""
    cross_compiles: bool
    """Whether it compiles for machines that are not this one; what it made is not asked to run here then."""
    neuron_arguments: bool
    """Whether words that are written for neuronx-cc are options of its own (:mod:`.compiler_args`), or mean nothing."""
    kept: tuple[str, ...]
    """Files of a compiled graph that ``compiler_workdir`` gets too, whether it was compiled or taken from the cache."""

    def probe(self) -> Availability:
        """Whether it can run here. Imports what it needs; never raises."""
        ...

    def probe_compiler(self) -> Availability:
        """Whether models can be traced for it here; loading may need less."""
        ...

    def has_option(self, name: str) -> bool:
        """Whether :meth:`options` takes one of this name."""
        ...

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        """The user's options (``compiler_args``), checked and completed, as data for JSON; ``quantize`` is one of them.
        Compiled code depends on all of them. Raises TraceConfigError by name."""
        ...

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Before any rank is traced: build what tracing needs. Raises BackendUnavailableError, and TraceConfigError for
        a degree that it cannot run."""
        ...

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        """From the canonical graphs of one rank's buckets to what is compiled of them. A pure function: the same graphs
        and options give the same, on every rank. Raises TraceError for what the backend cannot run."""
        ...

    def environment(self, workdir: Path) -> Mapping[str, str]:
        """Variables of a process that compiles; what the compiler writes goes below ``workdir``."""
        ...

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        """Add the compiled code to a directory that :meth:`passes` has filled; needs no weight. This process is one
        made for it. Raises TraceError with the compiler's own words."""
        ...

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``manifest.target``: what the compiled code needs of a machine."""
        ...

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Raise ArtifactVersionError when code compiled for ``target`` under ``versions`` cannot run here; its text
        goes on from "the artifact ...". ArtifactCorruptError for a target that nobody wrote."""
        ...

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        """Put one rank's weights, out of its file, and its states, as they begin, where graphs find them."""
        ...

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        """Load one bucket's graph for the ranks of this process, the one or all: no model code, no compiler.

        Raises ArtifactCorruptError when a directory is not that graph, InputMismatchError or WeightSchemaError when a
        state's or weight's dtype, shape or stride is not the traced one.
        """
        ...
