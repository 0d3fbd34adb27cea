"""The keys that open a server: those of its settings, and those of its file of keys.

A line of the file is a key, or a JSON object with the fields of :class:`ApiKey`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.util.options import check_each, declared, option
from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings, read_text

FORMS = {
    "name": (r"[\w.@+-]{1,64}", "must be 1 to 64 letters, digits or any of _.@+-"),
    "sha256": (r"[0-9a-f]{64}", "must be a SHA-256 in 64 hexadecimal digits, in lower case"),
}


def _formed(name: str, text: str) -> str:
    form, words = FORMS[name]
    if not re.fullmatch(form, text):
        raise SettingsError(f"{name} {words}")
    return text


@dataclass(frozen=True)
class ApiKey:
    """A key and what its holder may do. Raises SettingsError with the name of each faulty field."""

    name: str = option(..., "What metrics, the log and errors call the key.", None, check=_formed)
    sha256: str = option(..., "Of the key.", None, secret=True, check=_formed)
    scopes: list[str] = option(
        ["use"], "Of use, metrics, and admin, which includes the others.", None, choices=("use", "admin", "metrics")
    )
    requests_per_minute: int | None = option(None, "Most requests a minute, on average.", int, minimum=1)
    tokens_per_minute: int | None = option(None, "Most tokens of prompts and answers, likewise.", int, minimum=1)
    concurrent_requests: int | None = option(None, "Most requests that are answered at a time.", int, minimum=1)

    def __post_init__(self) -> None:
        check_each(self, SettingsError)

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


def read_keys(settings: ServerSettings) -> list[ApiKey]:
    """Return all keys, the admin key too; none if the server is open to everyone.

    Raises SettingsError, which shows no key: the file cannot be read, holds no key or a faulty one; two have the same
    name or SHA-256; or the admin key is among the users'.
    """
    keys = [_plain(f"key-{place}", key) for place, key in enumerate(dict.fromkeys(settings.api_keys), 1)]
    if settings.api_keys_file is not None:
        keys += _in_file(settings.api_keys_file)
    if (admin := settings.admin()) is not None:
        one = _plain("admin", admin.decode(), "admin")
        if one.sha256 in [key.sha256 for key in keys]:
            raise SettingsError("admin_key is one of api_keys too: whoever may ask could change what is served")
        keys.append(one)
    seen: dict[str, ApiKey] = {}
    for key in keys:
        for same in (seen.setdefault(key.name, key), seen.setdefault(key.sha256, key)):
            if same is not key:
                raise SettingsError(f"two keys have the same name or SHA-256: {same.name!r} and {key.name!r}")
    return keys


def _plain(name: str, key: str, *scopes: str) -> ApiKey:
    return ApiKey(name, hashlib.sha256(key.strip().encode()).hexdigest(), list(scopes or ["use"]))


def _in_file(path: Path) -> Iterator[ApiKey]:
    lines = [pair for pair in enumerate(read_text(path, "api_keys_file").splitlines(), 1) if pair[1].strip()]
    if not lines:
        raise SettingsError(f"api_keys_file {str(path)!r} holds no key; expected one per line")
    for number, line in lines:
        try:
            yield _described(line) if line.lstrip().startswith("{") else _plain(f"line-{number}", line)
        except SettingsError as error:
            raise SettingsError(f"api_keys_file {str(path)!r}, line {number}: {error}") from None


def _described(line: str) -> ApiKey:
    known: dict[str, Any] = declared(ApiKey)
    try:
        given = json.loads(line)
    except ValueError:
        raise SettingsError("is not a JSON object") from None  # nor shown: it may hold a key
    for name in given:
        if name not in known:
            raise SettingsError(f"a key has no field {name!r}{did_you_mean(name, known)}")
    for name in FORMS:
        if name not in given:
            raise SettingsError(f"`{name}` is missing")
    return ApiKey(**given)
