"""ModelPlan: which modules of a transformers model are split, and how; a table of name patterns.

======================  ============================================================================================
style                   the module
======================  ============================================================================================
``column``              a linear layer whose outputs are split
``row``                 a linear layer whose inputs are split like the outputs of the layer before
``vocabulary``          an embedding whose rows are split
``logits``              a linear layer whose outputs are split and gathered again
``head_bias``           an embedding with one column for each head
``attention``           computes the heads of this rank: its column layers share one input, its sizes are the rank's
``shared``              its column layers share one input
``sum``                 has whole weights that each rank uses for its own heads, so their gradients are summed
======================  ============================================================================================

``column`` and ``row`` name the axis that is split: ``q`` (heads), ``kv`` (key/value heads), ``qkv`` (the heads of q, k
and v one after another in one weight), ``qkv_by_head`` (each head's q, k and v together), ``halves`` (gate, then up in
one weight); without one, the features are split evenly. Whatever does not divide is padded, and key/value heads are
replicated where there are fewer than ranks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import ModelConfigError, ParallelConfigError
from nxd_infer.layout import AxisPlan, GQAPlan, gqa_plan

STYLES = ("attention", "column", "head_bias", "logits", "row", "shared", "sum", "vocabulary")
HEAD_AXES = ("kv", "q", "qkv", "qkv_by_head")
AXES = ("", "halves", *HEAD_AXES)


@dataclass(frozen=True)
class ModelPlan:
    """How the models of one type are split.

    A pattern matches whole names from any point of the path on: ``layers.*.mlp`` is also ``model.layers.3.mlp``. The
    first pattern that matches a module counts. Raises ParallelConfigError for a style that does not exist.
    """

    styles: Mapping[str, str]
    stacks: tuple[str, ...] = ()
    """Names of the lists of layers, for sequence and pipeline parallelism: ``("layers",)``."""
    sequence_parallel: bool = True
    pipeline_parallel: bool = True
    refused: Mapping[str, str] | None = None
    """Fields of the configuration with which the plan does not hold, and why."""

    def __post_init__(self) -> None:
        for pattern, style in self.styles.items():
            kind, _, axis = style.partition(":")
            if kind not in STYLES or axis not in AXES or (axis and kind not in ("column", "row")):
                raise ParallelConfigError(
                    f"the plan gives {pattern!r} the style {style!r}; styles are {', '.join(STYLES)}, and column and "
                    f"row may name one of the axes {', '.join(AXES[1:])}, as in 'column:kv'"
                )

    def style_of(self, name: str) -> tuple[str, str] | None:
        """Return the kind and the axis of the module called ``name``, or None if the plan does not name it."""
        style = next((style for pattern, style in self.styles.items() if matches(pattern, name)), None)
        if style is None:
            return None
        kind, _, axis = style.partition(":")
        return kind, axis

    def check(self, config: Any) -> None:
        """Raise ModelConfigError if the configuration has something that the plan does not hold for."""
        for field, why in (self.refused or {}).items():
            if value := getattr(config, field, None):
                raise ModelConfigError(f"{config.model_type}: {field} = {value!r}: {why}")


def matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model, placed on ranks."""

    placed: GQAPlan
    head_dim: int

    @classmethod
    def of(cls, config: Any, degree: int, kv_size_multiplier: int | None = None) -> Heads:
        """Place the heads of a transformers configuration. ``kv_size_multiplier``: None is the smallest that fits.

        Raises ParallelConfigError for a multiplier that does not spread the key/value heads over the ranks.
        """
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if kv_size_multiplier is None:
            return cls(gqa_plan(heads, kv_heads, degree), head_dim)
        places = kv_heads * kv_size_multiplier
        whole = isinstance(kv_size_multiplier, int) and kv_size_multiplier > 0 and places % degree == 0
        placed = gqa_plan(heads, kv_heads, degree, kv_size_multiplier=kv_size_multiplier) if whole else None
        if placed is None or placed.kv_heads_per_rank * degree != places:
            raise ParallelConfigError(
                f"kv_size_multiplier={kv_size_multiplier!r} gives {kv_heads} key/value heads {places} places, which "
                f"{heads} query heads on {degree} ranks cannot use; leave it out for the smallest one that fits"
            )
        return cls(placed, head_dim)

    def axis(self, name: str, size: int) -> AxisPlan:
        """Return the plan of an axis of ``size`` features."""
        d = self.head_dim
        if name == "q":
            return self.placed.q_axis(d)
        if name == "kv":
            return self.placed.kv_axis(d)
        if name == "qkv":
            return AxisPlan.sections([self.placed.q_axis(d), self.placed.kv_axis(d), self.placed.kv_axis(d)])
        if name == "qkv_by_head":
            return AxisPlan.heads(self.placed.heads, size // self.placed.heads)
        if name == "halves":
            return AxisPlan.sections([AxisPlan.padded(size // 2)] * 2)
        return AxisPlan.padded(size)

    def sizes(self) -> dict[str, int]:
        """Return what attention modules know of themselves, for one rank, by attribute name."""
        placed = self.placed
        width = placed.heads_per_rank * self.head_dim
        return {
            **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads"), placed.heads_per_rank),
            "num_key_value_heads": placed.kv_heads_per_rank,
            "num_key_value_groups": placed.group,
            **dict.fromkeys(("all_head_size", "dim", "inner_dim", "split_size"), width),
        }
