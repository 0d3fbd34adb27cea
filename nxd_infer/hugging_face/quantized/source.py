"""The weights of a quantised checkpoint under their plain names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.hugging_face.quantized.fp8 import SCALES
from nxd_infer.hugging_face.quantized.layers import Format
from nxd_infer.layout.sources import Slices, WeightSource

_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGERS = (torch.int8, torch.uint8, torch.int32)


def check_plain(source: WeightSource, names: Iterable[str], form: Format | None = None) -> None:
    """Raise CheckpointError for one of ``names`` that is quantised and not by ``nxd_infer.quantization``."""
    held = set(names)
    for name in sorted(held):
        module, _, part = name.rpartition(".")
        try:
            kind = source.dtype(name)
        except CheckpointError:  # is told if it is read
            continue
        if form is not None:
            refused = kind in _FLOATS or (kind in _INTEGERS and "weight" in name)
        elif kind in _FLOATS:
            refused = part != "weight" or f"{module}.scale" not in held
        else:
            scaled = part == "weight" and any(f"{module}.{one}" in held for one in (*SCALES, "SCB"))
            refused = kind in _INTEGERS and (scaled or part in ("qweight", "weight_packed"))
        if refused:
            why = f"as {form}" if form else "without a quantization_config; a quantize_config.json is not read"
            raise CheckpointError(f"{name} is stored as {kind}, which config.json does not explain ({why})")


class DequantizedSource:
    """``source`` with a weight [outputs, inputs] in place of the tensors that each quantised layer consists of.

    Raises CheckpointError for a weight that is neither plain nor explained by ``form``.
    """

    def __init__(self, source: WeightSource, form: Format):
        self._source = source
        self._layers = {f"{layer.module}.weight": layer for layer in form.layers(source)}
        used = {f"{layer.module}.{part}" for layer in self._layers.values() for part in form.parts}
        self._plain = [name for name in source.keys() if name not in used]  # noqa: SIM118  (not a mapping)
        check_plain(source, self._plain, form)

    def keys(self) -> Iterable[str]:
        return [*self._plain, *self._layers]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layers[name].shape if name in self._layers else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._layers[name].dtype if name in self._layers else self._source.dtype(name)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        layer = self._layers.get(name)
        if layer is None:
            return self._source.read(name, slices)
        parts = zip(slices or (slice(None), slice(None)), layer.shape, strict=True)
        wanted = [range(*part.indices(size)[:2]) for part, size in parts]
        if not all(wanted):
            return torch.empty([len(part) for part in wanted], dtype=layer.dtype)
        return layer.read(self._source, *wanted)
