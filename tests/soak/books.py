"""What everybody saw, and whether the server's own counters say the same."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.soak.questions import Question, Told
from tests.soak.wire import Violation

Metrics = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read_metrics(text: str) -> Metrics:
    """Samples by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum over the label sets that contain ``labels``."""
    return sum(value for (one, have), value in metrics.items() if one == name and labels.items() <= dict(have).items())


@dataclass
class Fault:
    """From the moment before something is broken until the server is ready again."""

    begun: float
    ended: float = math.inf


@dataclass
class Books:
    sent: Counter[str] = field(default_factory=Counter)
    """Requests by route."""
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Whole answers by route and status."""
    left: Counter[str] = field(default_factory=Counter)
    """Requests by route whose clients did not wait for the end: the server may count them, and as anything."""
    kinds: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    """Of complete answers."""
    tokens: int = 0
    open_choices: int = 0
    """Of answers that were not seen complete: so many at most may be in the server's counters beside those seen."""
    open_tokens: int = 0
    restarts: int = 0
    faults: list[Fault] = field(default_factory=list)
    base: Metrics = field(default_factory=dict)

    def complete(self, said: Told) -> None:
        self.choices += len(said.choices)
        self.tokens += said.completion_tokens

    def incomplete(self, asked: Question) -> None:
        self.open_choices += asked.choices
        self.open_tokens += asked.most_tokens

    def faulty(self, begun: float, ended: float) -> bool:
        """Whether something was broken between two moments."""
        return any(fault.begun <= ended and begun <= fault.ended for fault in self.faults)

    def status(self, number: int) -> int:
        return sum(count for (_, status), count in self.seen.items() if status == number)

    def disagreement(self, metrics: Metrics, slots: int, version: int) -> str:
        """What the counters of an idle server say otherwise; empty when they agree. ``metrics`` were asked for too."""

        def grown(name: str, **labels: str) -> float:
            return total(metrics, name, **labels) - total(self.base, name, **labels)

        wrong = []

        def within(what: str, value: float, least: float, most: float) -> None:
            if not least <= value <= most:
                wrong.append(f"{what} is {value:g}, and should be {least:g}" + (f" to {most:g}" * (least != most)))

        for name, value in (
            ("nxd_ready", 1), ("nxd_num_requests_running", 0), ("nxd_num_requests_waiting", 0),
            ("nxd_queue_tokens", 0), ("nxd_slots_free", slots), ("nxd_kv_cache_usage_perc", 0),
            ("nxd_weight_version", version),
        ):  # fmt: skip
            within(name, total(metrics, name), value, value)
        within("nxd_engine_restarts_total", grown("nxd_engine_restarts_total"), self.restarts, self.restarts)
        left = self.left.total()
        good = sum(grown("nxd_request_success_total", finished_reason=reason) for reason in ("stop", "length"))
        within("choices that ended well", good, self.choices, self.choices + self.open_choices)
        within(
            "nxd_generation_tokens_total",
            grown("nxd_generation_tokens_total"),
            self.tokens,
            self.tokens + self.open_tokens,
        )
        full, refused = grown("nxd_admission_rejections_total", reason="queue_full"), self.status(429)
        within("nxd_admission_rejections_total of queue_full", full, refused, refused + left)
        within("nxd_client_disconnects_total", grown("nxd_client_disconnects_total"), 0, left)
        within("answers of status 500", grown("nxd_http_requests_total", status="500"), 0, 0)
        for route, sent in self.sent.items():
            sent -= route == "/metrics"  # the one whose answer this is
            count = grown("nxd_http_requests_total", route=route)
            within(f"requests of {route}", count, sent - self.left[route], sent)
        for (route, status), seen in self.seen.items():
            seen -= (route, status) == ("/metrics", 200)
            count = grown("nxd_http_requests_total", route=route, status=str(status))
            within(f"answers of {route} with {status}", count, seen, seen + self.left[route])
        return "; ".join(wrong)

    def begin_fault(self) -> Fault:
        self.faults.append(Fault(time.monotonic()))
        return self.faults[-1]


def check_any_moment(text: str, slots: int, most_waiting: int) -> None:
    """What always holds for ``/metrics``."""
    values = dict(line.split(" ") for line in text.splitlines() if line.startswith(("nxd_slots_free ", "nxd_num_")))
    free, running, waiting = (
        float(values[name]) for name in ("nxd_slots_free", "nxd_num_requests_running", "nxd_num_requests_waiting")
    )
    if free + running != slots or not 0 <= free <= slots or not 0 <= waiting <= slots + most_waiting:
        raise Violation(f"{free:g} slots free, {running:g} choices run, {waiting:g} wait; there are {slots} slots")
