"""OpenTelemetry spans of requests, as a receiver of OTLP over HTTP gets them."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from nxd_infer.errors import MissingPackageError
from nxd_server.errors import SettingsError
from nxd_server.http.ops.traces import Traces
from nxd_server.settings import ServerSettings
from tests.support.http.http_servers import toy_server, wait_for

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver(ThreadingHTTPServer):
    """What it was sent; while ``answers`` is not set, it takes a request and says nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, bytes]] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Span]:
        found = []
        for path, body in self.bodies:
            assert path == "/v1/traces"
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert values(of_resource.resource)["service.name"] == "nxd-infer"
                found += [span for scope in of_resource.scope_spans for span in scope.spans]
        return found

    def span(self, request_id: str) -> Span:
        """The one of this request, once it has come."""

        def mine() -> list[Span]:
            return [span for span in self.spans() if values(span)["gen_ai.request.id"] == request_id]

        wait_for(mine)
        (span,) = mine()
        return span


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append((self.path, body))
        self.server.answers.wait(60)
        with contextlib.suppress(OSError):
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def values(holder: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in holder.attributes}


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.answers.set()
        receiver.shutdown()


@pytest.fixture(scope="module")
def receiver():
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def server(receiver, tmp_path_factory):
    fails = tmp_path_factory.mktemp("toy") / "fails"
    arguments = ("--fail-file", str(fails))
    settings = {"otlp_traces_endpoint": receiver.url, "api_keys": ["sesame-key"], "admin_key": "admin-key"}
    settings["keep_alive_interval"] = 0.2
    with toy_server(arguments=arguments, env=SOON, **settings) as one:
        one.headers["authorization"] = "Bearer sesame-key"
        one.fails = fails
        yield one


def named(request_id: str, **more: str) -> dict[str, dict[str, str]]:
    return {"headers": {"x-request-id": request_id, **more}}


def test_a_completion_is_a_span_of_its_callers_trace(server, receiver):
    before = time.time_ns()
    body = {"prompt": "secrets", "max_tokens": 3, "ignore_eos": True, "n": 2}
    answer = server.post("/v1/completions", body, **named("one", traceparent=CALLER)).json()
    span = receiver.span("one")
    assert span.name == "POST /v1/completions" and span.kind == Span.SPAN_KIND_SERVER
    assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == CALLER
    assert before < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    found = values(span)
    first, queued, whole = (found.pop(f"gen_ai.latency.{n}") for n in ("time_to_first_token", "time_in_queue", "e2e"))
    assert 0 <= queued < first < whole
    assert abs(whole - (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9) < 1e-6
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": "one",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "toy",
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert span.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize(
    "traceparent", [None, "00-zz-1", "ff" + CALLER[2:], CALLER.replace("b7ad6b7169203331", "0" * 16)]
)
def test_without_a_caller_that_can_be_read_a_trace_begins(server, receiver, traceparent):
    name = f"root-{traceparent}".replace(" ", "")
    more = {} if traceparent is None else {"traceparent": traceparent}
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **named(name, **more))
    span = receiver.span(name)
    assert not span.parent_span_id and len(span.trace_id) == 16 and span.trace_id.hex() not in CALLER


def test_what_a_caller_does_not_sample_is_not_sent(server, receiver):
    server.post("/v1/completions", {"prompt": "a"}, **named("unsampled", traceparent=CALLER[:-1] + "0"))
    server.post("/v1/completions", {"prompt": "a"}, **named("sampled"))
    assert receiver.span("sampled")
    assert "unsampled" not in {values(span)["gen_ai.request.id"] for span in receiver.spans()}


def test_streams_and_chats(server, receiver):
    body = {"messages": [{"role": "user", "content": "secrets"}], "max_tokens": 4, "ignore_eos": True, "stream": True}
    assert server.post("/v1/chat/completions", body, **named("chat")).text.endswith("data: [DONE]\n\n")
    found = values(receiver.span("chat"))
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.usage.input_tokens"] > len("user:secrets")


