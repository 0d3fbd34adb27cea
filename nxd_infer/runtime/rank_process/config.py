"""The configuration of a rank process, as JSON on its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankConfig:
    """One rank process: its place, its files, and the descriptors that it inherits."""

    artifact: str
    digest: str
    rank: int
    """The rank of this process, or 0 if it runs all ranks."""
    degree: int
    together: bool
    """Whether this process runs all ranks."""
    parent: int
    socket: int
    arena: int
    threads: int
    cores: list[int]
    crew: bool
    """Whether operators share work among their own threads, one on each of ``cores``."""
    timeout: float
    libraries: list[tuple[str, int]]
    """Native libraries to connect, each with the descriptor of its shared memory; the first is the transport of
    operators that are not compiled into a graph."""
    after: int | None
    """The descriptor that counts the steps of the stage before (``Handover``); None in the first stage."""
    before: int | None
    """That of this rank's own steps, for the next stage; None in the last."""
    rendezvous: str
    """File through which ranks without a native library find one another (gloo)."""

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> RankConfig:
        return cls(**json.loads(text))


def with_crew(environment: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """Return the environment in which torch is imported by a rank that has a crew of operators' threads on ``cores``:
    OpenMP's threads, which run larger loops of graphs, are on the same.

    Each of its threads has a core, the first one the first core, which the engine leaves free. They sleep while they
    wait: by default they spin for some milliseconds, which takes half a core from the crew.
    """
    kept = {name: value for name, value in environment.items() if name not in ("OMP_PLACES", "OMP_PROC_BIND")}
    # Those would override the next variable. 5000 are about 100 microseconds.
    return {"GOMP_SPINCOUNT": "5000", **kept, "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
