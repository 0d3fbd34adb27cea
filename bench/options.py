"""The options of a benchmark run, and the location of its rebuildable files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.util.cache_dir import cache_dir

PEERS = ("hf", "hf_static", "llama_cpp", "openvino", "vllm")
"""Every peer, in the order of the tables."""
SIZES = ("254M", "1.1B", "3.0B", "8.1B")
"""Models of the benchmarks ``sizes`` and ``forms``, by number of parameters."""
USUAL = SIZES[:3]
THREADS = 2
"""Threads in total, for everyone: one rank with two, two ranks with one, a peer with two."""


@dataclass(frozen=True)
class Options:
    """The command line, or its defaults."""

    quick: bool = False
    """Few repetitions of little work, to check that everything runs; ignore the figures."""
    peers: tuple[str, ...] = PEERS
    degrees: tuple[int, ...] = (1, 2)
    repetitions: int = 5
    model: str = "common"
    """``common`` (254 M parameters) or ``tiny`` (ready in seconds: for work on the benchmarks)."""

    sizes: tuple[str, ...] = USUAL
    against: Path | None = None
    """The other checkout of ``against``."""
    folder: Path | None = None
    """Where ``sizes`` keeps its models and artifacts; None for a folder of :func:`home`."""

    @property
    def rounds(self) -> int:
        """Repetitions of a paired comparison."""
        return 2 if self.quick else self.repetitions

    def settings(self) -> dict[str, object]:
        """Return what the figures depend on, for the record."""
        return {"quick": self.quick, "repetitions": self.rounds, "model": self.model, "threads": THREADS}


def home() -> Path:
    """Return ``$NXD_INFER_BENCH``, else ``bench`` in the package's cache: models, artifacts, peers' environments."""
    chosen = os.environ.get("NXD_INFER_BENCH")
    path = Path(chosen).expanduser().absolute() if chosen else cache_dir("bench")
    path.mkdir(parents=True, exist_ok=True)
    return path
