"""Rounded weights: whether a backend has a form of them, and which an artifact has.

A backend lists its own in ``Backend.quantizations``. What a model computes then depends on the form, so an artifact
keeps it when it is compiled again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends.base import Backend, Quantization
from nxd_infer.errors import ArtifactVersionError, TraceConfigError


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


def check_encodings(path: Path, manifest: Manifest, backend: Backend) -> None:
    """Raise ArtifactVersionError if a weight of the artifact at ``path`` is read in a form that its backend lacks."""
    for weight in manifest.weights:
        if weight.encoding and weight.encoding not in backend.encodings:
            raise ArtifactVersionError(
                f"the artifact {path} reads the weight {weight.name!r} as {weight.encoding!r}, an encoding that this "
                f"version of the {backend.name} backend does not know: upgrade it"
            )


def quantization_of(manifest: Manifest, backend: Backend) -> Quantization | None:
    """Return the form that an artifact of this backend has weights in, None if all keep their values."""
    encodings = {weight.encoding for weight in manifest.weights}
    return next((form for form in backend.quantizations.values() if form.encoding in encodings), None)
