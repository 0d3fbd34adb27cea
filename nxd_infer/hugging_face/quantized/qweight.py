"""GPTQ and AWQ, whose layers are ``qweight``, ``qzeros`` and ``scales``, each [inputs or groups of them, outputs]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxd_infer.errors import CheckpointError
from nxd_infer.hugging_face.quantized.fields import Fields
from nxd_infer.hugging_face.quantized.layers import WORD, Layer, Stored, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource


@dataclass(frozen=True)
class Gptq:
    """As gptqmodel and auto-gptq write it, packed along the inputs."""

    bits: int
    group_size: int
    v1: bool
    """Whether zeros are stored as one less."""
    parts = ("qweight", "qzeros", "scales", "g_idx")
    notes = ()

    @classmethod
    def read(cls, fields: Fields) -> Gptq:
        bits = fields.one_of("bits", (2, 4, 8))
        form = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), fields.get("format", "gptq"))
        for name, known in (("pack_dtype", "int32"), ("is_marlin_format", False), ("adapter", None)):
            fields.one_of(name, (known,), known)
        rules = fields.get("dynamic", {})
        if not isinstance(rules, Mapping) or any(not rule.startswith("-:") for rule in rules):
            raise fields.error("dynamic", "layers with their own settings are not read, only layers left out ('-:')")
        return cls(bits, fields.size("group_size"), form == "gptq")

    def __str__(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        names = set(source.keys())
        for module in modules(source, "qweight"):
            levels = Stored(f"{module}.qweight", self.bits, transposed=True)
            scales = Stored(f"{module}.scales", transposed=True)
            zeros = Stored(f"{module}.qzeros", self.bits, along=0, one_less=self.v1, transposed=True)
            index = f"{module}.g_idx" if f"{module}.g_idx" in names else ""
            words, outputs = source.shape(levels.name)
            inputs = source.shape(index)[0] if index else words * WORD // self.bits
            block = 1, inputs if self.group_size == -1 else self.group_size
            layer = Layer(module, (outputs, inputs), source.dtype(scales.name), block, levels, scales, zeros, index)
            yield layer.checked(source)


@dataclass(frozen=True)
class Awq:
    """The version "gemm", packed along the outputs in an order of its own."""

    group_size: int
    bits = 4
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    parts = ("qweight", "qzeros", "scales")
    notes = ()

    @classmethod
    def read(cls, fields: Fields) -> Awq:
        fields.one_of("bits", (cls.bits,))
        fields.one_of("version", ("gemm",), fields.get("format", "gemm"))
        fields.one_of("zero_point", (True,), True)
        return cls(fields.size("group_size"))

    def __str__(self) -> str:
        return f"AWQ, {self.bits} bits"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        found = modules(source, "qweight")
        if others := sorted({*modules(source, "scales")} - {*found}):
            problem = "activations are not divided here, which its weights expect: use the model in another form"
            raise CheckpointError(f"{others[0]}.scales: {problem}")
        for module in found:
            levels, zeros = (
                Stored(f"{module}.{part}", self.bits, 0, self.order, transposed=True) for part in ("qweight", "qzeros")
            )
            scales = Stored(f"{module}.scales", transposed=True)
            inputs, words = source.shape(levels.name)
            shape, size = (words * WORD // self.bits, inputs), inputs if self.group_size == -1 else self.group_size
            yield Layer(module, shape, source.dtype(scales.name), (1, size), levels, scales, zeros).checked(source)
