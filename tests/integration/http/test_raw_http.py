"""HTTP/1.1 as bytes: input that parsers have disagreed about (cases of http-garden, h11 and llhttp), which makes
request smuggling possible. Whatever a proxy in front took for the next request is not answered after a refusal."""

from __future__ import annotations

import contextlib
import re

import pytest

from tests.support.http.http_servers import raw, read_all, toy_server

BODY = b'{"prompt": "a"}'
NEXT = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
"""What a smuggler would like to be answered as well."""


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    lines = [f"POST /tokenize HTTP/{version}", "Host: x", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(*headers: str, line: str = "GET /livez HTTP/1.1", host: bool = True) -> bytes:
    return "\r\n".join([line, *(["Host: x"] if host else []), *headers]).encode("latin-1") + b"\r\n\r\n"


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"

BAD = {
    "empty lines before": b"\r\n\r\n" + get(),
    "both lengths": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunked in HTTP/1.0": post(CHUNKED, body=CHUNKS, version="1.0"),
    "two lengths": post(LENGTH, "Content-Length: 3"),
    "a length of foreign digits": post("Content-Length: \xb2"),
    "another encoding": post("Transfer-Encoding: gzip", body=CHUNKS),
    "chunked twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "a space before the colon": post("Content-Length : 15"),
    "a value on two lines at the start": b"GET /livez HTTP/1.1\r\n X: a\r\nHost: x\r\n\r\n",
    "a null in a name": get("X\0A: b"),
    "no host": get(host=False),
    "two hosts": get("Host: y"),
    "a length with an underscore": post("Content-Length: 1_5"),
    "identity": post("Transfer-Encoding: identity", LENGTH),
    "a name with a parenthesis": get("X(A: b"),
    "a null in the path": get(line="GET /livez\0 HTTP/1.1"),
    "small letters": get(line="GET /livez http/1.1"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "a head without an end": get("X-A: " + "a" * 100_000),
    "a target without an end": get(line=f"GET /{'a' * 100_000} HTTP/1.1"),
}
BAD_CHUNKS = {
    "a size with 0x": b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a space after a size": b"f \r\n" + BODY + b"\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a bare newline after the data": b"f\r\n" + BODY + b"\n0\r\n\r\n",
    "a byte in each chunk": b"1\r\n \r\n" * 40_000,
}
BAD |= {f"chunks: {name}": post(CHUNKED, body=chunks) for name, chunks in BAD_CHUNKS.items()}
ANSWERED = {
    "length": (post(LENGTH), 200),
    "chunk size in capitals and zeros": (post(CHUNKED, body=b"000F\r\n" + BODY + b"\r\n000\r\n\r\n"), 200),
    "trailers": (post(CHUNKED, body=b"f\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n\r\n"), 200),
    "the same length twice in one": (post(f"Content-Length: {len(BODY)}, {len(BODY)}"), 200),
    "a query": (get(line="GET /livez?a=%00&b HTTP/1.1"), 200),
    "lines that end with a newline alone": (b"GET /livez HTTP/1.1\nHost: x\n\n", 200),  # RFC 9112, 2.2
    "a value that goes on in the next line": (post(LENGTH, "X-A: a\r\n Transfer-Encoding: chunked"), 200),  # 5.2
    "a compressed body": (post(LENGTH, "Content-Encoding: gzip"), 415),
    "two encodings": (post(LENGTH, "Content-Encoding: identity", "Content-Encoding: br"), 415),
    "no encoding at all": (post(LENGTH, "Content-Encoding: identity"), 200),
    "an upgrade": (get("Connection: upgrade", "Upgrade: websocket"), 200),
    "a whole address": (get(line="GET http://x/livez HTTP/1.1"), 404),
    "an unknown method": (get(line="BREW /livez HTTP/1.1"), 405),
    "keys that come twice": (post("Content-Length: 28", body=b'{"prompt": "a","prompt":"b"}'), 400),
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


def test_many_requests_on_one_connection_are_answered_in_order(server):
    targets = ["/livez", "/nowhere", "/version"] * 20
    data = b"".join(get(line=f"GET {target} HTTP/1.1") for target in targets)
    assert statuses(server, data + NEXT) == [200, 404, 200] * 20 + [200]


def test_a_request_may_come_in_pieces_of_any_size(server):
    data = post(CHUNKED, body=CHUNKS) + NEXT
    with raw(server) as connection:
        for place in range(0, len(data), 7):
            connection.sendall(data[place : place + 7])
        assert re.findall(rb"HTTP/1\.1 (\d\d\d) ", read_all(connection)) == [b"200", b"200"]


def test_the_servers_are_as_before(server, hasty):
    """Nor does what clients send fill the log."""
    for one in (server, hasty):
        assert "Traceback" not in one.log and "WARNING" not in one.log
        assert one.metric("nxd_http_requests_total", status="500") == 0
        one.wait_metric("nxd_connections", 1.0)
