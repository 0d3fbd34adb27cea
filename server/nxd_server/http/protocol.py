"""uvicorn's HTTP/1.1 protocol, with its one answer of its own in our shape."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, encode


class JsonErrorProtocol(H11Protocol):
    """What is not HTTP at all never reaches the application; it too is refused as JSON."""

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close; a peer in the middle of an answer is only closed."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(ApiError(400, msg, code="invalid_http").body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
