"""API keys: ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``, any of several, compared in constant time.

The admin key opens all routes; only it opens those that change what is served.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from nxd_server.http.error_responses import ApiError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""Routes that a load balancer, a kubelet, SageMaker and Prometheus use without a key."""


class Keys:
    """The keys that open this server; without any, all routes except the admin routes are open.

    Args:
        keys: any of them opens the routes of users.
        admin: opens all routes; without it the admin routes are closed to everyone.
    """

    def __init__(self, keys: Iterable[bytes], admin: bytes | None = None):
        # Digests have equal lengths, so that the time of a comparison does not reveal a key's length either.
        self._digests = [hashlib.sha256(key).digest() for key in keys]
        self._admin = [] if admin is None else [hashlib.sha256(admin).digest()]

    def check(self, scope: Scope) -> None:
        """Raise :class:`ApiError` 401 unless ``scope`` is an open path or carries a key."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        offered = list(_offered(scope["headers"]))
        if not offered:
            raise _refusal("no API key: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        if not _any_match(offered, [*self._digests, *self._admin]):
            raise _refusal("the API key is not valid")

    def check_admin(self, scope: Scope) -> None:
        """Raise :class:`ApiError` 403 without an admin key in the settings or for another key, 401 for no key."""
        if not self._admin:
            raise ApiError(
                403,
                f"{scope['path']} changes what is served, and this server has no admin key: start it with "
                "NXD_INFER_ADMIN_KEY in its environment, the setting admin_key in its --config, or --admin-key",
                code="admin_disabled",
            )
        offered = list(_offered(scope["headers"]))
        if not offered:
            raise _refusal("no admin key: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        if not _any_match(offered, self._admin):
            raise ApiError(403, f"{scope['path']} needs the admin key; the key that was sent is a different one")


def _any_match(offered: Iterable[bytes], digests: Iterable[bytes]) -> bool:
    """Whether any key is one of ``digests``. Compares every pair, even after a match."""
    equal = 0
    known = list(digests)
    for key in offered:
        digest = hashlib.sha256(key).digest()
        for other in known:
            equal |= hmac.compare_digest(digest, other)
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
