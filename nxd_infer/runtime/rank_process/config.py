"""The configuration of a rank process, as JSON on its command line."""

from __future__ import annotations

import json
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
