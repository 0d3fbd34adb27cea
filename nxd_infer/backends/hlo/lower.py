"""Lower a graph's body to HLO, once for all ranks: in a process with one device, none of which any rank's is.

The stored body is run on tensors without memory, so that torch_xla records it; nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from nxd_infer.backends.hlo import xla_api as xla
from nxd_infer.backends.hlo.collectives import check_collectives, collectives_of
from nxd_infer.backends.hlo.files import BODY_FILE, HLO_FILE, HLO_TABLE, PARTS_FILE, HloFile, PartsFile, Value, read
from nxd_infer.backends.hlo.module import Module
from nxd_infer.backends.hlo.parts import TOKEN, value
from nxd_infer.errors import TraceError
from nxd_infer.graph.ir import ir_to_graph
from nxd_infer.graph.passes import aten
from nxd_infer.graph.stored import read_graph, read_ir
from nxd_infer.util.dtypes import dtype_of

Look = Callable[[Module, HloFile], None]
"""Is given a module and its table, to refuse it."""


def lower_directory(graph_dir: Path, look: Look = lambda module, table: None) -> HloFile:
    """Write ``body.hlo`` and ``hlo.json`` of a directory that :func:`.parts.lower_graphs` has filled.

    Raises TraceError for an operator that the device has not, and for HLO whose collectives are not the graph's. Some
    operators end the process instead, so each is written to standard error before it is recorded.
    """
    parts = read(graph_dir, PARTS_FILE, PartsFile)
    body = ir_to_graph(read_ir(graph_dir, BODY_FILE))
    xla.forget_metrics()
    given = [xla.parameter(spec.device_shape, dtype_of(spec.dtype)) for spec in parts.specs]
    try:
        with torch.no_grad(), xla.numbers_as_constants():
            arguments = [tensor.reshape(spec.shape) for tensor, spec in zip(given, parts.specs, strict=True)]
            results = _Recorder(body).run(*arguments)
            lowering = xla.Lowering([result.reshape(list(result.shape) or [1]) for result in results])
    except (RuntimeError, ValueError) as error:
        raise TraceError(f"XLA has no such operator as the graph needs: {error}") from error
    if left := xla.left_the_device():
        raise TraceError(
            f"{', '.join(left)}: XLA has no such operator, or needs its value while the program is made; write the "
            "model without it"
        )
    made = [value(name, result) for name, result in zip(parts.body.gives, results, strict=True)]
    if wrong := [pair for pair in zip(made, parts.results, strict=True) if pair[0] != pair[1]]:
        actual, expected = wrong[0]
        raise TraceError(
            f"XLA computes {actual.dtype}{actual.shape} where torch computes {expected.dtype}{expected.shape}; cast "
            "the result, or write the model without the operator that widens it"
        )
    named = {spec.name: tensor for spec, tensor in zip(parts.specs, given, strict=True)}
    table = HloFile(parameters=_parameters(lowering, named, {spec.name: spec for spec in parts.specs}))
    module = Module(lowering.json())
    look(module, table)
    check_collectives(collectives_of(module), read_graph(graph_dir).collectives)
    (graph_dir / HLO_FILE).write_bytes(lowering.hlo())
    (graph_dir / HLO_TABLE).write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return table


def _parameters(lowering: xla.Lowering, given: dict[str, Tensor], specs: dict[str, Value]) -> list[Value]:
    """Return the table of names. Unused inputs do not appear; one that was not given is the collectives' token."""
    names = {lowering.number(tensor): name for name, tensor in given.items()}
    found: list[Value] = []
    for number, tensor in sorted(lowering.parameters().items()):
        if number in names:
            found.append(specs[names[number]])
        elif tensor.dtype == torch.float32 and tensor.dim() == 0:
            found.append(value(TOKEN, tensor))
        else:
            raise TraceError(
                f"the HLO takes {tensor.dtype}{list(tensor.shape)} as parameter {number}, which is neither a state, "
                "an input, a weight nor the rank"
            )
    return found


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """For a bound that is left out, torch_xla writes the largest number of 64 bits, which not every device has."""
    if x.is_floating_point() or (low is not None and high is not None):
        return aten.clamp.default(x, low, high)
    limit: Any = high if low is None else low
    bound = torch.full((), limit, dtype=x.dtype, device=x.device)
    return torch.minimum(x, bound) if low is None else torch.maximum(x, bound)


_RECORDED = {
    **xla.COLLECTIVES,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
}
"""What is recorded in place of an operator."""


class _Recorder(fx.Interpreter):
    """Runs a graph with the device's collectives in place of the operators that name an axis."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        print(f"lowering {target}", file=sys.stderr, flush=True)
        return super().call_function(_RECORDED.get(target, target), args, kwargs)
