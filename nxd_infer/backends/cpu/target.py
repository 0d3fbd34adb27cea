"""What an artifact says of the processor that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError
from nxd_infer.util.machine import architecture, cpu_features


def describe_target() -> dict[str, object]:
    """Return ``manifest.target``: operators pick their instructions where they run."""
    return {"arch": architecture(), "cpu_features": []}


def check_cpu(target: Mapping[str, Any]) -> None:
    """``Backend.check_target``: raise ArtifactVersionError for a processor that lacks what the graphs need."""
    arch = target.get("arch")
    if arch and arch != architecture():
        raise ArtifactVersionError(f"was compiled for {arch} and this machine is {architecture()}: trace it again here")
    features = target.get("cpu_features") or []
    if not isinstance(features, list):
        raise ArtifactCorruptError(f"has a damaged manifest: its cpu_features are {features!r:.80}")
    missing = sorted({str(feature) for feature in features} - cpu_features()) if cpu_features() else []
    if missing:
        raise ArtifactVersionError(
            f"was compiled for a CPU with {', '.join(missing)}, which this one lacks: "
            "use `nxd-infer recompile` here, or trace it again"
        )
