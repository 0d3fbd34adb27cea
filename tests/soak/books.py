"""What everybody saw, and whether the server's own counters say the same."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.soak.questions import Question, Told


def read_metrics(text: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(metrics: list[Any], name: str, **labels: str) -> float:
    """The sum over the label sets that contain ``labels``."""
    return sum(one.value for one in metrics if one.name == name and labels.items() <= one.labels.items())


class Books:
    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        """Whole answers by status."""
        self.kinds: Counter[str] = Counter()
        """What was done, and ``left``: requests whose clients did not wait for the end, which the server may count."""
        self.generated: Counter[str] = Counter()
        """Choices and tokens of complete answers, and ``open`` ones: of those that were not seen complete, so many at
        most may be in the server's counters as well."""
        self.restarts = 0
        self.faults: list[list[float]] = []
        """When each began and ended."""
        self.base: list[Any] = []
        self._lock = threading.Lock()

    def add(self, counts: Counter[Any], key: Any, number: int = 1) -> None:
        with self._lock:
            counts[key] += number

    def complete(self, said: Told) -> None:
        self.add(self.generated, "choices", len(said.choices))
        self.add(self.generated, "tokens", said.tokens)

    def incomplete(self, asked: Question) -> None:
        self.add(self.generated, "open choices", asked.choices)
        self.add(self.generated, "open tokens", asked.most_tokens)

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """From the moment before something is broken until the server is ready again."""
        self.faults.append([time.monotonic(), math.inf])
        yield
        self.faults[-1][1] = time.monotonic()

    def faulty(self, begun: float, ended: float) -> bool:
        """Whether something was broken between two moments."""
        return any(first <= ended and begun <= last for first, last in self.faults)

    def disagreement(self, metrics: list[Any], slots: int, version: int, copies: int) -> str:
        """What the counters of an idle server say otherwise; empty when they agree. ``metrics`` were asked for too."""
        moved = math.inf if copies > 1 else 0  # requests that a full copy did not take from one that was lost

        def grown(name: str, **labels: str) -> float:
            return total(metrics, name, **labels) - total(self.base, name, **labels)

        idle = {
            "nxd_ready": 1, "nxd_num_requests_running": 0, "nxd_num_requests_waiting": 0, "nxd_queue_tokens": 0,
            "nxd_slots_free": slots, "nxd_kv_cache_usage_perc": 0, "nxd_weight_version": version,
        }  # fmt: skip
        checks = [(name, total(metrics, name), value, 0) for name, value in idle.items()]
        good = sum(grown("nxd_request_success_total", finished_reason=reason) for reason in ("stop", "length"))
        full, tokens = (
            grown("nxd_admission_rejections_total", reason="queue_full"),
            grown("nxd_generation_tokens_total"),
        )
        left, made, requests = self.kinds["left"], self.generated, "nxd_http_requests_total"
        checks += [
            ("nxd_engine_restarts_total", grown("nxd_engine_restarts_total"), self.restarts, 0),
            ("choices that ended well", good, made["choices"], made["open choices"]),
            ("nxd_generation_tokens_total", tokens, made["tokens"], made["open tokens"]),
            ("nxd_admission_rejections_total of queue_full", full, self.seen[429], left + moved),
            ("nxd_client_disconnects_total", grown("nxd_client_disconnects_total"), 0, left),
            (requests, grown(requests), max(0, self.seen.total() - 1), left),  # without that whose answer this is
        ]
        for status in {*self.seen, 500}:
            own = status == 200 and self.seen[200] > 0
            found = grown(requests, status=str(status))
            checks.append((f"answers of status {status}", found, self.seen[status] - own, left * (status != 500)))
        return "; ".join(
            f"{what} is {value:g}, and should be {least:g}" + (f" to {least + more:g}" if more else "")
            for what, value, least, more in checks
            if not least <= value <= least + more
        )
