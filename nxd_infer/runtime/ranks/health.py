"""The health of one rank, as seen by the process that owns it."""

from __future__ import annotations

from dataclasses import dataclass


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
