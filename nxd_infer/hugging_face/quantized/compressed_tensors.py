"""compressed-tensors, as llm-compressor writes it: integers, packed or in bytes, and eight-bit floats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxd_infer.hugging_face.quantized.fields import Fields
from nxd_infer.hugging_face.quantized.layers import NO_ACTIVATIONS, Layer, Stored, misfit, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource

PACKED = "pack-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Scheme:
    """How the weights of some layers are stored."""

    targets: tuple[str, ...]
    """Names of modules or of their classes, or "re:" and a pattern of names."""
    form: str
    bits: int
    floats: bool
    symmetric: bool
    block: tuple[int, int] | None
    """Rows and columns that share a scale, if the shape of the scales does not say."""

    @classmethod
    def read(cls, group: Fields, form: Any) -> Scheme | None:
        """Return None for a group that rounds activations only. ``form``: that of groups that do not say theirs."""
        weights = group.inner("weights")
        if weights is None:
            return None
        form = group.one_of("format", FORMATS, form)
        floats = weights.one_of("type", ("int", "float"), "int") == "float"
        bits = weights.one_of("num_bits", (2, 4, 8) if form == PACKED and not floats else (8,), 8)
        strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "group")
        targets = group.get("targets", [])
        try:
            for target in targets:
                re.compile(target)
        except (re.error, TypeError) as error:
            raise group.error("targets", f"expected a list of names and patterns: {error}") from None
        block = weights.block("block_structure") if strategy == "block" else None
        return cls(tuple(targets), form, bits, floats, weights.get("symmetric", True) is True, block)

    def rank(self, module: str) -> int:
        """Return how closely the scheme names a module, 0 best."""
        patterns = (one.removeprefix("re:") for one in self.targets if one.startswith("re:"))
        if module in self.targets:
            return 0
        return 1 if any(re.match(pattern, module) for pattern in patterns) else 2 if "Linear" in self.targets else 3

    def layer(self, source: WeightSource, module: str) -> Layer:
        packed, scales = self.form == PACKED, Stored(f"{module}.weight_scale")
        bits, offset = (self.bits, 1 << (self.bits - 1)) if packed else (0, 0)
        levels = Stored(f"{module}.weight{'_packed' * packed}", bits, offset=offset)
        zeros = None if self.symmetric else Stored(f"{module}.weight_zero_point", bits, 0, offset=offset)
        kind = str(source.dtype(levels.name)).removeprefix("torch.")
        if kind != ("int32" if packed else "float8_e4m3fn" if self.floats else "int8"):
            raise misfit(levels.name, f"it is {kind}, so it is not compressed as {self.form}")
        sizes = source.read(f"{module}.weight_shape").tolist() if packed else source.shape(levels.name)
        rows, columns = (*sizes, 1, 1)[:2]
        count = (*source.shape(scales.name), 1, 1)[:2]
        block = self.block or (max(1, rows // max(1, count[0])), max(1, columns // max(1, count[1])))
        index = f"{module}.weight_g_idx"
        index = index if index in source.keys() and int(source.read(index).min()) >= 0 else ""  # noqa: SIM118
        layer = Layer(module, (rows, columns), source.dtype(scales.name), block, levels, scales, zeros, index)
        return layer.checked(source)


@dataclass(frozen=True)
class CompressedTensors:
    schemes: tuple[Scheme, ...]
    notes: tuple[str, ...]
    parts = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )

    @classmethod
    def read(cls, fields: Fields) -> CompressedTensors:
        sparse = fields.inner("sparsity_config")
        if sparse is not None:
            sparse.one_of("format", ("dense",), "dense")
        fields.one_of("transform_config", ({},), {})
        groups = fields.inner("config_groups")
        named = [groups.inner(name) for name in groups] if groups else []
        found = [Scheme.read(group, fields.get("format")) for group in named if group]
        cache = ("keys and values are not rounded",) if fields.get("kv_cache_scheme") else ()
        return cls(tuple(scheme for scheme in found if scheme), (NO_ACTIVATIONS, *cache))

    def __str__(self) -> str:
        kinds = dict.fromkeys(f"{one.form}, {one.bits} bits" for one in self.schemes)
        return f"compressed-tensors ({'; '.join(kinds) or 'plain'})"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        for module in modules(source, "weight_scale"):
            ranks = [(scheme.rank(module), number) for number, scheme in enumerate(self.schemes)]
            best, number = min(ranks, default=(3, 0))
            if best == 3 and len(ranks) != 1:
                raise misfit(module, "it has a weight_scale, and no group of config_groups names it")
            yield self.schemes[number].layer(source, module)
