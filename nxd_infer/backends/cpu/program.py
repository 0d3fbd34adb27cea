"""A stored graph, ready to run: by a loop in C++ (``csrc/program``), without Python and without its lock, or by the one
in Python (:class:`nxd_infer.graph.ir.Program`), which is slower, where the former cannot be built.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.backends.checks import InputChecks, checked_tensors
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.errors import ArtifactCorruptError, InputMismatchError, ModelClosedError, NxdError, WeightSchemaError
from nxd_infer.graph.ir import DAMAGES, Program, Value, damaged, run_cond
from nxd_infer.graph.stored import GraphFile
from nxd_infer.native import CppLibrary

log = logging.getLogger(__name__)
SOURCES = native.SOURCES.parent / "program"
_CONSTANT, _VALUE, _VALUES, _DEFAULT = range(4)
"""Kinds of arguments, as ``csrc/program/program.h`` has them."""
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""torch's own numbers of them, as its operators take them."""


class Runs(Protocol):
    """What :class:`CpuExecutable` calls, with lists."""

    def hold(self, states: list[Tensor], weights: list[Tensor]) -> None:
        """Use these in all later runs."""
        ...

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs."""
        ...


class InPython:
    """A graph that Python's loop runs."""

    def __init__(self, program: Program):
        self._program = program
        self._states: list[Tensor] = []
        self._weights: list[Tensor] = []

    def hold(self, states: list[Tensor], weights: list[Tensor]) -> None:
        self._states, self._weights = states, weights

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return self._program(*self._states, *inputs, *self._weights)


def native_program(program: Program) -> Runs:
    """Return a graph that C++ runs; only where :func:`prepare` returns True. Raises ArtifactCorruptError for what
    cannot be run."""
    try:
        return _converted(program, _registered())
    except DAMAGES as error:
        raise damaged(error) from error


def load(ir: dict[str, Any]) -> Runs:
    """Return the graph ready to run. Raises ArtifactCorruptError if it is not one."""
    program = Program(ir)
    if prepare():
        try:
            return native_program(program)
        except ArtifactCorruptError as error:  # if it is, Python's loop says so when it gets there
            log.warning("a graph is run by the slower loop in Python: %s", error)
    return InPython(program)


def prepare() -> bool:
    """Build the loop unless it is built; return whether there is one."""
    return _registered() is not None


def library() -> CppLibrary:
    """Return the loop's sources. It calls torch's C++ interface, so it belongs to one release of torch, and to this
    package rather than to artifacts."""
    return CppLibrary(
        folder=SOURCES,
        kind="loop of native programs",
        takes="half a minute on two cores",
        namespace="nxd_program",
        flags=("-O2",),
        torch=native.torch_root(),
        torch_version=torch.__version__,
        links=("-ltorch_cpu", "-lc10"),
        includes=(native.SOURCES / "interface",),
    )


@functools.cache
def _registered() -> Any | None:
    """Build and register the loop; return its class of programs, None where that fails: a cache or a compiler is not
    needed to serve."""
    try:
        if not native.availability().ok:
            return None
        built = library()
        torch.classes.load_library(str(built.built()))
        return getattr(torch.classes, f"nxd_program_{built.hash[:8]}").Program
    except (NxdError, OSError, RuntimeError) as error:
        log.warning("graphs are run by the slower loop in Python: %s", error)
        return None


def _converted(program: Program, kind: Any) -> Any:
    made = kind(program.inputs)
    for target, args, kwargs, _ in program.steps:
        if target is operator.getitem:
            value, index = args
            made.add_getitem(value.index, index)
        elif target is run_cond:
            condition, if_true, if_false, *rest = args
            branches = (_converted(branch, kind) for branch in (if_true, if_false))
            made.add_cond(condition.index, *branches, [value.index for value in (rest[0] if rest else ())])
        else:
            arguments = _arguments(target._schema, args, kwargs)
            name, overload = target._schema.name, target._schema.overload_name
            made.add_operator(name, overload, [a[0] for a in arguments], [a[1] for a in arguments])
    made.finish([value.index for value in program.outputs])
    return made


def _arguments(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int, Any]]:
    """Return an operator's arguments in the order of its schema, each with its kind."""
    parameters = schema.arguments
    positional = [parameter.name for parameter in parameters if not parameter.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{schema.name} takes {len(positional)} arguments, not {len(args)}")
    found = dict(zip(positional, args, strict=False))
    unknown = (kwargs.keys() & found.keys()) | (kwargs.keys() - {parameter.name for parameter in parameters})
    if unknown:
        raise TypeError(f"{schema.name} takes no {sorted(unknown)[0]!r} here")
    found |= kwargs
    return [_argument(found[p.name]) if p.name in found else (_DEFAULT, None) for p in parameters]


def _argument(value: Any) -> tuple[int, Any]:
    if type(value) is Value:
        return _VALUE, value.index
    if type(value) is list:
        if not value or any(type(v) is Value for v in value):
            return _VALUES, [-1 if v is None else v.index for v in value] or None
        return _CONSTANT, _tuples(value)
    return _CONSTANT, _MEMORY_FORMATS.get(value, value) if type(value) is torch.memory_format else value


def _tuples(value: Any) -> Any:
    """Lists as tuples, whose elements may be of different types."""
    return tuple(_tuples(v) for v in value) if type(value) is list else value


class CpuExecutable:
    """A loaded graph; see ``backends.Executable``."""

    def __init__(self, graph: GraphFile, states: Mapping[str, Any], weights: Mapping[str, Any], program: Runs):
        self.graph = graph
        self._program: Runs | None = program
        self._states = checked_tensors(graph.states, states, "state", InputMismatchError)
        self._specs = [encoded_spec(spec, spec.encoding) for spec in graph.weights]
        self._weights = checked_tensors(self._specs, weights, "weight", WeightSchemaError)
        self._checked = InputChecks(graph)
        program.hold(self._states, self._weights)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self.bind(inputs)()

    def bind(self, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        ready = self._checked(inputs)

        def run() -> list[Tensor]:
            return self._open().run(ready)

        return run

    def update_weights(self, weights: Mapping[str, Tensor], rank: int = 0) -> None:
        program = self._open()
        current = {spec.name: tensor for spec, tensor in zip(self._specs, self._weights, strict=True)}
        if unknown := [name for name in weights if name not in current]:
            raise WeightSchemaError(f"the graph reads no weight {unknown[0]!r}")
        self._weights = checked_tensors(self._specs, {**current, **weights}, "weight", WeightSchemaError)
        program.hold(self._states, self._weights)

    def _open(self) -> Runs:
        if self._program is None:
            raise ModelClosedError(f"graph {self.graph.digest} was closed")
        return self._program

    def close(self) -> None:
        self._program = None
        self._states, self._weights = [], []
