"""Which pages may use the server through somebody's browser.

A browser sends what any page asks it to, and says where the page comes from: ``Sec-Fetch-Site``, over plain HTTP only
``Origin``. Without a key nothing else tells such requests from those of the user, so only the server's own pages and
those of ``allowed_origins`` may ask. Other programs send neither header.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import Scope

from nxd_server.http.error_responses import ApiError, clip

if TYPE_CHECKING:
    from nxd_server.settings import ServerSettings

LOOPBACK = ("127.", "localhost", "::1")
OWN_SITE = (b"same-origin", b"none")
LINK = (b"navigate", b"document")
"""Mode and destination of a link that the user follows, to see the answer as a page of its own."""


class Origins:
    """The origins whose pages may ask; ``keyless``: whether the server has no keys."""

    def __init__(self, settings: ServerSettings, keyless: bool):
        self._allowed = {origin.encode() for origin in settings.allowed_origins}
        self._names = {urlsplit(origin).hostname for origin in settings.allowed_origins}
        self._private = keyless and settings.host.startswith(LOOPBACK)
        """Whether only this machine's user can be meant. Then a name of elsewhere, in ``Host``, is one whose owner has
        let it point here, so that the browser takes the server for a part of his site (DNS rebinding)."""

    def check(self, scope: Scope) -> None:
        """Raise ApiError 403 for the request of a page that may not ask."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin, site, host = (headers.get(name) for name in (b"origin", b"sec-fetch-site", b"host"))
        if b"*" in self._allowed or origin in self._allowed:
            return
        if site is None:
            foreign = origin is not None and origin.lower().partition(b"://")[2] != (host or b"").lower()
        else:
            link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == LINK
            foreign = site not in OWN_SITE and not (link and scope["method"] in ("GET", "HEAD"))
        if foreign:
            raise _refusal("a page of another origin", "foreign_origin", origin or b"ORIGIN")
        if self._private and host and not self._is_ours(host.decode("latin-1")):
            raise _refusal("who knows this machine by another name", "foreign_host", b"http://" + host)

    def _is_ours(self, host: str) -> bool:
        """Whether nobody elsewhere can have given the name in ``host`` to this machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            own = name in self._names or "." not in name or name.endswith(".localhost")
            return own or bool(ipaddress.ip_address(name).version)
        except ValueError:
            return False


def _refusal(who: str, code: str, origin: bytes) -> ApiError:
    fix = f"start the server with --allowed-origin {clip(origin.decode('latin-1'))} (NXD_INFER_ALLOWED_ORIGINS)"
    return ApiError(403, f"{who} may not use this server; to allow it, {fix}", code=code)
