"""Prometheus metrics, in the application's own registry, each labelled with the model.

The names are vLLM's with our prefix. What vLLM's dashboards ask for is also there under its own names.

Gauges and the engine's counters are read from the engine at scrape time, so they are exact: an autoscaler
that waits for zero running requests sees zero as soon as there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from nxd_server.engine.request import ErrorEvent, FinishEvent

if TYPE_CHECKING:
    from nxd_server.accounts import Account
    from nxd_server.app.replica import Replica
    from nxd_server.app.service import Service
    from nxd_server.http.keys import Keys
    from nxd_server.http.protocol import Connections

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)
SAME = (
    *("num_requests_running", "num_requests_waiting", "generation_tokens", "request_success", "prefix_cache_hits"),
    *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
VLLM = {
    **{name: (name,) for name in SAME},
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
}
"""What our metrics are called there, in its releases so far; both without their prefixes."""

OF_ENGINES = (
    ("num_requests_running", "gauge", "Choices that hold a slot.", "running", ""),
    ("num_requests_waiting", "gauge", "Choices that wait for a slot.", "waiting", ""),
    ("queue_tokens", "gauge", "Prompt tokens that wait for a slot.", "waiting_tokens", ""),
    ("slots", "gauge", "Slots of the cache.", "slots", ""),
    ("slots_free", "gauge", "Slots that are free.", "slots_free", ""),
    ("kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.", "kv_usage", ""),
    ("prompt_tokens", "counter", "Prompt tokens accepted.", "prompt_tokens", ""),
    ("prefix_cache_hits", "counter", "Prompt tokens found in the cache.", "reused_tokens", ""),
    ("generation_tokens", "counter", "Tokens generated.", "generated_tokens", ""),
    ("spec_decode_num_draft_tokens", "counter", "Tokens guessed and verified.", "draft_tokens", ""),
    ("spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted.", "accepted_tokens", ""),
    ("request_success", "counter", "Finished choices.", "finished", "finished_reason"),
    ("admission_rejections", "counter", "Requests rejected at admission.", "rejected", "reason"),
)
"""Name, kind, what it is, the field of EngineStats, and the label of its entries, if it has several."""
OF_GRAPHS = (
    ("bucket_executions", "counter", "Executions of a compiled graph.", "bucket_steps"),
    ("bucket_seconds", "counter", "Seconds spent in a compiled graph.", "bucket_seconds"),
    ("bucket_useful_tokens", "counter", "Tokens (or rows) of requests.", "useful_tokens"),
    ("bucket_padding_tokens", "counter", "Tokens (or rows) of padding.", "padding_tokens"),
    ("bucket_step_seconds", "gauge", "Estimate of one execution.", "step_seconds"),
)
OF_RANKS = (
    ("rank_steps", "counter", "Steps a rank completed.", "steps"),
    ("rank_seconds", "counter", "Seconds a rank spent in steps.", "seconds"),
    ("worker_heartbeat_age_seconds", "gauge", "Seconds since a heartbeat.", "last_step_age"),
    ("rank_alive", "gauge", "1 while the rank's process lives.", "alive"),
)


class ModelMetrics:
    """The metrics of one model: histograms of its choices, and those that its engine counts."""

    def __init__(self, service: Service):
        self.service = service
        registry = self.registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS):
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.inter_token = histogram(
            "nxd_inter_token_latency_seconds", "Seconds between two tokens of a choice.", STEP_SECONDS
        )
        self._first_token = histogram("nxd_time_to_first_token_seconds", "Seconds from arrival to the first token.")
        self._queue = histogram("nxd_request_queue_time_seconds", "Seconds a choice waited for a slot.")
        self._prefill = histogram("nxd_request_prefill_time_seconds", "Seconds from a slot to the first token.")
        self._decode = histogram("nxd_request_decode_time_seconds", "Seconds from the first token to the end.")
        self._whole = histogram("nxd_e2e_request_latency_seconds", "Seconds from arrival to the end of a choice.")
        self._prompt = histogram("nxd_request_prompt_tokens", "Tokens of a choice's prompt.", TOKENS)
        self._generated = histogram("nxd_request_generation_tokens", "Tokens of a choice's answer.", TOKENS)
        registry.register(_Model(service))

    def finished(self, event: FinishEvent | ErrorEvent) -> None:
        """Count a choice's end and record the times of its stages."""
        times = event.timings
        if times.admitted is not None:
            self._queue.observe(times.admitted - times.arrived)
        if times.first_token is not None:
            self._first_token.observe(times.first_token - times.arrived)
            if times.admitted is not None:
                self._prefill.observe(times.first_token - times.admitted)
            self._decode.observe(times.finished - times.first_token)
        self._whole.observe(times.finished - times.arrived)
        self._prompt.observe(event.usage.prompt_tokens)
        self._generated.observe(event.usage.completion_tokens)