def test_errors_are_recorded_without_their_words(server, receiver):
    server.post("/v1/completions", {"prompt": "secrets", "max_tokens": 9999}, **named("refused"))
    span = receiver.span("refused")
    found = values(span)
    assert (found["http.response.status_code"], found["error.type"]) == (400, "context_length_exceeded")
    assert span.status.code == Status.STATUS_CODE_UNSET, "the client's fault, by the conventions of HTTP"
    server.post("/v1/completions", {"prompt": "a", "model": "secrets"}, **named("no-model"))
    found = values(receiver.span("no-model"))
    assert found["error.type"] == "model_not_found" and "gen_ai.request.model" not in found
    server.post("/v1/completions", {"prompt": "a"}, **named("no-key", authorization="Bearer secrets"))
    assert values(receiver.span("no-key"))["error.type"] == "invalid_api_key"
    server.post("/nowhere/secrets", {}, **named("nowhere"))
    assert receiver.span("nowhere").name == "POST unmatched"


def test_a_stream_that_fails_is_an_error(server, receiver):
    server.fails.write_text("hold")
    body = {"prompt": "a", "max_tokens": 9, "ignore_eos": True, "stream": True}
    with server._client.stream("POST", f"{server.url}/v1/completions", json=body, **named("failed")) as stream:
        chunks = stream.iter_text()
        assert stream.status_code == 200 and next(chunks).startswith(": keep-alive")
        server.fails.write_text("value")
        assert "generation_failed" in "".join(chunks)
    server.fails.unlink()
    span = receiver.span("failed")
    assert span.status.code == Status.STATUS_CODE_ERROR and not span.status.message
    found = values(span)
    assert (found["http.response.status_code"], found["error.type"]) == (200, "generation_failed")
    assert found["gen_ai.response.finish_reasons"] == ["error"]


def test_nothing_of_prompts_or_keys_is_sent(server, receiver):
    """After all of the above, whose prompts, keys, paths and models have these words."""
    server.post("/v1/completions", {"prompt": "a secret", "secrets": "secret"}, **named("last"))
    assert receiver.span("last") and len(receiver.bodies) > 3
    assert not any(word in body for _, body in receiver.bodies for word in (b"secret", b"sesame", b"admin-key"))


def test_embeddings(receiver):
    with toy_server(arguments=("--one-shot",), env=SOON, otlp_traces_endpoint=f"{receiver.url}/v1/traces") as server:
        answer = server.post("/v1/embeddings", {"input": ["ab", "cde"]}, **named("embedded")).json()
        found = values(receiver.span("embedded"))
        assert found["gen_ai.operation.name"] == "embeddings"
        assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
        assert not any("output" in name or "finish" in name for name in found)


def test_the_last_spans_are_sent_before_the_server_ends():
    with receiving() as receiver, toy_server(otlp_traces_endpoint=receiver.url) as server:  # the next batch: in 5 s
        server.post("/v1/completions", {"prompt": "a"}, **named("last"))
        assert server.stop() == 0
        assert receiver.span("last")


def test_a_receiver_that_hangs_stops_neither_answers_nor_the_end():
    """Far more spans than may wait; the exporter would wait ten seconds for each batch, the SDK thirty at its end."""
    small = {**SOON, "OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"}
    with receiving() as receiver:
        receiver.answers.clear()
        with toy_server(otlp_traces_endpoint=receiver.url, env=small) as server:
            for _ in range(40):
                assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            wait_for(lambda: receiver.bodies)
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < 10
            assert len(receiver.bodies) == 1, "it still waits for an answer to the first"


def test_a_receiver_that_is_gone_is_logged_and_stops_nothing():
    with receiving() as receiver:
        url = receiver.url
    with toy_server(otlp_traces_endpoint=url, env=SOON, log_format="json") as server:
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        wait_for(lambda: '"logger": "opentelemetry' in server.log)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        assert server.stop() == 0


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'nxd-infer\[otel\]'"):
        Traces("http://localhost:4318/v1/traces")


def test_urls():
    def kept(url: str) -> str | None:
        return ServerSettings(otlp_traces_endpoint=url).otlp_traces_endpoint

    assert (
        kept("http://a:4318") == kept("http://a:4318/") == kept("http://a:4318/v1/traces") == "http://a:4318/v1/traces"
    )
    assert kept("https://a/other") == "https://a/other"
    for wrong in ("a:4317", "grpc://a:4317", "http://", "http://user:word@a", "http://a?key=word", ""):
        with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
            ServerSettings(otlp_traces_endpoint=wrong)
        assert "word" not in str(refused.value)
