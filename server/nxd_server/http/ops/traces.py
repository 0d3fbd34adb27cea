"""OpenTelemetry: a span of each POST, sent in batches by a thread of the SDK's, so that no request waits.

Attributes have the names of OpenTelemetry's conventions for generative AI, and vLLM's where these have none. They are
names, counts and times: nothing of a prompt, an answer, a key or an error's text. The SDK's own variables (``OTEL_*``)
set all else: what the receiver needs in headers, the service's name, how many spans may wait (2048; others are lost).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import MissingPackageError
from nxd_infer.util.version import VERSION
from nxd_server.http.scope_keys import ARRIVED, CONTEXT, ENDS, REFUSAL, REQUEST_ID, WHOLE

if TYPE_CHECKING:
    from starlette.types import Scope

    from nxd_server.engine.request import ErrorEvent, FinishEvent

OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
    **dict.fromkeys(("/v1/completions", "/", "/generate", "/generate_stream"), "text_completion"),
    "/v1/embeddings": "embeddings",
}


class Traces:
    """Spans for the OTLP/HTTP receiver at ``endpoint``. Raises MissingPackageError."""

    def __init__(self, endpoint: str):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            fix = "pip install 'nxd-infer[otel]', or leave otlp_traces_endpoint out"
            raise MissingPackageError(f"traces need OpenTelemetry's SDK and exporter: {fix}", name=error.name) from None
        resource = Resource({"service.name": "nxd-infer", "service.version": VERSION})
        resource = resource.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("nxd_server", VERSION)

    def record(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        """Record the span of a request that ends now, in its caller's trace if it names one."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, start_time=end - int(seconds * 1e9))
        span.set_attributes(_attributes(scope, route, status, seconds))
        if status >= 500 or (status == 200 and REFUSAL in scope):  # a stream that failed
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what waits; may take half a minute, so do it where nobody has to wait."""
        self._provider.shutdown()


def _attributes(scope: Scope, route: str, status: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": scope[REQUEST_ID],
        "gen_ai.latency.e2e": seconds,
    }
    if route in OPERATIONS:
        found["gen_ai.operation.name"] = OPERATIONS[route]
    if status >= 400 or REFUSAL in scope:
        found["error.type"] = scope[REFUSAL].code if REFUSAL in scope else str(status)
    if (context := scope.get(CONTEXT)) is not None and context.service.task:
        name = context.asked_for or context.service.model_name
        if context.models.find(name) is not None:  # else it may be any text
            found["gen_ai.request.model"] = name
        found["gen_ai.usage.input_tokens"] = scope[WHOLE].asked
    ends: list[FinishEvent | ErrorEvent] = [end for _, end in sorted(scope.get(ENDS, {}).items())]
    if ends:
        found["gen_ai.usage.output_tokens"] = sum(end.usage.completion_tokens for end in ends)
        found["gen_ai.response.finish_reasons"] = [getattr(end, "reason", "error") for end in ends]
    times = [end.timings for end in ends]
    if queued := [one.admitted - one.arrived for one in times if one.admitted is not None]:
        found["gen_ai.latency.time_in_queue"] = min(queued)
    if first := [one.first_token - scope[ARRIVED] for one in times if one.first_token is not None]:
        found["gen_ai.latency.time_to_first_token"] = min(first)
    return found
