"""Connections whose clients are slow: they end in time, and none of them shuts out the others."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.support.http.http_servers import http_request, is_error, raw, read_all, toy_server, wait_for

COMPLETIONS = "/v1/completions"
HALF_HEAD = b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: "
HALF_BODY = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
LIVEZ_ONCE = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def stream(tokens):
    body = {"prompt": "hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return http_request(COMPLETIONS, json.dumps(body).encode(), "Connection: close")


def ended(server, reason):
    return server.metric("nxd_connections_ended_total", reason=reason)


def closed(connection):
    """Whether the server has ended it; nothing of it may be left to read."""
    connection.settimeout(90)
    return read_all(connection) == b""


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """A file: while it says "hold", ``small`` goes no step further."""
    return tmp_path_factory.mktemp("small") / "hold"


@pytest.fixture(scope="module")
def small(hold):
    """16 connections, 15 of which are answered at a time, slowly; deadlines of seconds."""
    with toy_server(
        toy={"slots": 15, "batch_sizes": [1, 15], "delay": 0.05, "max_len": 400}, arguments=("--fail-file", str(hold)),
        max_connections=16, header_timeout=3.0, connection_timeout=4,
        keep_alive_interval=0.3, access_log=False,
    ) as server:  # fmt: skip
        yield server


def test_more_silent_connections_than_descriptors_shut_nobody_out():
    """At 128 descriptors, 200 of them kept even /livez from being answered until they left."""
    arguments = ("--descriptors", "128")
    with toy_server(arguments=arguments, header_timeout=600, access_log=False) as server, contextlib.ExitStack() as all:
        most = server.metric("nxd_connections_most")
        assert 16 <= most < 128 - 64
        for opening in (b"", HALF_HEAD):
            for _ in range(200):
                all.enter_context(raw(server, opening))
            for request in (LIVEZ_ONCE, stream(2)) * 3:  # each on a connection of its own: an idle one may be evicted
                with raw(server, request) as connection:
                    assert read_all(connection).startswith(b"HTTP/1.1 200 ")
        assert server.metric("nxd_connections") <= most
        assert ended(server, "evicted") >= 400 - most
        assert server.process.poll() is None and "Traceback" not in server.log


@pytest.mark.parametrize("opening", [b"", LIVEZ + HALF_HEAD], ids=["nothing", "half of a next one"])
def test_a_head_that_is_never_complete_is_waited_for_until_its_deadline(small, opening):
    before = ended(small, "late")
    with raw(small, opening) as connection:
        with contextlib.suppress(OSError):  # one byte after the other moves no deadline
            while ended(small, "late") == before:
                if opening:
                    connection.sendall(b"x")
        answer = read_all(connection)
    assert ended(small, "late") == before + 1
    assert answer.count(b"HTTP/1.1 ") == opening.count(b"\r\n\r\n")


def test_a_body_that_goes_silent_is_waited_for_no_longer_than_an_idle_connection(small):
    with raw(small, HALF_BODY) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 504 ") and b"connection_timeout" in answer


def test_where_all_are_being_answered_the_health_routes_still_are_and_no_answer_is_cut(small, hold):
    hold.write_text("hold")
    with contextlib.ExitStack() as all:
        all.callback(hold.unlink, missing_ok=True)  # the others go on if this one fails
        busy = [all.enter_context(raw(small, stream(5))) for _ in range(16)]
        for connection in busy:  # a keep-alive line at least: every request has been read
            assert connection.recv(1, socket.MSG_PEEK)
        assert small.metric("nxd_num_requests_waiting") > 0
        for _ in range(12):  # each on a connection of its own
            for path, status in (("/livez", 200), ("/readyz", 200), ("/v1/models", 503)):
                with raw(small, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()) as connection:
                    assert read_all(connection).startswith(f"HTTP/1.1 {status} ".encode())
        response = small.post(COMPLETIONS, {"prompt": "a"})
        is_error(response, 503, code="too_many_connections")
        assert response.headers["retry-after"] == "1" and response.headers["connection"] == "close"
        hold.unlink()
        for connection in busy:
            connection.settimeout(120)
            assert b"[DONE]" in read_all(connection)


def test_one_address_has_no_more_than_its_share():
    """An address is that of the connection, whatever its requests say; those of a trusted proxy name the log's."""
    env = {"FORWARDED_ALLOW_IPS": "127.0.0.1"}
    with toy_server(max_connections_per_address=3, env=env) as server, contextlib.ExitStack() as all:
        server.get("/version", headers={"x-forwarded-for": "1.1.1.1, 8.8.8.8"})
        wait_for(lambda: "/version 200" in server.log)
        assert " 8.8.8.8" in server.log
        kept = [all.enter_context(raw(server)) for _ in range(2)]
        with raw(server, LIVEZ) as fourth:
            assert closed(fourth)
        other = all.enter_context(socket.create_connection(("127.0.0.1", server.port), 90, ("127.0.0.2", 0)))
        other.sendall(LIVEZ.replace(b"livez", b"version").replace(b"Host: x", b"Host: x\r\nX-Forwarded-For: 9.9.9.9"))
        assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: server.log.count("/version 200") == 2)
        assert "127.0.0.2" in server.log and "9.9.9.9" not in server.log, "it is not a trusted proxy"
        kept.pop().close()
        wait_for(lambda: server.metric("nxd_connections") == 3)
        with raw(server, LIVEZ) as next_one:
            assert next_one.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert ended(server, "refused") == 1


SENT = 128 * 2**20


def test_what_is_refused_is_not_read_for_ever():
    """Counted in bytes: what the server takes of a body it has no use for."""
    with toy_server(api_keys=["k"], access_log=False) as server:
        for target in (f"POST {COMPLETIONS}", "GET /livez", "POST /nowhere"):
            head = f"{target} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n"
            with raw(server, head.encode()) as connection:
                sent = 0
                with pytest.raises(OSError):  # closed
                    while sent < SENT:
                        sent += connection.send(b"x" * 2**20)
                assert sent < SENT
