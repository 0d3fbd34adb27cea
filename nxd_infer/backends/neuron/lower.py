"""What neuronx-cc compiles: a graph's HLO within the documented limits, with the states that it writes in place."""

from __future__ import annotations

from pathlib import Path

from nxd_infer.backends import hlo
from nxd_infer.backends.hlo.files import HLO_FILE, PARTS_FILE, HloFile, PartsFile, read
from nxd_infer.backends.neuron import compiler, lint, runtime
from nxd_infer.backends.neuron.aliases import aliases_of, with_aliases
from nxd_infer.backends.neuron.hlo import Module
from nxd_infer.errors import TraceError
from nxd_infer.graph.stored import read_graph
from nxd_infer.util.dtypes import dtype_name, dtype_of


def check_types(table: HloFile) -> None:
    """Raise TraceError for a type that a core computes in, and that no tensor of the runtime's has."""
    for spec in [*table.parameters, *table.results]:
        if dtype_of(spec.dtype) not in runtime.TYPES:
            raise TraceError(
                f"{spec.name} is {spec.dtype}{spec.shape}, and the Neuron runtime has no tensors of that type: take or "
                f"return one of {', '.join(map(dtype_name, runtime.TYPES))}, and convert inside the model"
            )


def lower_directory(graph_dir: Path) -> None:
    """Write the compiler's input beside the graph. Raises TraceError for HLO that breaks a documented limit."""
    graph, parts = read_graph(graph_dir), read(graph_dir, PARTS_FILE, PartsFile)

    def look(module: str, table: HloFile) -> None:
        lint.check(Module(module), aliases_of(graph, parts, table))
        check_types(table)

    table = hlo.lower.lower_directory(graph_dir, look)
    module = (graph_dir / HLO_FILE).read_bytes()
    (graph_dir / compiler.INPUT).write_bytes(with_aliases(module, aliases_of(graph, parts, table)))
