"""What neuronx-cc compiles: a graph's HLO within the documented limits, with the states that it writes in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nxd_infer.backends.hlo.files import HLO_FILE, PARTS_FILE, HloFile, PartsFile, read
from nxd_infer.backends.hlo.module import Module
from nxd_infer.backends.neuron import compiler, lint, runtime
from nxd_infer.errors import TraceError
from nxd_infer.graph.stored import GraphFile, read_graph
from nxd_infer.util.dtypes import dtype_name, dtype_of

_ALIASES, _ENTRY = 8, 1
"""Fields of HloModuleProto and of its HloInputOutputAliasProto."""
_RESULT, _PARAMETER, _KIND, _MUST = 1, 2, 4, 2
"""Fields of an entry, and the kind of one that is more than a permission."""


def check_types(parts: PartsFile, table: HloFile) -> None:
    """Raise TraceError for a type that a core computes in, and that no tensor of the runtime's has."""
    for spec in [*table.parameters, *parts.results]:
        if dtype_of(spec.dtype) not in runtime.TYPES:
            raise TraceError(
                f"{spec.name} is {spec.dtype}{spec.shape}, and the Neuron runtime has no tensors of that type: take or "
                f"return one of {', '.join(map(dtype_name, runtime.TYPES))}, and convert inside the model"
            )


def lower_directory(graph_dir: Path) -> None:
    """Write the compiler's input beside the graph. Raises TraceError for HLO that breaks a documented limit."""
    graph, parts = read_graph(graph_dir), read(graph_dir, PARTS_FILE, PartsFile)

    def look(module: Module, table: HloFile) -> None:
        lint.check(module, aliases_of(graph, parts, table))
        check_types(parts, table)

    from nxd_infer.backends.hlo import lower  # imports torch_xla

    table = lower.lower_directory(graph_dir, look)
    module = (graph_dir / HLO_FILE).read_bytes()
    (graph_dir / compiler.INPUT).write_bytes(with_aliases(module, aliases_of(graph, parts, table)))


# --- a state's new value takes the memory of the old one ---------------------------------------------


def aliases_of(graph: GraphFile, parts: PartsFile, table: HloFile) -> dict[int, int]:
    """The number of the parameter whose memory takes each such result, by the result's number.

    Raises TraceError for a state of the body that cannot be kept so.
    """
    parameters = {spec.name: number for number, spec in enumerate(table.parameters)}
    results = {spec.name: number for number, spec in enumerate(parts.results)}
    aliases: dict[int, int] = {}
    for spec, given, new in zip(graph.states, parts.given, parts.new_states, strict=False):
        if given not in parts.body.takes or new == given:
            continue
        if new not in results or new in parts.fetched or results[new] in aliases:
            raise TraceError(
                f"the new value of the state {spec.name!r} is also an output, another state's value or an input, and a "
                "NeuronCore keeps it in the state's own memory: return a copy of it (.clone())"
            )
        if given not in parameters:
            raise TraceError(
                f"the state {spec.name!r} is replaced without being read, so that the graph does not take it, and its "
                "new value has no memory to go to on a NeuronCore: make it an input and an output of the call"
            )
        aliases[results[new]] = parameters[given]
    return aliases


def with_aliases(hlo: bytes, aliases: Mapping[int, int]) -> bytes:
    """The module that says so itself. A field that is appended to a message of protobuf's is merged with it."""
    entries = b""
    for result, parameter in aliases.items():
        entry = _bytes(_RESULT, _varint(result)) + _number(_PARAMETER, parameter) + _number(_KIND, _MUST)
        entries += _bytes(_ENTRY, entry)
    return hlo + _bytes(_ALIASES, entries)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
