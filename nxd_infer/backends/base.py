"""The interface of a backend: its properties, as data, and the calls that compile, place and run graphs.

A backend is one folder here and one line in :mod:`nxd_infer.backends.registry`, or a package of others that the
registry finds. No code elsewhere knows which backends exist. Importing a backend's module should be cheap, because
processes without torch read its data and call :meth:`Backend.check_target`.

A compiled graph is a directory ``graphs/<digest>/`` with ``graph.json`` (:class:`GraphFile`: the specs of all the
graph's tensors, in order), ``ir.json`` (the graph itself, from which any backend can compile it again) and the
backend's own files.

:func:`arguments_of` makes what a backend is given of what a user wrote as ``compiler_args``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxd_infer.artifact.manifest import GraphSpec, Manifest, TensorSpec, WeightSpec
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ArtifactVersionError, TraceConfigError
from nxd_infer.graph.stored import GraphFile, Lowered
from nxd_infer.util.suggest import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.backends.base import Backend
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
    inputs: Callable[[Tensor], Tensor] | None = None
    """Returns the values of a layer's input x [..., K] that graphs multiply by; None: its own."""
    note: str = ""
    """What else a user should know of a trace with it: the rest of a sentence."""


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
    lazy_states: bool = False
    """Whether a part of a state takes memory only once it is written, such as an unused slot of a cache."""
    one_process: bool = False
    """Whether one process runs all ranks, with the backend's own collectives; else each rank has its own process."""
    one_program: bool = False
    """Whether all ranks run one graph: a model whose ranks need different ones is refused when it is traced."""
    compiles: bool
    """Whether graphs are compiled, in separate processes and with a cache; False if stored graphs are run directly."""
    cross_compiles: bool = False
    """Whether it compiles for other machines; then its results need not be able to run here."""
    neuron_arguments: bool = False
    """Whether arguments for neuronx-cc are options of this backend (:func:`arguments_of`); else they are ignored."""
    target_option: str = ""
    """The option that chooses the machine to compile for; "" if there is no choice."""
    targets: tuple[str, ...] = ()
    """Its values."""
    encodings: frozenset[str] = frozenset()
    """Forms in which its graphs read weights, besides "" for the stored one (``WeightSpec.encoding``)."""
    quantizations: Mapping[str, Quantization] = {}
    """Values of ``quantize``: the encodings that round weights; those with more loss last."""
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

    def encoded(self, spec: WeightSpec) -> TensorSpec:
        """Return how graphs and packed files hold a weight of ``spec``, whose encoding is one of :attr:`encodings`;
        without any this is not called."""
        return spec

    def encode(self, spec: WeightSpec, plain: Tensor) -> Tensor:
        """Return the weight ``plain`` as :meth:`encoded` says: the same bytes on every machine."""
        return plain

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
    """Return the form that an artifact of this backend was traced with, None if all weights keep their values: of
    several the last, as a trace has some weights in a form with less loss."""
    return next(reversed(list(quantizations_of(manifest, backend).values())), None)


def quantizations_of(manifest: Manifest, backend: Backend) -> dict[str, Quantization]:
    """Return all forms in which an artifact of this backend has rounded weights, by encoding."""
    encodings = {weight.encoding for weight in manifest.weights}
    return {form.encoding: form for form in backend.quantizations.values() if form.encoding in encodings}


# --- compiler_args ------------------------------------------------------------------------------------

