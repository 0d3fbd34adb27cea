"""HTTP/1.1 as bytes: input that parsers have disagreed about (cases of http-garden, h11 and llhttp), which makes
request smuggling possible. Whatever a proxy in front took for the next request is not answered after a refusal."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.http.http_servers import http_request, raw, read_all, toy_server

BODY = b'{"prompt": "a"}'
NEXT = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""What a smuggler would like to be answered as well."""


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    lines = [f"POST /tokenize HTTP/{version}", "Host: x", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(*headers: str, line: str = "GET /livez HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: x", *headers]).encode("latin-1") + b"\r\n\r\n"


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"

BAD = {
    "both lengths": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunked in HTTP/1.0": post(CHUNKED, body=CHUNKS, version="1.0"),
    "two lengths": post(LENGTH, "Content-Length: 3"),
    "another encoding": post("Transfer-Encoding: gzip", body=CHUNKS),
    "a space before the colon": post("Content-Length : 15"),
    "a chunk's size with 0x": post(CHUNKED, body=b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a head without an end": get("X-A: " + "a" * 10**6),
    "a target without an end": get(line="GET /" + "a" * 10**6 + " HTTP/1.1"),
}
ANSWERED = {
    "length": (post(LENGTH), 200),
    "chunk size in capitals and zeros": (post(CHUNKED, body=b"000F\r\n" + BODY + b"\r\n000\r\n\r\n"), 200),
    "trailers": (post(CHUNKED, body=b"f\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n\r\n"), 200),
    "a compressed body": (post(LENGTH, "Content-Encoding: gzip"), 415),
    "two encodings": (post(LENGTH, "Content-Encoding: identity", "Content-Encoding: br"), 415),
    "an upgrade": (get("Connection: upgrade", "Upgrade: websocket"), 200),
    "an unknown method": (get(line="BREW /livez HTTP/1.1"), 405),
}


@pytest.fixture(scope="module")
def server():
    with toy_server(header_timeout=600, connection_timeout=600, access_log=False) as server:
        yield server


@pytest.fixture(scope="module")
def hasty():
    """Deadlines of a second, for requests that never become complete."""
    with toy_server(header_timeout=1.0, connection_timeout=1, access_log=False) as server:
        yield server


def statuses(server, data: bytes) -> list[int]:
    """The statuses of all answers on a connection that carries ``data``, until the server closes it."""
    with raw(server) as connection:
        with contextlib.suppress(OSError):  # closed in the middle of it
            connection.sendall(data)
        answer = read_all(connection)
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]


@pytest.mark.parametrize("case", ANSWERED)
def test_what_is_answered_leaves_the_connection_for_the_next_request(server, case):
    data, status = ANSWERED[case]
    assert statuses(server, data + NEXT) == [status, 200]


@pytest.mark.parametrize("case", BAD)
def test_what_parsers_disagree_about_is_refused_and_nothing_after_it_answered(hasty, case):
    assert statuses(hasty, BAD[case] + NEXT) in ([400], [])


def test_what_ends_a_connection_is_the_last_that_is_answered_on_it(server):
    assert statuses(server, b"GET /livez HTTP/1.0\r\n\r\n" + NEXT) == [200]
    assert statuses(server, post("Content-Length: 1\r\n 5") + NEXT) == [400]


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=1, max_size=60), place=st.integers(0, 80))
def test_random_bytes_in_a_request_are_answered_or_the_connection_is_closed(server, data, place):
    good = http_request("/tokenize", BODY, "Connection: close")
    with raw(server, good[:place] + data + good[place:]) as connection:
        connection.shutdown(1)
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer[:20]


def test_the_servers_are_as_before(server, hasty):
    """Nor does what clients send fill the log."""
    for one in (server, hasty):
        assert "Traceback" not in one.log and "WARNING" not in one.log
        assert one.metric("nxd_http_requests_total", status="500") == 0
        one.wait_metric("nxd_connections", 1.0)
