"""Who asks: a request's key, what it may be used for, and the account of its holder."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator

from starlette.types import Scope

from nxd_server.accounts import ANONYMOUS, Account
from nxd_server.api_keys import ApiKey, read_keys
from nxd_server.errors import SettingsError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.page.files import FILES as PAGE
from nxd_server.http.scope_keys import KEY
from nxd_server.settings import ServerSettings

logger = logging.getLogger("nxd_server.http")
METRICS = "/metrics"
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", METRICS})
"""Routes that a load balancer, a kubelet, SageMaker and Prometheus use without a key."""


class Keys:
    """The keys that open this server, ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``, compared in constant time.

    Without any but the admin key, all routes except the admin routes are open; without an admin key these are closed to
    everyone. ``/metrics`` is open as long as no key has it as its scope.
    """

    def __init__(self, settings: ServerSettings):
        """Raises SettingsError as :func:`read_keys`."""
        self._settings = settings
        self.closed = bool(settings.api_keys or settings.api_keys_file)
        self.accounts: dict[str, Account] = {}
        """By the names of the keys; those of keys that are gone stay."""
        self._keys: list[ApiKey] = []
        self._use(read_keys(settings))

    def reload(self) -> None:
        """Read the file of keys again; a faulty one changes nothing. Logs what came of it."""
        try:
            self._use(read_keys(self._settings))
            logger.info("%d keys are in use", len(self._keys))
        except SettingsError as error:
            logger.error("%s; the keys that were read before go on", error)

    def _use(self, keys: list[ApiKey]) -> None:
        for key in keys:
            account = self.accounts.setdefault(key.name, Account(key.name))
            if key not in self._keys:  # else no new minute begins
                account.allow(key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests)
        self._keys = keys

    @property
    def guard_metrics(self) -> bool:
        """Whether ``/metrics`` needs a key."""
        return any("metrics" in key.scopes for key in self._keys)

    def check(self, scope: Scope) -> Account:
        """Return whose request it is. Raises :class:`ApiError` 401 for a route that needs a key without a valid one,
        403 for a key that is for something else."""
        path = scope["path"]
        needed = "metrics" if path == METRICS else "use"
        closed = self.closed and path not in OPEN_PATHS and not (path in PAGE and scope["method"] in ("GET", "HEAD"))
        if not closed and not (path == METRICS and self.guard_metrics):
            return ANONYMOUS
        key = self._sent(scope, "API")
        if key is None:
            raise _refusal("the API key is not valid")
        scope[KEY] = key
        if not {needed, "admin"} & {*key.scopes}:
            raise ApiError(403, f"the key {key.name!r} is for {', '.join(key.scopes)}, and {path} is for {needed}")
        return self.accounts[key.name]

    def owner(self, scope: Scope) -> bytes:
        """Return whose request this is: the digest of its key, empty for a server without keys."""
        return scope[KEY].digest if KEY in scope else b""

    def check_admin(self, scope: Scope) -> None:
        """Raise :class:`ApiError` 403 if no key is for admin or for one that is not, 401 for no key."""
        if not any("admin" in key.scopes for key in self._keys):
            raise ApiError(
                403,
                f"{scope['path']} changes what is served, and this server has no admin key: start it with "
                "NXD_INFER_ADMIN_KEY in its environment, the setting admin_key in its --config, or --admin-key",
                code="admin_disabled",
            )
        key = self._sent(scope, "admin")
        if key is None or "admin" not in key.scopes:
            raise ApiError(403, f"{scope['path']} needs the admin key; the key that was sent is a different one")

    def _sent(self, scope: Scope, what: str) -> ApiKey | None:
        """Return the key that was sent, None if it is none of ours. Raises ApiError 401 if none was.

        Compares every pair, even after a match, and digests, which have equal lengths.
        """
        offered, found = list(_offered(scope["headers"])), None
        if not offered:
            raise _refusal(f"no {what} key: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        for digest in (hashlib.sha256(one).digest() for one in offered):
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and rest.strip():
                yield rest.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.strip()


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, headers={"www-authenticate": "Bearer"})
