"""Forms of weights that a backend rounds: which there are, and which an artifact has.

A backend lists its own in ``Backend.quantizations``. What a model computes then depends on the form, so an artifact
keeps it when it is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.errors import TraceConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.backends.base import Backend


@dataclass(frozen=True)
class Quantization:
    """A form of rounded weights."""

    name: str
    """The value of ``quantize`` that asks for it."""
    encoding: str
    """What ``WeightSpec.encoding`` says of such a weight."""
    rounded: Callable[[Tensor], Tensor]
    """Returns the values (float32) that graphs compute with for a rank's weight of any floating-point dtype."""
    nbytes: Callable[[Sequence[int]], int]
    """Returns the bytes of a weight of that shape in memory."""


def check_quantize(backend: Backend, quantize: Any) -> None:
    """Raise TraceConfigError if the backend has no form of that name."""
    if quantize is None or (isinstance(quantize, str) and quantize in backend.quantizations):
        return
    if not backend.quantizations:
        raise TraceConfigError(
            f"the {backend.name} backend keeps weights as they are, got quantize={quantize!r}: leave it out"
        )
    raise TraceConfigError(
        f"quantize={quantize!r} is not one of {', '.join(map(repr, backend.quantizations))}, or None"
    )


def quantization_of(manifest: Manifest, backend: Backend) -> Quantization | None:
    """Return the form that an artifact of this backend has weights in, None if all keep their values."""
    encodings = {weight.encoding for weight in manifest.weights}
    return next((form for form in backend.quantizations.values() if form.encoding in encodings), None)
