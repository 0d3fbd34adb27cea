"""compressed-tensors, as llm-compressor writes it: integers, packed or in bytes, and eight-bit floats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from nxd_infer.hugging_face.quantized.fields import AnyCase, Block, Fields
from nxd_infer.hugging_face.quantized.layers import NO_ACTIVATIONS, Layer, Stored, matrix, misfit, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource

PACKED = "pack-quantized"
Form = Literal["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"]


class Weights(Fields):
    num_bits: Literal[2, 4, 8] = 8
    symmetric: bool = True
    strategy: Annotated[Literal["tensor", "channel", "group", "block"], AnyCase] = "group"
    group_size: int = 0
    block_structure: Block | None = None


class Group(Fields):
    """How the weights of some layers are stored; None: they are not."""

    targets: list[re.Pattern[str]] = []
    """Names of modules or of their classes, or "re:" and a pattern of names."""
    weights: Weights | None = None
    format: Form | None = None

    def rank(self, module: str) -> int:
        """Return how closely the group names a module, 0 best."""
        names = [target.pattern for target in self.targets]
        if module in names:
            return 0
        patterns = (one.removeprefix("re:") for one in names if one.startswith("re:"))
        return 1 if any(re.match(pattern, module) for pattern in patterns) else 2 if "Linear" in names else 3


class Sparsity(Fields):
    format: Literal["dense"] = "dense"


class CompressedTensors(Fields):
    parts: ClassVar = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )
    format: Form
    config_groups: dict[str, Group] = {}
    sparsity_config: Sparsity = Sparsity()
    transform_config: Annotated[dict[str, Any], Field(max_length=0)] = {}
    kv_cache_scheme: Any = None

    @property
    def notes(self) -> tuple[str, ...]:
        return (NO_ACTIVATIONS, *(["keys and values are not rounded"] if self.kv_cache_scheme else []))

    @property
    def _schemes(self) -> list[tuple[Group, Weights]]:
        return [(group, group.weights) for group in self.config_groups.values() if group.weights]

    def __str__(self) -> str:
        kinds = dict.fromkeys(f"{one.format or self.format}, {of.num_bits} bits" for one, of in self._schemes)
        return f"compressed-tensors ({'; '.join(kinds) or 'plain'})"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        for module in modules(source, "weight_scale"):
            ranked = sorted(self._schemes, key=lambda one: one[0].rank(module))
            if not ranked or (len(ranked) > 1 and ranked[0][0].rank(module) == 3):
                raise misfit(module, "it has a weight_scale, and no group of config_groups names it")
            group, weights = ranked[0]
            yield self._layer(source, module, weights, (group.format or self.format) == PACKED)

    def _layer(self, source: WeightSource, module: str, weights: Weights, packed: bool) -> Layer:
        bits, offset = (weights.num_bits, 1 << (weights.num_bits - 1)) if packed else (0, 0)
        levels = Stored(f"{module}.weight{'_packed' * packed}", bits, offset=offset)
        zeros = None if weights.symmetric else Stored(f"{module}.weight_zero_point", bits, 0, offset=offset)
        kind = str(source.dtype(levels.name)).removeprefix("torch.")
        if kind not in (("int32",) if packed else ("int8", "float8_e4m3fn")):
            raise misfit(levels.name, f"it is {kind}, so it is not compressed")
        rows, columns = matrix(source, levels.name)
        if packed:
            rows, columns = (*source.read(f"{module}.weight_shape").long().flatten().tolist(), 0, 0)[:2]
        scales = Stored(f"{module}.weight_scale")
        count = matrix(source, scales.name)
        shared = max(1, rows // max(1, count[0])), max(1, columns // max(1, count[1]))
        grouped = weights.strategy == "group" and weights.group_size > 0
        height, width = weights.block_structure or ((1, weights.group_size) if grouped else shared)
        index = f"{module}.weight_g_idx"
        if index not in source.keys() or bool((source.read(index) < 0).any()):  # noqa: SIM118
            index = ""
        dtype = source.dtype(scales.name)
        layer = Layer(module, (rows, columns), dtype, (height, width), levels, scales, zeros, index)
        return layer.checked(source)
