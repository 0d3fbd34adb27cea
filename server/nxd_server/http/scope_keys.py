"""What this server keeps in a request's ASGI scope, by name."""

from __future__ import annotations

REQUEST_ID = "nxd.request_id"
REFUSAL = "nxd.refusal"
"""The ApiError that the request was answered with, for its log line."""
CROWDED = "nxd.crowded"
"""In the scope's state: the connection is one of those kept for the health routes."""
WHOLE = "nxd.whole"
"""The WholeRequest, so that the same weights answer all parts of the request."""
