"""FP8 as DeepSeek and Qwen publish it: eight-bit floats with a scale per block, or one per weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nxd_infer.hugging_face.quantized.fields import Fields
from nxd_infer.hugging_face.quantized.layers import NO_ACTIVATIONS, Layer, Stored, misfit, modules

if TYPE_CHECKING:
    from nxd_infer.layout.sources import WeightSource

SCALES = ("weight_scale_inv", "weight_scale")
"""Both are factors."""


@dataclass(frozen=True)
class Fp8:
    block: tuple[int, int] | None
    """Rows and columns; None: one scale per weight."""
    parts = ("weight", *SCALES, "activation_scale", "input_scale")
    notes = (NO_ACTIVATIONS,)

    @classmethod
    def read(cls, fields: Fields) -> Fp8:
        fields.one_of("expert_dtype", ("fp8",), "fp8")
        return cls(None if fields.get("weight_block_size") is None else fields.block("weight_block_size"))

    def __str__(self) -> str:
        return "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"

    def layers(self, source: WeightSource) -> Iterator[Layer]:
        import torch  # slow

        for module, part in ((module, own) for own in SCALES for module in modules(source, own)):
            levels = Stored(f"{module}.weight")
            rows, columns = (*source.shape(levels.name), 1, 1)[:2]
            if source.dtype(levels.name) != torch.float8_e4m3fn:
                raise misfit(levels.name, f"it has a {part} and is {source.dtype(levels.name)}")
            block, scales = self.block or (rows, columns), Stored(f"{module}.{part}")
            yield Layer(module, (rows, columns), torch.float32, block, levels, scales).checked(source)
