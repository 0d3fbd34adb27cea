"""The parts shared by an engine's thread and its callers."""

from __future__ import annotations

import threading

from nxd_server.engine.core.model import Model
from nxd_server.engine.core.step_costs import StepCosts
from nxd_server.engine.core.step_runner import StepRunner
from nxd_server.engine.queue_limit import QueueLimit
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.weight_gate import WeightGate


class EngineParts:
    """One engine's parts, each with one job, and the lock of those that callers use."""

    def __init__(
        self,
        model: Model,
        costs: StepCosts,
        *,
        max_queued_requests: int,
        capacity: int,
        restart_limit: int,
        restart_window: float,
    ):
        """``capacity``: requests that fit without queueing."""
        self.model = model
        self.costs = costs
        self.lock = threading.Condition()
        self.queue = QueueLimit(self.lock, max_queued_requests, capacity)
        self.gate = WeightGate(self.lock)
        self.steps = StepRunner(model)
        self.restarts = RankRestarts(restart_limit, restart_window)
