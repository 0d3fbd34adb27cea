"""FP8 as DeepSeek and Qwen publish it: eight-bit floats with a scale per block, or one per weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from nxd_infer.hugging_face.quantized.fields import Block, Fields
from nxd_infer.hugging_face.quantized.layers import NO_ACTIVATIONS, Layer, Stored, matrix, misfit, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource

SCALES = ("weight_scale_inv", "weight_scale")
"""Both are factors."""


class Fp8(Fields):
    parts: ClassVar = ("weight", *SCALES, "activation_scale", "input_scale")
    notes: ClassVar = (NO_ACTIVATIONS,)
    weight_block_size: Block | None = None
    expert_dtype: Literal["fp8"] = "fp8"

    def __str__(self) -> str:
        return "FP8" + (" in blocks of {} x {}".format(*self.weight_block_size) if self.weight_block_size else "")

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        import torch  # slow

        for module, part in ((module, own) for own in SCALES for module in modules(source, own)):
            levels = Stored(f"{module}.weight")
            rows, columns = matrix(source, levels.name)
            if source.dtype(levels.name) != torch.float8_e4m3fn:
                raise misfit(levels.name, f"it has a {part} and is {source.dtype(levels.name)}")
            height, width = self.weight_block_size or (rows, columns)
            scales = Stored(f"{module}.{part}")
            yield Layer(module, (rows, columns), torch.float32, (height, width), levels, scales).checked(source)
