"""How the weights of an artifact are assembled from logical tensors: the content of ``manifest.layout``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_infer.layout import ParamLayout


def describe_layout(layouts: Mapping[str, ParamLayout], degree: int) -> dict[str, Any]:
    """Return ``manifest.layout`` for layouts with absolute logical names (``layout.weight_layout``)."""
    return {
        "weights": {
            name: {
                "logical": {key: list(shape) for key, shape in layout.logical_shapes.items()},
                "ranks": [layout.rank_layout(degree, rank).to_json() for rank in range(degree)],
                **({"alias_of": layout.alias_of} if layout.alias_of else {}),
            }
            for name, layout in layouts.items()
        }
    }
