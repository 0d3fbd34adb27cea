"""The server's certificate for TLS, read again once its files have changed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings, read_text

logger = logging.getLogger("nxd_server")


class Certificate:
    """A chain of certificates and its key; ``context`` is for the server's connections.

    Raises SettingsError that says what is wrong with the files.
    """

    def __init__(self, chain: Path, key: Path, password: str | None):
        self._files, self._password = (chain, key), password
        self._seen = self._state()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def refresh(self) -> None:
        """Use what the files hold now for further connections; if they do not go together, what they held before."""
        if (state := self._state()) == self._seen:
            return
        self._seen = state
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair would spoil the context in use
            self._load(self.context)
            logger.info("a new certificate is in use")
        except SettingsError as error:
            logger.error("the former certificate stays in use: %s", error)

    def _state(self) -> list[tuple[int, ...]]:
        """Return what changes when a file, or what a link leads to, is replaced or written."""
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return []
        return [(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns) for info in found]

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        chain, key = self._files
        for name, file in (("ssl_certfile", chain), ("ssl_keyfile", key)):
            read_text(file, name)
        try:
            context.load_cert_chain(chain, key, lambda: self._password or "")  # without one it would ask the terminal
        except (OSError, ValueError) as error:  # the former is also of a file that is gone
            raise SettingsError(
                f"ssl_certfile {str(chain)!r} and ssl_keyfile {str(key)!r} are no PEM files of a certificate and its "
                f"key, or ssl_keyfile_password is not the key's: {getattr(error, 'reason', None) or error}"
            ) from None
        return context


def certificate_of(settings: ServerSettings) -> Certificate | None:
    """Return the certificate that the settings name; None for a server without TLS. Raises SettingsError."""
    chain, key, password = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password
    if chain is None and key is None and password is None:
        return None
    if chain is None or key is None:
        raise SettingsError(f"{'ssl_certfile' if chain is None else 'ssl_keyfile'} is missing: TLS needs both")
    return Certificate(chain, key, password)
