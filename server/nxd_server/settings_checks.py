"""What the values of settings must be, where their type does not say it. Each check returns the value; ``name`` is for
its SettingsError."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from nxd_infer.util.options import Kind
from nxd_server.errors import SettingsError

KEY_LIST = Kind("a list of keys, or comma-separated text", lambda value: isinstance(value, str | list | tuple))


def key_list(name: str, value: Any) -> list[str]:
    keys = value
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            keys = json.loads(value)
        except ValueError:
            raise SettingsError(f"{name} looks like a JSON list but is not one") from None
    elif isinstance(value, str):
        keys = [key.strip() for key in value.split(",") if key.strip()]
        if value.strip() and not keys:
            raise SettingsError(f"{name} holds no key; unset it to leave the server open to everyone")
    if not all(isinstance(key, str) for key in keys):
        raise SettingsError(f"{name} holds something that is not a text")
    if not all(key.strip() for key in keys):
        raise SettingsError(f"{name}: an empty key would open the server to everyone; leave it out where that is meant")
    return list(keys)


def not_blank(name: str, key: str) -> str:
    if not key.strip():
        raise SettingsError(f"{name} is empty; leave it out to close the routes that it opens")
    return key


def not_empty(name: str, text: str) -> str:
    if not text:
        raise SettingsError(f"{name} is empty; leave it out for the default")
    return text


def adapter_paths(name: str, given: list[str]) -> list[str]:
    for word in given:
        adapter, _, path = word.partition("=")
        if not adapter or not path:
            raise SettingsError(f"{name}: {word!r} is not NAME=PATH")
    return given


def directory(name: str, root: Path) -> Path:
    if not root.is_dir():
        raise SettingsError(f"{name} {str(root)!r} is not a directory")
    return root


def words(name: str, text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{name}: cannot be split into options: {error}") from None
    return text
