"""The interface of a backend: its properties, as data, and the calls that compile, place and run graphs.

A backend is one folder here and one line in :mod:`nxd_infer.backends.registry`, or a package of others that the
registry finds. No code elsewhere knows which backends exist. Importing a backend's module should be cheap, because
processes without torch read its data and call :meth:`Backend.check_target`.

A compiled graph is a directory ``graphs/<digest>/`` with ``graph.json`` (:class:`GraphFile`: the specs of all the
graph's tensors, in order), ``ir.json`` (the graph itself, from which any backend can compile it again) and the
backend's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxd_infer.artifact.manifest import GraphSpec, Manifest
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ArtifactVersionError, TraceConfigError
from nxd_infer.graph.stored import GraphFile, Lowered

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.graph.canonical import Graph


@dataclass(frozen=True)
class Availability:
    """Whether something can run here, and what there is of it; ``nxd-infer doctor`` shows all of it."""

    ok: bool
    reason: str = ""
    """If not, why, and what to do: one sentence, as a user reads it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages it needs, by name."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """What it runs on here, with the cores of each that models may use."""
    limits: str = ""
    """What it cannot do here although it runs, and why: one sentence, or "" for nothing."""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Quantization:
    """A form of weights that a backend rounds."""

    name: str
    """The value of ``quantize`` that asks for it."""
    encoding: str
    """What ``WeightSpec.encoding`` says of such a weight."""
    rounded: Callable[[Tensor], Tensor]
    """Returns the values (float32) that graphs compute with for a rank's weight of any floating-point dtype."""
    nbytes: Callable[[Sequence[int]], int]
    """Returns the bytes of a weight of that shape in memory."""


class RankRuntime(Protocol):
    """What a process of ranks provides to its backend."""

    @property
    def context(self) -> ParallelContext:
        """The rank of this process (the first, if it runs all); its transport executes collectives outside graphs."""
        ...

    @property
    def threads(self) -> int:
        """Threads per rank."""
        ...

    def library(self, content_hash: str) -> Any:
        """Return the operator library of that hash, registered and connected. Raises ArtifactError if that fails."""
        ...


class Placement(Protocol):
    """The states and weights of one rank in memory, shared by the graphs of all its buckets."""

    states: dict[str, Any]
    weights: dict[str, Any]

    def reset_states(self) -> None:
        """Reset every state to its traced value, in place."""
        ...

    def replace_weights(self, names: Sequence[str], read: Callable[[str], Tensor]) -> Mapping[str, Any]:
        """Replace weights by new ones; ``read(name)`` returns each as stored in the weight file.

        Returns the weights that moved to another address, which executables must be given
        (:meth:`Executable.update_weights`).
        """
        ...

    def replace_entry(self, name: str, slot: int, entry: Tensor) -> None:
        """Copy ``entry`` into row ``slot`` of the table ``name``, in place."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@dataclass(frozen=True)
class RankGraph:
    """One rank's graph of one bucket, to be loaded: its directory, its entry in the manifest, and the addresses of its
    tensors. Other entries of ``states`` and ``weights`` are ignored."""

    directory: Path
    spec: GraphSpec
    states: Mapping[str, Any]
    weights: Mapping[str, Any]


class Executable(Protocol):
    """A loaded graph, of one rank or of all ranks of its process."""

    graph: GraphFile
    """The graph of the first rank."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run once. ``inputs`` are host tensors in the order of ``graph.inputs``; returns the first rank's outputs, on
        the host, in the order of ``graph.outputs``.

        States take their new values. Raises InputMismatchError if an input's count, dtype or shape is not the traced
        one (an input with another stride is made contiguous first).
        """
        ...

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Return a function that runs on these tensors' contents at that time; they are checked now, as by a call."""
        ...

    def update_weights(self, weights: Mapping[str, Any], rank: int = 0) -> None:
        """Use these weights from the next call on (names of ``graph.weights``; others stay). ``rank``: the index among
        the process's ranks.

        Raises WeightSchemaError if dtype, shape or stride differ. A change *inside* a tensor takes effect immediately,
        without this call.
        """
        ...

    def close(self) -> None:
        """Release code, states and weights. A later call raises ModelClosedError."""
        ...


