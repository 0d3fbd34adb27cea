"""Names of the server's entries in a request's ASGI scope."""

from __future__ import annotations

REQUEST_ID = "nxd.request_id"
ARRIVED = "nxd.arrived"
"""When the request's head was complete, on the monotonic clock."""
REFUSAL = "nxd.refusal"
"""The ApiError of the response, for the access log."""
FIELDS = "nxd.fields"
"""What a route's own fields are called that are passed on by other names: from those, to its own."""
CROWDED = "nxd.crowded"
"""In the scope's state: the connection is reserved for the health routes."""
BODY_BYTES = "nxd.body_bytes"
"""Of the body that was read."""
KEY = "nxd.key"
"""The ApiKey that was sent, if the route needs one."""
WHOLE = "nxd.whole"
"""The WholeRequest, so that the same weights answer all parts of the request."""
