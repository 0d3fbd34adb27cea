"""A rank's packed weights: packed once at load, one copy for the graphs of all buckets, packed again in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.backends.cpu.encodings import PACKED_ACROSS, PACKED_INT8
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.ops import packed, packed_int8
from nxd_infer.util.mapped_memory import Memory

_ALIGNMENT = 64


class PackedWeights:
    """Memory for the weights of ``specs`` that have an encoding, in one piece; :meth:`fill` puts them there."""

    def __init__(self, specs: Sequence[WeightSpec], library: Any):
        self.specs = {spec.name: spec for spec in specs if spec.encoding}
        self.tensors: dict[str, Tensor] = {}
        self._library = library
        places, end = {}, 0
        held = [encoded_spec(spec, spec.encoding) for spec in self.specs.values()]
        for spec in held:
            places[spec.name] = end
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return
        arena = Memory(end, large=True).bytes
        for spec in held:
            piece = arena[places[spec.name] : places[spec.name] + spec.nbytes]
            self.tensors[spec.name] = piece.view(spec.torch_dtype).view(spec.shape)

    def fill(self, read: Callable[[str], Tensor], names: Iterable[str] | None = None) -> None:
        """Pack the plain tensors that ``read`` returns, one at a time, over the present ones. Default: all."""
        for name in self.specs if names is None else names:
            pack = packed_int8.pack_int8 if self.specs[name].encoding == PACKED_INT8 else packed.pack
            plain = read(name).t() if self.specs[name].encoding == PACKED_ACROSS else read(name)
            pack(plain, out=self.tensors[name], library=self._library)
