"""API keys: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``, any of several, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from .errors import ApiError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""What a load balancer, a kubelet, SageMaker and Prometheus ask without a key."""


class Keys:
    """The keys that open this server; with none, it is open to all."""

    def __init__(self, keys: Iterable[bytes]):
        # Digests have one length, so that the comparison's time says nothing about a key's length either.
        self._digests = [hashlib.sha256(key).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"Keys({len(self._digests)})"

    def check(self, scope: Scope) -> None:
        """Raises :class:`ApiError` 401 unless ``scope`` is an open path or carries a key."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        offered = list(_offered(scope["headers"]))
        if not offered:
            raise _refusal("no API key: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        # Every pair is compared, whether one matched already or not.
        matches = [self._matches(key) for key in offered]
        if not any(matches):
            raise _refusal("the API key is not valid")

    def _matches(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        equal = 0
        for known in self._digests:
            equal |= hmac.compare_digest(digest, known)
        return bool(equal)


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and rest.strip():
                yield rest.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.strip()


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, headers={"www-authenticate": "Bearer"})
