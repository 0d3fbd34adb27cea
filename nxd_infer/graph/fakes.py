"""Fake tensors for a graph that was read from a file, from which passes get shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.errors import ArtifactCorruptError


def propagate(module: fx.GraphModule, specs: Sequence[TensorSpec]) -> None:
    """Set ``meta["val"]`` of every node to its fake value, starting from the ``specs`` of the placeholders.

    Raises ArtifactCorruptError for a graph that cannot run on tensors of these specs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype) for spec in specs]
        try:
            _run(module, values)
        except Exception as error:  # operators may raise anything for arguments that we never write
            raise ArtifactCorruptError(f"a stored graph does not fit its tensors: {error}") from error


def _run(module: fx.GraphModule, values: Sequence[Any]) -> Any:
    given = iter(values)

    def value(node: fx.Node) -> Any:
        return node.meta["val"]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(given)
        elif node.op == "get_attr":
            continue
        elif node.op == "output":
            return fx.map_arg(node.args[0], value)
        elif node.target is torch.ops.higher_order.cond:
            _, first, other, operands = node.args
            inner = [value(operand) for operand in operands]
            results = [_run(getattr(module, str(branch.target)), inner) for branch in (first, other)]
            node.meta["val"] = results[0]
        else:
            node.meta["val"] = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
    return None
