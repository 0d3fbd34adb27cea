"""GPTQ and AWQ, whose layers are ``qweight``, ``qzeros`` and ``scales``, each [inputs or groups of them, outputs]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from nxd_infer.errors import CheckpointError
from nxd_infer.hugging_face.quantized.fields import AnyCase, Fields
from nxd_infer.hugging_face.quantized.layers import WORD, Layer, Stored, matrix, misfit, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource


class Gptq(Fields):
    """As gptqmodel and auto-gptq write it, packed along the inputs."""

    parts: ClassVar = ("qweight", "qzeros", "scales", "g_idx")
    notes: ClassVar = ()
    bits: Literal[2, 4, 8]
    group_size: int
    desc_act: bool = False
    form: Literal["gptq", "gptq_v2"] = Field("gptq", validation_alias=AliasChoices("checkpoint_format", "format"))
    """The first stores zeros as one less."""
    pack_dtype: Literal["int32"] = "int32"
    is_marlin_format: Literal[False] = False
    adapter: None = None
    dynamic: dict[Annotated[str, Field(pattern="^-:")], Any] = {}
    """Layers that are left out; those with settings of their own are not read."""

    def __str__(self) -> str:
        return f"GPTQ, {self.bits} bits"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        names = set(source.keys())
        for module in modules(source, "qweight"):
            levels = Stored(f"{module}.qweight", self.bits, transposed=True)
            scales = Stored(f"{module}.scales", transposed=True)
            zeros = Stored(f"{module}.qzeros", self.bits, along=0, one_less=self.form == "gptq", transposed=True)
            index = f"{module}.g_idx" if f"{module}.g_idx" in names else ""
            words, outputs = matrix(source, levels.name)
            inputs = matrix(source, index)[0] if index else words * WORD // self.bits
            if self.desc_act and not index and 0 < self.group_size < inputs:
                raise misfit(levels.name, "desc_act is true, and it has no g_idx that tells the group of each input")
            block = 1, self.group_size if self.group_size > 0 else inputs
            layer = Layer(module, (outputs, inputs), source.dtype(scales.name), block, levels, scales, zeros, index)
            yield layer.checked(source)


class Awq(Fields):
    """The version "gemm", packed along the outputs in an order of its own."""

    parts: ClassVar = ("qweight", "qzeros", "scales")
    notes: ClassVar = ()
    bits: Literal[4]
    group_size: int
    form: Annotated[Literal["gemm"], AnyCase] = Field("gemm", validation_alias=AliasChoices("version", "format"))
    zero_point: Literal[True] = True

    def __str__(self) -> str:
        return f"AWQ, {self.bits} bits"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        found, order = modules(source, "qweight"), (0, 4, 1, 5, 2, 6, 3, 7)
        if others := sorted({*modules(source, "scales")} - {*found}):
            problem = "activations are not divided here, which its weights expect: use the model in another form"
            raise CheckpointError(f"{others[0]}.scales: {problem}")
        for module in found:
            levels, zeros = (
                Stored(f"{module}.{part}", self.bits, 0, order, transposed=True) for part in ("qweight", "qzeros")
            )
            scales = Stored(f"{module}.scales", transposed=True)
            inputs, words = matrix(source, levels.name)
            shape, size = (words * WORD // self.bits, inputs), self.group_size if self.group_size > 0 else inputs
            yield Layer(module, shape, source.dtype(scales.name), (1, size), levels, scales, zeros).checked(source)