class Backend(Protocol):
    """A way to compile and run graphs. A class that inherits from this one may leave out what has a value here, or does
    nothing."""

    name: str
    native: bool = False
    """Whether its graphs call this package's native operators and read packed weights."""
    one_process: bool = False
    """Whether one process runs all ranks, with the backend's own collectives; else each rank has its own process."""
    one_program: bool = False
    """Whether all ranks run one graph: a model whose ranks need different ones is refused when it is traced."""
    compiles: bool
    """Whether graphs are compiled, in separate processes and with a cache; False if stored graphs are run directly."""
    cross_compiles: bool = False
    """Whether it compiles for other machines; then its results need not be able to run here."""
    neuron_arguments: bool = False
    """Whether arguments for neuronx-cc are options of this backend (:mod:`.compiler_args`); else they are ignored."""
    target_option: str = ""
    """The option that chooses the machine to compile for; "" if there is no choice."""
    targets: tuple[str, ...] = ()
    """Its values."""
    encodings: frozenset[str] = frozenset()
    """Forms in which its graphs read weights, besides "" for the stored one (``WeightSpec.encoding``)."""
    quantizations: Mapping[str, Quantization] = {}
    """Values of ``quantize``: the encodings that round weights."""
    unpacked: Mapping[str, Any] = {}
    """Options with which graphs read all weights in the stored form; empty if they always do."""
    kept: tuple[str, ...] = ()
    """The files of a graph that ``compiler_workdir`` gets, compiled now or taken from the cache; empty: all of them."""

    def probe(self) -> Availability:
        """Return whether it can run here. Imports what it needs; never raises."""
        ...

    def probe_compiler(self) -> Availability:
        """Return whether models can be traced for it here; loading may need less. Default: whether it can run."""
        return self.probe()

    def has_option(self, name: str) -> bool:
        """Whether :meth:`options` accepts an option of this name."""
        return False

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        """Return the user's options (``compiler_args``), checked and completed, as JSON data; includes ``quantize``.
        Compiled code depends on all of them. Raises TraceConfigError by name.

        ``quantize``: one of :attr:`quantizations`, or None."""
        ...

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Build what tracing needs, before any rank is traced. Raises BackendUnavailableError, and TraceConfigError for
        a degree that it cannot run."""

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        """Convert the canonical graphs of one rank's buckets to what is compiled. A pure function: equal graphs and
        options give equal results on every rank. Raises TraceError for what the backend cannot run."""
        ...

    def environment(self, workdir: Path) -> Mapping[str, str]:
        """Return the environment variables of compile processes; the compiler's files go below ``workdir``."""
        return {}

    def compiler(self) -> str:
        """Return the compiler's name and version: a cached graph is used only with the one that compiled it. Called
        only if ``compiles``."""
        return ""

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        """Add the compiled code to a directory that :meth:`passes` has filled; needs no weights. Called in a process
        created for it, only if ``compiles``. Raises TraceError with the compiler's message."""

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``manifest.target``: the machine that the compiled code needs."""
        ...

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Raise ArtifactVersionError if code compiled for ``target`` under ``versions`` cannot run here; its text
        continues "the artifact ...". ArtifactCorruptError for an invalid target."""
        ...

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        """Load one rank's weights from its file, and its initial states, to where graphs read them."""
        ...

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        """Load one bucket's graph for the ranks of this process, one or all: no model code, no compiler.

        Raises ArtifactCorruptError if a directory is not that graph, InputMismatchError or WeightSchemaError if a
        state's or weight's dtype, shape or stride is not the traced one.
        """
        ...


# --- rounded weights: what a model computes depends on their form, so an artifact keeps it --------------


def check_quantize(backend: Backend, quantize: Any) -> None:
    """Raise TraceConfigError if the backend has no form of that name."""
    if quantize is None or (isinstance(quantize, str) and quantize in backend.quantizations):
        return
    if not backend.quantizations:
        raise TraceConfigError(
            f"the {backend.name} backend keeps weights as they are, got quantize={quantize!r}: leave it out"
        )
    raise TraceConfigError(
        f"quantize={quantize!r} is not one of {', '.join(map(repr, backend.quantizations))}, or None"
    )


def check_encodings(path: Path, manifest: Manifest, backend: Backend) -> None:
    """Raise ArtifactVersionError if a weight of the artifact at ``path`` is read in a form that its backend lacks."""
    for weight in manifest.weights:
        if weight.encoding and weight.encoding not in backend.encodings:
            raise ArtifactVersionError(
                f"the artifact {path} reads the weight {weight.name!r} as {weight.encoding!r}, an encoding that this "
                f"version of the {backend.name} backend does not know: upgrade it"
            )


def quantization_of(manifest: Manifest, backend: Backend) -> Quantization | None:
    """Return the form that an artifact of this backend has weights in, None if all keep their values."""
    encodings = {weight.encoding for weight in manifest.weights}
    return next((form for form in backend.quantizations.values() if form.encoding in encodings), None)
