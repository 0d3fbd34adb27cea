"""The interface of a model's ranks, wherever they run, and what it reports of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nxd_infer.runtime.ipc.channel import Kind


@dataclass(frozen=True)
class RankHealth:
    """One entry of ``TensorParallelModel.health()``."""

    rank: int
    pid: int | None
    alive: bool
    state: str
    """``running``, ``stopped`` or ``ended``."""
    steps: int
    """Exchanges finished since the start."""
    collectives: int
    """Collectives passed since the start; 0 if the transport does not count them."""
    busy_seconds: float
    """How long the exchange in progress has taken so far; 0 between exchanges."""
    last_step_age: float | None
    """Seconds since the last exchange began; None before the first."""


class Ranks(Protocol):
    """Runs the graphs: in processes (:class:`Supervisor`) or, at degree 1, in this one (:class:`LocalRank`)."""

    @property
    def sides(self) -> Sequence[Any]:
        """Places for a step's inputs and outputs."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the ranks, if any."""
        ...

    def start(self) -> None: ...
    def exchange(
        self,
        kind: Kind,
        bucket: int = 0,
        *,
        timeout: float | None = None,
        fds: list[int] | None = None,
        fatal: bool = True,
    ) -> None: ...
    def begin(self, kind: Kind, bucket: int = 0, side: int = 0, *, timeout: float | None = None) -> Any: ...
    def finish(self, exchange: Any, timeout: float | None = None) -> None: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...
    def health(self) -> list[RankHealth]: ...
    def close(self) -> None: ...