class Metrics(Collector):
    """All metrics: those of the server's requests and connections, and those of each model."""

    def __init__(self, services: Sequence[Service], connections: Connections, keys: Keys):
        self.models = {service: ModelMetrics(service) for service in services}
        registry = self._registry = CollectorRegistry(auto_describe=False)
        self._http = Counter(
            "nxd_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry
        )
        self._disconnects = Counter(
            "nxd_client_disconnects", "Clients that disconnected before their answer was complete.", registry=registry
        )
        self._http_seconds = Histogram(
            "nxd_http_request_seconds",
            "Seconds to the end of the answer.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        registry.register(_Doors(services[0].created, connections, keys))

    def http(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH") else "other"
        self._http.labels(known, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def disconnected(self) -> None:
        self._disconnects.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with its model's name; the server's own have it if there is one model."""
        sources = [({"model_name": of.service.model_name}, of.registry) for of in self.models.values()]
        found: dict[str, Metric] = {}
        for label, registry in ((sources[0][0] if len(sources) == 1 else {}, self._registry), *sources):
            for family in registry.collect():
                whole = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [one._replace(labels={**label, **one.labels}) for one in family.samples]
        for family in found.values():
            yield family
            for name in VLLM.get(family.name.removeprefix("nxd_"), ()):
                copy = Metric(f"vllm:{name}", family.documentation, family.type)
                copy.samples = [s._replace(name=copy.name + s.name.removeprefix(family.name)) for s in family.samples]
                yield copy

    def render(self) -> bytes:
        return generate_latest(self)


Put = Callable[..., None]
"""``put(name, kind, text, value, **labels)`` adds a sample; without a value it says that there is such a metric."""


class _Read(Collector):
    """Metrics that are read at scrape time."""

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not query a service that is still starting

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}

        def put(name: str, kind: str, text: str, value: float | None = None, /, **labels: str) -> None:
            family = found.setdefault(name, Metric(f"nxd_{name}", text, kind))
            if value is not None:
                family.add_sample(family.name + "_total" * (kind == "counter"), labels, float(value))

        self.read(put)
        yield from found.values()

    def read(self, put: Put) -> None:
        """Put every metric."""
        raise NotImplementedError


class _Doors(_Read):
    """What the connections and the keys count."""

    def __init__(self, created: float, connections: Connections, keys: Keys):
        self._created, self._connections, self._keys = created, connections, keys

    def read(self, put: Put) -> None:
        connections = self._connections
        put("start_time_seconds", "gauge", "When the server started, since 1970.", self._created)
        put("connections", "gauge", "Open connections.", len(connections))
        put("connections_most", "gauge", "Limit of open connections.", connections.most)
        for reason, count in connections.ended.items():
            put("connections_ended", "counter", "Connections ended by the server.", count, reason=reason)
        if self._keys.guard_metrics:  # names of people, and what each of them does
            for account in self._keys.accounts.values():
                self._read_account(put, account)

    def _read_account(self, put: Put, account: Account) -> None:
        key, tokens = account.name, "Tokens of a key's requests."
        put("key_requests", "counter", "Requests with a key.", account.requests, key=key)
        put("key_requests_running", "gauge", "Those being answered.", account.running, key=key)
        put("key_tokens", "counter", tokens, account.prompt_tokens, key=key, of="prompts")
        put("key_tokens", "counter", tokens, account.generated_tokens, key=key, of="answers")
        for limit, count in account.refused.items():
            put("key_refusals", "counter", "Requests beyond a key's limit.", count, key=key, limit=limit)


class _Model(_Read):
    """The gauges and counters of a model's engines. Those of several copies have the label ``copy``."""

    def __init__(self, service: Service):
        self._service = service

    def read(self, put: Put) -> None:
        service = self._service
        put("ready", "gauge", "1 when a request sent now would be served.", service.ready)
        put("weight_version", "gauge", "Weight swaps since the start.", service.weight_version)
        if service.load_seconds is not None:
            text = "Seconds to load the model until the server was ready."
            put("graph_load_seconds", "gauge", text, service.load_seconds)
        aside = 0 if service.chat_template is None else service.chat_template.inside
        put("texts_aside", "gauge", "Conversations being rendered, or waiting.", aside, kind="conversations")
        for replica in service.replicas:
            self._read_copy(put, replica, {"copy": str(replica.index)} if len(service.replicas) > 1 else {})
        if (stats := service.stats()) is not None:
            for name, kind, text, source in OF_GRAPHS:
                values = getattr(stats, source)
                for graph, batch, seq in service.bucket_shapes():
                    value = values.get(graph, 0 if kind == "counter" else None)
                    put(name, kind, text, value, graph=graph, batch=str(batch), seq=str(seq))

    def _read_copy(self, put: Put, replica: Replica, copy: dict[str, str]) -> None:
        for name, kind, text, source in OF_RANKS:
            put(name, kind, text)
            for rank in self._service.ranks_of(replica):
                put(name, kind, text, getattr(rank, source), rank=str(rank.rank), **copy)
        stats = None if replica.engine is None else replica.engine.stats()
        restarts = 0 if stats is None else stats.restarts
        put("engine_restarts", "counter", "Restarts of the ranks.", restarts, **copy)
        for name, kind, text, source, label in OF_ENGINES if stats is not None else ():
            put(name, kind, text)
            value = getattr(stats, source)
            for entry, number in value.items() if label else [("", value)]:
                put(name, kind, text, number, **({label: entry} if label else {}), **copy)
