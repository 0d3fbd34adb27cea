"""A small S3: the calls that checkpoints need, over HTTP, objects in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3
"""Entries a listing, so that every listing has several pages."""


def _etag(data: bytes) -> str:
    """As S3 has it: the content's md5."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True
    objects: dict[str, bytes]
    calls: list[str]
    kept: Collection[str]

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        answer = super().handle_expect_100()
        self.wfile.flush()  # the client waits for it before it sends anything
        return answer

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": _etag(body), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _query(self) -> dict[str, str]:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return {name: values[0] for name, values in query.items()}

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        data = self.rfile.read(size)
        if len(data) < size:  # the client was killed: what it began to send is no object
            self.close_connection = True
            return
        assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
        self.calls.append(f"PUT {self._key()}")
        self.objects[self._key()] = data
        self._answer(200)

    def do_DELETE(self) -> None:
        if self._key() in self.kept:
            self._error(403, "AccessDenied")
            return
        self.calls.append(f"DELETE {self._key()}")
        self.objects.pop(self._key(), None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        query = self._query()
        if query.get("list-type") == "2":
            self._list(query)
            return
        key = self._key()
        if key.startswith("forbidden/"):
            self._error(403, "AccessDenied")
        elif key not in self.objects:
            self._error(404, "NoSuchKey")
        else:
            self._answer(200, self.objects[key])

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _list(self, query: dict[str, str]) -> None:
        if self._key() == "missing":
            self._error(404, "NoSuchBucket")
            return
        bucket, prefix, delimiter = self._key(), query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, bytes | None] = {}
        for key, data in dict(self.objects).items():  # others may put and delete meanwhile
            name = key.removeprefix(f"{bucket}/")
            if name != key and name.startswith(prefix):
                first, inside, _ = name[len(prefix) :].partition(delimiter or "//")
                entries[prefix + first + inside] = None if inside else data
        rows = [(name, entries[name]) for name in sorted(entries) if name > query.get("continuation-token", "")]
        body = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if data is None
            else f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{_etag(data)}</ETag></Contents>"
            for name, data in rows[:PAGE]
        )
        more = f"<NextContinuationToken>{escape(rows[PAGE - 1][0])}</NextContinuationToken>" if rows[PAGE:] else ""
        truncated = str(bool(rows[PAGE:])).lower()
        xml = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{body}</ListBucketResult>"
        self._answer(200, xml.encode(), Content_Type="application/xml")


@contextmanager
def s3_server(kept: Collection[str] = ()) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """``(endpoint, objects by bucket/key, calls that changed something)`` of a server that runs inside the block.

    It refuses to delete what is ``kept``.
    """
    handler = type("Handler", (_Handler,), {"objects": {}, "calls": [], "kept": kept})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.objects, handler.calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
