"""HTTP/1.1 as bytes: input that parsers have disagreed about, which makes request smuggling possible.

The cases are those that http-garden, h11 and llhttp look at, written anew. A case is the bytes of one connection and
the statuses of all that is answered on it, in order; the connection is closed after the last. A refusal is a 400 after
which nothing more is read: whatever a proxy in front took for the next request is not answered.
"""

from __future__ import annotations

import contextlib
import re

import pytest

from tests.support.http.http_servers import raw, read_all, toy_server, wait_for

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

GOOD = {
    "length": post(LENGTH),
    "chunked": post(CHUNKED, body=CHUNKS),
    "chunk size in capitals and zeros": post(CHUNKED, body=b"000F\r\n" + BODY + b"\r\n000\r\n\r\n"),
    "trailers": post(CHUNKED, body=b"f\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n\r\n"),
    "the same length twice in one": post(f"Content-Length: {len(BODY)}, {len(BODY)}"),
    "a query": get(line="GET /livez?a=%00&b HTTP/1.1"),
}

BAD = {
    "empty lines before": b"\r\n\r\n" + get(),
    "both lengths": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunked in HTTP/1.0": post(CHUNKED, body=CHUNKS, version="1.0"),
    "two lengths": post(LENGTH, "Content-Length: 3"),
    "a length with an underscore": post("Content-Length: 1_5"),
    "a length of foreign digits": post("Content-Length: \xb2"),
    "another encoding": post("Transfer-Encoding: gzip", body=CHUNKS),
    "chunked twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "identity": post("Transfer-Encoding: identity", LENGTH),
    "a space before the colon": post("Content-Length : 15"),
    "a value on two lines at the start": b"GET /livez HTTP/1.1\r\n X: a\r\nHost: x\r\n\r\n",
    "a name with a parenthesis": get("X(A: b"),
    "a null in a name": get("X\0A: b"),
    "no host": get(host=False),
    "two hosts": get("Host: y"),
    "small letters": get(line="GET /livez http/1.1"),
    "a null in the path": get(line="GET /livez\0 HTTP/1.1"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "a head without an end": get("X-A: " + "a" * 100_000),
    "a target without an end": get(line=f"GET /{'a' * 100_000} HTTP/1.1"),
}
BAD_CHUNKS = {
    "a size with 0x": b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a bare newline after the data": b"f\r\n" + BODY + b"\n0\r\n\r\n",
    "a byte in each chunk": b"1\r\n \r\n" * 40_000,
}
BAD |= {f"chunks: {name}": post(CHUNKED, body=chunks) for name, chunks in BAD_CHUNKS.items()}
STATUSES = {
    "a compressed body": (post(LENGTH, "Content-Encoding: gzip"), [415]),
    "a body of two encodings, in two lines": (
        post(LENGTH, "Content-Encoding: identity", "Content-Encoding: br"),
        [415],
    ),
    "no encoding at all": (post(LENGTH, "Content-Encoding: identity"), [200]),
    "a whole address": (get(line="GET http://x/livez HTTP/1.1"), [404]),
    "an unknown method": (get(line="BREW /livez HTTP/1.1"), [405]),
    "keys that come twice": (post("Content-Length: 28", body=b'{"prompt": "a","prompt":"b"}'), [400]),
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


@pytest.mark.parametrize("case", GOOD)
def test_what_every_parser_takes_is_taken_and_the_next_request_too(server, case):
    assert statuses(server, GOOD[case] + NEXT) == [200, 200]


@pytest.mark.parametrize("case", BAD)
def test_what_parsers_disagree_about_is_refused_and_nothing_after_it_answered(hasty, case):
    assert statuses(hasty, BAD[case] + NEXT) in ([400], [])


@pytest.mark.parametrize("case", STATUSES)
def test_other_refusals_leave_the_connection_for_the_next_request(server, case):
    data, expected = STATUSES[case]
    assert statuses(server, data + NEXT) == [*expected, 200]


def test_a_version_before_ours_is_answered_and_the_connection_closed(server):
    assert statuses(server, b"GET /livez HTTP/1.0\r\n\r\n" + NEXT) == [200]


def test_what_the_standard_leaves_to_a_server_hides_no_request(server):
    """RFC 9112, 2.2: a line may end with a newline alone. 5.2: a server refuses a value that goes on in the next line,
    or reads a space; what is on the next line is no header of its own."""
    assert statuses(server, b"GET /livez HTTP/1.1\nHost: x\n\n" + NEXT) == [200, 200]
    assert statuses(server, post(LENGTH, "X-A: a\r\n Transfer-Encoding: chunked") + NEXT) == [200, 200]
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
    for one in (server, hasty):
        assert "Traceback" not in one.log
        assert one.metric("nxd_http_requests_total", status="500") == 0
        one.wait_metric("nxd_connections", 1.0)


def test_what_clients_send_neither_fills_the_log_nor_names_another_client():
    with toy_server() as server:
        with raw(server, b"nonsense\r\n\r\n") as connection:
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
        head = {"connection": "upgrade", "upgrade": "websocket", "x-forwarded-for": "8.8.8.8"}
        assert server.get("/version", headers=head).status_code == 200
        wait_for(lambda: "/version" in server.log)
        assert "WARNING" not in server.log and "8.8.8.8" not in server.log
