"""What a run of the benchmarks may vary, and where it keeps what it can make again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.util.cache_dir import cache_dir

PEERS = ("hf", "hf_static", "llama_cpp", "openvino", "vllm")
"""Every peer, in the order of the tables."""
SIZES = ("254M", "1.1B", "3.0B")
"""Models of the benchmark ``sizes``, by their parameters."""
THREADS = 2
"""In total, for everyone: one rank of two threads, two ranks of one, two threads of a peer."""


@dataclass(frozen=True)
class Options:
    """The command line, or its defaults."""

    quick: bool = False
    """Few repetitions of little work: does everything run? Its figures mean nothing."""
    peers: tuple[str, ...] = PEERS
    degrees: tuple[int, ...] = (1, 2)
    repetitions: int = 5
    model: str = "common"
    """``common`` (254 M parameters, compiled) or ``tiny`` (eager, ready in seconds: for work on the benchmarks)."""

    sizes: tuple[str, ...] = SIZES
    attacks: tuple[str, ...] = ()
    """Those of ``attacks``; none for all of them."""
    against: Path | None = None
    """The other checkout of ``against``."""
    folder: Path | None = None
    """Where ``sizes`` keeps its models and artifacts; None for a folder of :func:`home`."""

    @property
    def rounds(self) -> int:
        """Repetitions of a paired comparison."""
        return 2 if self.quick else self.repetitions

    def settings(self) -> dict[str, object]:
        """What the figures depend on, for the record."""
        return {"quick": self.quick, "repetitions": self.rounds, "model": self.model, "threads": THREADS}


def home() -> Path:
    """``$NXD_INFER_BENCH``, else ``bench`` in the package's cache: models, artifacts, the peers' environments."""
    chosen = os.environ.get("NXD_INFER_BENCH")
    path = Path(chosen).expanduser().absolute() if chosen else cache_dir("bench")
    path.mkdir(parents=True, exist_ok=True)
    return path
