"""Fake tensors for a graph that was read from a file: what every pass reads shapes and dtypes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.errors import ArtifactCorruptError


def propagate(module: fx.GraphModule, specs: Sequence[TensorSpec]) -> None:
    """Give every node its fake value in ``meta["val"]``, from the ``specs`` of the placeholders on.

    Raises ArtifactCorruptError for a graph that cannot run on tensors of these specs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype) for spec in specs]
        try:
            _run(module, values)
        except Exception as error:  # whatever its operators say to arguments that no graph of ours has
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
