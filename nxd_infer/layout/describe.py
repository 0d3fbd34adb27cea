"""A :class:`ParamLayout` as plain JSON and back: how a weight is sharded at any degree, stored beside the weight.

A file with only the runs of its own degree can be read at any degree; with the plans it can also be resharded to any
degree, without the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from nxd_infer.errors import NxdError, ShardingError
from nxd_infer.layout.axis_plan import AxisPlan, Fused, Padded, Recut, Replicated, Sections, Spelled
from nxd_infer.layout.gqa import GQAAxis
from nxd_infer.layout.params import ParamLayout
from nxd_infer.layout.runs import Fill, Run

KINDS = {kind.__name__: kind for kind in (Replicated, Padded, Sections, Fused, Spelled, Recut, GQAAxis, Run, Fill)}


def describe_piece(
    layout: ParamLayout, degree: int, rank: int, shape: Sequence[int], start: int, stop: int
) -> dict[str, Any]:
    """Return the record of elements ``start..stop`` of a rank's flattened tensor, which has ``shape``."""
    return {
        "range": [start, stop],
        "shape": list(shape),
        "layout": layout.rank_layout(degree, rank).to_json(),
        "logical": {logical: list(whole) for logical, whole in layout.logical_shapes.items()},
        "plans": describe_plans(layout),
    }


def describe_plans(layout: ParamLayout) -> dict[str, Any] | None:
    """Return ``{"axes": [...], "sources": [[part, logical name], ...]}``, or None for a custom plan class.

    The plans are those of one rank's experts or all: which ones a file has, its runs say.
    """
    try:
        axes = [_encode(plan) for plan in layout.of_all_experts().axes]
    except ShardingError:
        return None
    return {"axes": axes, "sources": [list(pair) for pair in layout.sources]}


def read_plans(data: Any) -> ParamLayout:
    """Invert :func:`describe_plans`. Raises ShardingError if ``data`` is not such a description."""
    try:
        axes = tuple(_decode(axis) for axis in data["axes"])
        sources = tuple((str(part), str(name)) for part, name in data["sources"])
        if not all(isinstance(axis, AxisPlan) for axis in axes):
            raise TypeError("an axis is not a plan")
        return ParamLayout(axes, sources)
    except (KeyError, TypeError, ValueError, AttributeError, NxdError) as error:
        raise ShardingError(f"not the description of a weight's plans: {error!r} in {str(data)[:200]}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$": "float", "text": str(value)}
    if isinstance(value, bool | int | float | str):
        return value
    if KINDS.get(type(value).__name__) is not type(value):
        raise ShardingError(f"a {type(value).__name__} cannot be described")
    fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"$": type(value).__name__, **fields}


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    fields = {name: _decode(value) for name, value in data.items() if name != "$"}
    if data["$"] == "float":
        return float(fields["text"])
    return KINDS[data["$"]](**fields)
