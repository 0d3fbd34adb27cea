"""Find the layouts of the tensors of a reference checkpoint without a model: by rules, or from the tensors themselves.

With one tensor-parallel rank everything is unsharded. A tensor that is equal on all ranks is replicated, if it is not
constant, and a vector that differs is sharded. In all other cases a guess would be a silent mistake.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import AxisPlan, ParamLayout

Rules = Mapping[str, int | list[int] | None]
"""Maps name patterns (``*.o_proj.weight``) to the sharded dimension, or None if replicated.

``[dimension, stride]``: so many tensors are one along it, of each of which a rank has its part (``gate_up_proj``).
"""


def infer_layouts(archive: ReferenceArchive, rules: Rules, known: Container[str] = ()) -> dict[str, ParamLayout]:
    """Return the layouts of all the model's tensors that are not in ``known``. The first matching rule applies.

    Padding cannot be recognised and stays. Raises CheckpointError listing the tensors whose layout is unknown, and for
    a rule that does not fit.
    """
    layouts: dict[str, ParamLayout] = {}
    unknown: list[str] = []
    for ranks in archive.stages():
        for name in (name for name in ranks[0] if name not in layouts and name not in known):
            tensors = [rank[name] for rank in ranks if name in rank]
            shape = list(tensors[0].shape)
            axes: list[AxisPlan | int] = list(shape)
            matching = [rule for pattern, rule in rules.items() if fnmatch.fnmatchcase(name, pattern)]
            rule = matching[0] if matching else None
            dim, stride = rule if isinstance(rule, list) else (rule, 1)
            if matching and dim is not None and not -len(shape) <= dim < len(shape):
                raise CheckpointError(f"the rule for {name!r} cuts dimension {dim}, and its shape is {shape}")
            if not matching and not _replicated(tensors):
                if len(shape) != 1 or tensors[0].equal(tensors[1]):
                    unknown.append(f"{name} {shape}")
                    continue
                dim = 0
            if dim is not None:
                axes[dim] = AxisPlan.strided(shape[dim] * len(ranks), stride)
            layouts[name] = ParamLayout.of(axes, name)
    if unknown:
        raise CheckpointError(
            f"{archive.where}: these files do not say along which dimension a tensor was cut, and of {len(unknown)} "
            f"it cannot be seen: {', '.join(unknown[:8])}{', ...' if len(unknown) > 8 else ''} (what is one number "
            "everywhere looks alike whether it was cut or not). Give the model's "
            'directory with --config, or with --rules a JSON file such as {"*.o_proj.weight": 1, "*.weight": 0}'
        )
    return layouts


def _replicated(ranks: Sequence[Tensor]) -> bool:
    """Whether the tensors of all ranks show that each has all of it."""
    first = ranks[0]
    if len(ranks) == 1 or first.dim() == 0:
        return True
    constant = bool((first == first.reshape(-1)[:1]).all())
    return not constant and all(rank.equal(first) for rank in ranks[1:])


def read_rules(path: Path) -> Rules:
    """Read rules from a JSON file. Raises CheckpointError if it holds none."""
    try:
        rules: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} holds no rules: {error}") from error
    good = isinstance(rules, dict) and all(rule is None or _is_rule(rule) for rule in rules.values())
    if not good:
        raise CheckpointError(
            f'{path} must be a JSON object of name patterns and dimensions, such as {{"*.o_proj.weight": 1}} (null: '
            "every rank has all of it; [dimension, stride]: so many tensors in one, as gate_up_proj has [0, 2])"
        )
    return rules


def _is_rule(rule: Any) -> bool:
    numbers = rule if isinstance(rule, list) and len(rule) == 2 else [rule, 1]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in numbers) and numbers[1] >= 1
