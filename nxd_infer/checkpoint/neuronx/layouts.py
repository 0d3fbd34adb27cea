"""Infer the layouts of the tensors of a reference checkpoint, if no model is available to provide them.

Without help only the tensors themselves are known. With one tensor-parallel rank everything is unsharded; tensors that
are equal on all ranks are replicated; a vector that differs is sharded along its one dimension. A matrix that differs
may be sharded along either dimension. A constant tensor (such as a never trained bias of zeros) is equal on all ranks
whether it is sharded or not: a norm's weight is unsharded, a bias follows its layer's weight. In all other cases a
guess would be a silent mistake, so they need the layouts of a model or rules.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import AxisPlan, ParamLayout

Rules = Mapping[str, int | None]
"""Maps name patterns (``*.o_proj.weight``) to the sharded dimension, or None if replicated."""


def infer_layouts(
    archive: ReferenceArchive, rules: Rules | None = None, known: Mapping[str, ParamLayout] | None = None
) -> dict[str, ParamLayout]:
    """Return the layouts of all the model's tensors that are not in ``known``. The first matching rule applies.

    Padding cannot be recognised and stays. Raises CheckpointError listing the tensors whose layout is unknown, and for
    a rule that does not fit.
    """
    known, rules = known or {}, rules or {}
    found: dict[str, ParamLayout] = {}
    unknown: list[str] = []
    for ranks in archive.stages():
        cuts = {name: _cut_of(layout, len(ranks)) for name, layout in known.items()}
        for name in sorted(ranks[0].keys() - cuts.keys(), key=lambda name: name.endswith("bias")):  # weights first
            tensors = [rank[name] for rank in ranks if name in rank]
            dim = cuts[name] = _dimension(name, tensors, rules, cuts)
        for name in (name for name in ranks[0] if name not in found and name not in known):
            tensors, dim = [rank[name] for rank in ranks if name in rank], cuts[name]
            if dim == UNKNOWN:
                unknown.append(f"{name} {list(tensors[0].shape)}")
                continue
            shape = list(tensors[0].shape)
            axes: list[AxisPlan | int] = list(shape)
            if dim is not None:
                if not -len(shape) <= dim < len(shape):
                    raise CheckpointError(f"the rule for {name!r} cuts dimension {dim}, and its shape is {shape}")
                axes[dim] = AxisPlan.even(shape[dim] * len(ranks))
            found[name] = ParamLayout.of(axes, name)
    if unknown:
        raise CheckpointError(
            f"{archive.where}: these files do not say along which dimension a tensor was cut, and of {len(unknown)} "
            f"it cannot be seen: {', '.join(unknown[:8])}{', ...' if len(unknown) > 8 else ''} (what is one number "
            "everywhere looks alike whether it was cut or not). Give the model's "
            'directory with --config, or with --rules a JSON file such as {"*.o_proj.weight": 1, "*.weight": 0}'
        )
    return found


UNKNOWN = 1 << 30
_NORM = re.compile(r"(^|\.)(?!(q|k|v|query|key|value)_)(\w*norm(_?\d+)?|ln(_\w+|\d*))\.(weight|bias)$")
"""Norms of queries and keys are excluded: they may span all heads, and are then sharded."""


def _dimension(name: str, ranks: Sequence[Tensor], rules: Rules, cuts: Mapping[str, int | None]) -> int | None:
    """Return the sharded dimension, None, or UNKNOWN; ``cuts`` are those of the tensors seen before."""
    first = ranks[0]
    for pattern, dim in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            return dim + first.dim() if dim is not None and -first.dim() <= dim < 0 else dim
    if len(ranks) == 1 or first.dim() == 0:
        return None
    if any(not rank.equal(first) for rank in ranks[1:]):
        return 0 if first.dim() == 1 else UNKNOWN
    if _NORM.search(name) or bool((first != first.reshape(-1)[:1]).any()):
        return None
    weight = cuts.get(f"{name.removesuffix('bias')}weight", UNKNOWN) if name.endswith("bias") else UNKNOWN
    return None if weight in (None, 1) else weight


def _cut_of(layout: ParamLayout, degree: int) -> int | None:
    """Return the dimension along which a known layout is sharded."""
    whole, part = layout.rank_shape(1), layout.rank_shape(degree)
    return next((dim for dim, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]), None)


def read_rules(path: Path) -> dict[str, int | None]:
    """Read rules from a JSON file. Raises CheckpointError if it holds none."""
    try:
        rules: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} holds no rules: {error}") from error
    good = isinstance(rules, dict) and all(
        dim is None or (isinstance(dim, int) and not isinstance(dim, bool)) for dim in rules.values()
    )
    if not good:
        raise CheckpointError(
            f'{path} must be a JSON object of name patterns and dimensions, such as {{"*.o_proj.weight": 1}} (null: '
            "every rank has all of it)"
        )
    return rules
