"""What backends of XLA devices have in common, and the torch_xla that is installed.

It is not imported here: that takes seconds, and starts the device's runtime.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.backends.base import Availability, Backend
from nxd_infer.errors import ArtifactVersionError
from nxd_infer.util.machine import architecture, available_cores, torch_minor, torch_version

if TYPE_CHECKING:
    from nxd_infer.graph.canonical import Graph
    from nxd_infer.graph.stored import Lowered

INSTALL = "pip install -e '.[xla]' in the checkout, in an environment of its own"
"""Of its own: it brings another torch than the default backend needs."""
REVISION = 1
"""Of what a graph's directory holds; counts up when an earlier one cannot be read any more."""


class HloBackend(Backend):
    """Base class of ``xla`` and ``neuron``."""

    one_process = True
    one_program = True
    compiles = True

    def passes(self, graphs: Sequence[Graph], options: Mapping[str, Any]) -> list[Lowered]:
        from nxd_infer.backends.hlo.parts import lower_graphs  # slow: torch

        return lower_graphs(graphs)

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return torch_xla_environment(1)

    def compiler(self) -> str:
        return f"torch_xla {probe_torch_xla().versions.get('torch_xla', '')}"

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"revision": REVISION}

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        if target.get("revision") != REVISION:
            raise ArtifactVersionError(
                f"holds files of another revision than {REVISION}, which this version reads: "
                f"{target.get('revision')!r}; trace it again"
            )


def probe_torch_xla() -> Availability:
    """Whether graphs can be lowered here, by the packages' versions."""
    versions = {"torch": torch_version()}
    try:
        versions["torch_xla"] = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return Availability(False, f"torch_xla is not installed: {INSTALL}", versions)
    actual, needed = torch_minor(versions["torch"]), torch_minor(versions["torch_xla"])
    if actual != needed:
        reason = f"torch_xla {versions['torch_xla']} needs torch {needed}, and this is torch {versions['torch']}"
        return Availability(False, f"{reason}: {INSTALL}", versions)
    return Availability(True, "", versions, {f"{architecture()} processor": len(available_cores())})


def torch_xla_environment(degree: int) -> Mapping[str, str]:
    """What torch_xla finds in its environment; it reads that when it is imported."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(degree),
        # A program that takes a tensor's memory for a result waits for its last reader, with the lock held that the
        # other replicas need to get there.
        "XLA_ENABLE_PARAM_ALIASING": "0",
        # A replica's program holds a thread of this pool while it waits for the others; by default there are as many as
        # processors.
        "XLA_THREAD_POOL_SIZE": str(2 * degree),
        # Scripts that train on Trainium set these: they would put other types into the HLO than its table says, without
        # a word, and into the cache for all who compile the same graph.
        **dict.fromkeys(("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG"), "0"),
        **dict.fromkeys(("XLA_DISABLE_FUNCTIONALIZATION", "XLA_USE_SPMD"), "0"),
    }