WORDS = "arguments"
"""The option that holds the words for neuronx-cc, of a backend that takes them."""
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
"""Blanks inside quotes belong to the word: ``--tensorizer-options='--one --two'``."""
_NEURON = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*(=.+)?|-[A-Za-z][0-9]*|-lnc(=.+)?", re.DOTALL)
"""``--model-type=transformer``, ``--auto-cast``, ``-O1``. Its names never contain a dot or an underscore."""
_VALUED = re.compile(r"--(?!enable-(saturate-infinity|mixed-precision-accumulation|fast-loading))[^=]+|-[A-Za-z]|-lnc")
"""Its words that may be followed by a value as the next word: it has more than are documented."""
_LEVELS, _CORES = ("1", "2", "3"), ("1", "2")
VALUES = {
    "--model-type": ("generic", "transformer", "unet-inference", "cnn-training"),
    "--auto-cast": ("none", "matmult", "all"),
    "--auto-cast-type": ("bf16", "fp16", "tf32", "fp8_e4m3"),
    "--native-int64": ("default", "enabled", "disabled"),
    "--target": ("inf2", "trn1", "trn1n", "trn2", "trn3"),
    **dict.fromkeys(("--optlevel", "-O"), _LEVELS),
    **dict.fromkeys(("--logical-nc-config", "--lnc", "-lnc"), _CORES),
}
"""The values of its options that have a closed set of them. Not ``--verbose``, which also takes numbers, nor
``--distribution-strategy``, whose values differ from release to release.

Source: Neuron Compiler CLI Reference Guide; ``cnn-training``, ``trn3`` and ``--lnc`` are in use and not in it.
"""
DOCUMENTED = (
    *VALUES,
    "--distribution-strategy",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
    "--enable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--framework",
    "--logfile",
    "--output",
    "--verbose",
)
"""The options in its reference guide. Others are in use, so an unknown one is told only if it looks like these."""
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def arguments_of(compiler_args: Any, backend: Backend, target: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """What ``backend.options`` is given, and the words that mean nothing to it. Raises TraceConfigError."""
    options, words = split_arguments(compiler_args, backend.has_option)
    require_known_values(words)
    if target is not None:
        if not backend.target_option:
            raise TraceConfigError(
                f"the {backend.name} backend has no choice of machines, got target={target!r}: leave it out"
            )
        if options.setdefault(backend.target_option, target) != target:
            raise TraceConfigError(
                f"target={target!r} and compiler_args, {backend.target_option}={options[backend.target_option]!r}, "
                "say two things: leave one out"
            )
    if not backend.neuron_arguments:
        return options, words
    return {**options, WORDS: [*options.get(WORDS, ()), *words]}, []


def split_arguments(compiler_args: Any, has_option: Callable[[str], bool]) -> tuple[dict[str, Any], list[str]]:
    """Return the backend's options by name, and the words for the Neuron compiler.

    A dictionary holds only options of the backend. In text and in lists, ``key=value`` is an option, and so is
    ``--key=value`` if the backend ``has_option(key)`` (``--nxd-packed=false`` is ``nxd_packed``). Another word in
    the form of a neuronx-cc argument belongs to that compiler, with its value (``-O 1``). Raises TraceConfigError for
    any other word.
    """
    if compiler_args is None or isinstance(compiler_args, Mapping):
        return {str(key): value for key, value in (compiler_args or {}).items()}, []
    options: dict[str, Any] = {}
    neuron: list[str] = []
    takes_value = False
    for word in _words(compiler_args):
        key, equals, value = word.removeprefix("--").partition("=")
        if value and has_option(key.replace("-", "_")):
            options[key.replace("-", "_")] = _value(value)
        elif _NEURON.fullmatch(word):
            neuron.append(word)
            takes_value = _VALUED.fullmatch(word) is not None
            continue
        elif takes_value and not equals and not word.startswith("-"):
            neuron.append(word)
        elif key and value and not key.startswith("-"):
            options[key] = _value(value)  # the backend rejects it
        else:
            raise TraceConfigError(
                f"compiler_args: {word!r} is neither key=value, an option of the backend such as nxd_packed=False, nor "
                "an argument of neuronx-cc such as --model-type=transformer or -O1, nor the value of the one before "
                "it: correct it or leave it out"
            )
        takes_value = False
    return options, neuron


def require_known_values(words: list[str]) -> None:
    """Raise TraceConfigError for a value that neuronx-cc does not have. Options that VALUES lacks may have any.

    Warns of an option that looks like a misspelled one: a backend without that compiler would pass over it in silence.
    """
    for word, following in pairwise([*words, ""]):
        joined = re.fullmatch(r"-O=?(.+)", word)
        name, equals, value = ("-O", "", joined[1]) if joined else word.partition("=")
        value = value or ("" if equals or following.startswith("-") else following)
        if name.startswith("--") and name not in DOCUMENTED and (hint := did_you_mean(name, DOCUMENTED)):
            warnings.warn(f"compiler_args: {name} is not in the reference of neuronx-cc{hint}", stacklevel=2)
        known = VALUES.get(name, ())
        if value and known and value not in known:
            raise TraceConfigError(
                f"compiler_args: {name} of neuronx-cc takes {', '.join(known)}; got {value!r}"
                + did_you_mean(value, known)
            )


def _words(compiler_args: Any) -> list[str]:
    if isinstance(compiler_args, str):
        if rest := _WORD.sub("", compiler_args).strip():
            raise TraceConfigError(f"compiler_args: the quotation mark {rest[0]} is not closed in {compiler_args!r}")
        return _WORD.findall(compiler_args)
    if isinstance(compiler_args, Iterable):
        return [str(word) for word in compiler_args]
    raise TraceConfigError(
        f"compiler_args must be a dictionary, a list of words or a text of them, got {compiler_args!r}"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(_CONSTANTS.get(text, text))
    except ValueError:
        return text
