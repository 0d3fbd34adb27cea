"""What a backend is. The compile side calls ``lower`` and ``compile``; a rank process calls ``load`` and runs.

The canonical record of a graph is ``(states, inputs) -> (outputs, state updates)``. The inductor and eager backends
take its *mutating* form: the states are tensors the caller owns, and a call changes them in place.

A compiled graph is a directory ``graphs/<digest>/`` that holds ``graph.json`` (:class:`GraphFile`: the specs of every
tensor the graph takes, in order), ``ir.json`` (the weightless intermediate representation, from which any backend can
be compiled again) and whatever the backend adds (``inductor/``: an unpacked AOTInductor package).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxd_infer.artifact.manifest import GraphSpec
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ArtifactBackendError
from nxd_infer.graph.stored import GraphFile

if TYPE_CHECKING:
    from torch import Tensor


_MODULES = {"inductor": "nxd_infer.backends.cpu.inductor", "eager": "nxd_infer.backends.cpu.eager"}


@dataclass(frozen=True)
class Availability:
    """Whether something can run here, and if not, why: ``reason`` is the text a user sees."""

    ok: bool
    reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok


class RankRuntime(Protocol):
    """What a rank process offers the graphs it loads."""

    @property
    def context(self) -> ParallelContext:
        """This rank; graphs without native collectives run theirs on its transport."""
        ...

    @property
    def threads(self) -> int:
        """Threads this rank may use."""
        ...

    def library(self, content_hash: str) -> Any:
        """The operator library of that hash, registered and connected. Raises ArtifactError when it cannot be."""
        ...


class Executable(Protocol):
    """A loaded graph. It keeps references to the states and weights it was given, and copies neither."""

    graph: GraphFile

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run once. ``inputs`` in the order of ``graph.inputs``; returns tensors in the order of ``graph.outputs``.

        States are changed in place. Raises InputMismatchError when an input's count, dtype or shape is not the traced
        one (a stride that differs is made contiguous first).
        """
        ...

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that runs on these very tensors, which are contiguous; they are checked now, as by a call."""
        ...

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read these tensors from the next call on (names of ``graph.weights``; others keep what they have).

        Raises WeightSchemaError when dtype, shape or stride differ. A change made *inside* a tensor is seen at once
        and needs no call.
        """
        ...

    def reset_states(self, initial: Mapping[str, Tensor] | None = None) -> None:
        """Put the states back: to the tensor in ``initial`` where there is one, to zeros otherwise."""
        ...

    def close(self) -> None:
        """Let go of code, states and weights. A call afterwards raises ModelClosedError."""
        ...


class Backend(Protocol):
    """A way to compile and run graphs."""

    name: str
    compiles: bool
    """Whether graphs are compiled, in processes of their own and with a cache; False when the stored graph is run."""

    def probe(self) -> Availability:
        """Whether it can run here. Imports what it needs; never raises."""
        ...

    def probe_compiler(self) -> Availability:
        """Whether models can be traced for it here; loading may need less."""
        ...

    def has_option(self, name: str) -> bool:
        """Whether :meth:`options` takes one of this name."""
        ...

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The user's options (``compiler_args``), checked and completed. Raises TraceConfigError by name."""
        ...

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``manifest.target``: what the compiled code needs of a machine."""
        ...

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Raise ArtifactVersionError when code compiled for ``target`` under ``versions`` cannot run here."""
        ...

    def compile(
        self,
        graph_dir: str | os.PathLike[str],
        options: Mapping[str, Any],
        workdir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Add the compiled code to a directory that holds ``graph.json`` and ``ir.json``; needs no weight.

        Whatever else it writes goes below ``workdir`` (a private directory that is removed, when None). Raises
        TraceError with the compiler's own words.
        """
        ...

    def load(
        self,
        graph_dir: str | os.PathLike[str],
        spec: GraphSpec,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        runtime: RankRuntime,
    ) -> Executable:
        """Load ``graphs/<digest>/``: no model code, no compiler. Other entries of ``states``/``weights`` are ignored.

        Raises ArtifactCorruptError when the directory is not that graph, InputMismatchError or WeightSchemaError when a
        state's or weight's dtype, shape or stride is not the traced one.
        """
        ...


def names() -> tuple[str, ...]:
    """The backends there are, whether they can run here or not."""
    return tuple(_MODULES)


def get(name: str) -> Backend:
    """The backend called ``name``. Raises ArtifactBackendError, listing the backends, when there is none."""
    if name not in _MODULES:
        raise ArtifactBackendError(f"there is no backend {name!r}; backends are {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[name]).BACKEND


def graph_directory(root: str | os.PathLike[str], digest: str) -> Path:
    """``<root>/graphs/<digest>``."""
    return Path(root) / "graphs" / digest
