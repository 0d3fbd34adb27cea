"""Prometheus metrics, in the application's own registry, each labelled with the model.

The names are vLLM's with our prefix. What vLLM's dashboards ask for is also there under its own names.

Gauges and the engine's counters are read from the engine at scrape time, so they are exact: an autoscaler
that waits for zero running requests sees zero as soon as there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nxd_server.engine.engine_core import EngineStats
from nxd_server.engine.request import ErrorEvent, FinishEvent

if TYPE_CHECKING:
    from nxd_server.accounts import Account
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


class _Doors(Collector):
    """What the connections and the keys count, read at scrape time."""

    def __init__(self, created: float, connections: Connections, keys: Keys):
        self._created, self._connections, self._keys = created, connections, keys

    def collect(self) -> Iterator[Metric]:
        connections = self._connections
        yield GaugeMetricFamily("nxd_start_time_seconds", "When the server started, since 1970.", self._created)
        yield GaugeMetricFamily("nxd_connections", "Open connections.", len(connections))
        yield GaugeMetricFamily("nxd_connections_most", "Limit of open connections.", connections.most)
        yield _by_label("nxd_connections_ended", "Connections ended by the server.", "reason", connections.ended)
        if self._keys.guard_metrics:  # names of people, and what each of them does
            yield from _by_key(self._keys.accounts.values())


class _Model(Collector):
    """The gauges and counters of a model's engines, read at scrape time."""

    def __init__(self, service: Service):
        self._service = service

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not query a service that is still starting

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily("nxd_ready", "1 when a request sent now would be served.", float(service.ready))
        stats = service.stats()
        restarts = 0 if stats is None else stats.restarts
        yield CounterMetricFamily("nxd_engine_restarts", "Restarts of the ranks.", restarts)
        yield GaugeMetricFamily("nxd_weight_version", "Weight swaps since the start.", service.weight_version)
        if service.load_seconds is not None:
            yield GaugeMetricFamily(
                "nxd_graph_load_seconds", "Seconds to load the model until the server was ready.", service.load_seconds
            )
        texts = GaugeMetricFamily("nxd_texts_aside", "Conversations being rendered, or waiting.", labels=["kind"])
        texts.add_metric(["conversations"], 0 if service.chat_template is None else service.chat_template.inside)
        yield texts
        yield from self._ranks()
        if stats is not None:
            yield from _gauges(stats)
            yield from _counters(stats)
            yield from self._buckets(stats)

    def _ranks(self) -> Iterator[Metric]:
        steps = CounterMetricFamily("nxd_rank_steps", "Steps a rank completed.", labels=["rank"])
        seconds = CounterMetricFamily("nxd_rank_seconds", "Seconds a rank spent in steps.", labels=["rank"])
        age = GaugeMetricFamily("nxd_worker_heartbeat_age_seconds", "Seconds since a heartbeat.", labels=["rank"])
        alive = GaugeMetricFamily("nxd_rank_alive", "1 while the rank's process lives.", labels=["rank"])
        for rank in self._service.ranks():
            label = [str(rank.rank)]
            alive.add_metric(label, float(rank.alive))
            steps.add_metric(label, float(rank.steps))
            seconds.add_metric(label, rank.seconds)
            if rank.last_step_age is not None:
                age.add_metric(label, rank.last_step_age)
        yield from (steps, seconds, age, alive)

    def _buckets(self, stats: EngineStats) -> Iterator[Metric]:
        names = ["graph", "batch", "seq"]
        executions = CounterMetricFamily("nxd_bucket_executions", "Executions of a compiled graph.", labels=names)
        seconds = CounterMetricFamily("nxd_bucket_seconds", "Seconds spent in a compiled graph.", labels=names)
        useful = CounterMetricFamily("nxd_bucket_useful_tokens", "Tokens (or rows) of requests.", labels=names)
        padding = CounterMetricFamily("nxd_bucket_padding_tokens", "Tokens (or rows) of padding.", labels=names)
        step = GaugeMetricFamily("nxd_bucket_step_seconds", "Estimate of one execution.", labels=names)
        for bucket, batch, seq in self._service.bucket_shapes():
            label = [bucket, str(batch), str(seq)]
            executions.add_metric(label, stats.bucket_steps.get(bucket, 0))
            seconds.add_metric(label, stats.bucket_seconds.get(bucket, 0.0))
            useful.add_metric(label, stats.useful_tokens.get(bucket, 0))
            padding.add_metric(label, stats.padding_tokens.get(bucket, 0))
            if bucket in stats.step_seconds:
                step.add_metric(label, stats.step_seconds[bucket])
        yield from (executions, seconds, useful, padding, step)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("nxd_num_requests_running", "Choices that hold a slot.", stats.running)
    yield GaugeMetricFamily("nxd_num_requests_waiting", "Choices that wait for a slot.", stats.waiting)
    yield GaugeMetricFamily("nxd_queue_tokens", "Prompt tokens that wait for a slot.", stats.waiting_tokens)
    yield GaugeMetricFamily("nxd_slots", "Slots of the cache.", stats.slots)
    yield GaugeMetricFamily("nxd_slots_free", "Slots that are free.", stats.slots_free)
    yield GaugeMetricFamily("nxd_kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", stats.kv_usage)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("nxd_prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens)
    yield CounterMetricFamily("nxd_prefix_cache_hits", "Prompt tokens found in the cache.", stats.reused_tokens)
    yield CounterMetricFamily("nxd_generation_tokens", "Tokens generated.", stats.generated_tokens)
    yield CounterMetricFamily("nxd_spec_decode_num_draft_tokens", "Tokens guessed and verified.", stats.draft_tokens)
    yield CounterMetricFamily("nxd_spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens)
    yield _by_label("nxd_request_success", "Finished choices.", "finished_reason", stats.finished)
    yield _by_label("nxd_admission_rejections", "Requests rejected at admission.", "reason", stats.rejected)


def _by_key(accounts: Iterable[Account]) -> Iterator[Metric]:
    requests = CounterMetricFamily("nxd_key_requests", "Requests with a key.", labels=["key"])
    running = GaugeMetricFamily("nxd_key_requests_running", "Those being answered.", labels=["key"])
    tokens = CounterMetricFamily("nxd_key_tokens", "Tokens of a key's requests.", labels=["key", "of"])
    refused = CounterMetricFamily("nxd_key_refusals", "Requests beyond a key's limit.", labels=["key", "limit"])
    for account in accounts:
        requests.add_metric([account.name], account.requests)
        running.add_metric([account.name], account.running)
        tokens.add_metric([account.name, "prompts"], account.prompt_tokens)
        tokens.add_metric([account.name, "answers"], account.generated_tokens)
        for limit, count in account.refused.items():
            refused.add_metric([account.name, limit], count)
    yield from (requests, running, tokens, refused)


def _by_label(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
