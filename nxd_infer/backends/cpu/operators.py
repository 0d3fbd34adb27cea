"""The native operators that a graph calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer import native
from nxd_infer.errors import BackendUnavailableError
from nxd_infer.graph.stored import GraphFile


def native_library() -> Any | None:
    """Return the native operators, or None if they cannot be built (no compiler, no headers)."""
    if not native.availability().ok:
        return None
    try:
        return native.load()
    except BackendUnavailableError:
        return None


def reason_for_none() -> str:
    """Return why :func:`native_library` returned None."""
    return native.availability().reason or "they could not be built"


def why_unsupported() -> str:
    """Return why this release of torch can have no native operators; "" if it can."""
    return "" if native.has_stable_abi() else native.availability().reason


def register_operators(graph: GraphFile, graph_dir: Path) -> list[Any]:
    """Register and return the native libraries that the graph calls: those in ``ops/`` beside ``graphs/``, else ours.

    Raises BackendUnavailableError if the graph needs those of another version and they are missing.
    """
    libraries = []
    for content_hash in graph.ops:
        beside = graph_dir.parents[1] / "ops" / f"{content_hash}.so"
        found = native.load_file(beside) if beside.is_file() else native.load()
        if found.hash != content_hash:
            raise BackendUnavailableError(
                f"graph {graph.digest} calls the operators {content_hash}, and this version has {found.hash}: "
                "trace the model again"
            )
        libraries.append(found)
    return libraries
