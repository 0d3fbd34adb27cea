"""Settings in a file, JSON or YAML. No message ever quotes a line of one: it may hold a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_server.errors import SettingsError


def read_text(path: Path, what: str) -> str:
    """The text of a file; SettingsError says which file of settings (``what``) cannot be read, and why."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {why}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Settings by name. SettingsError for a file that cannot be read, or that is no mapping."""
    text = read_text(path, "the configuration file")
    try:
        if path.suffix == ".json":
            data = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            data = _load_yaml(text)
        else:
            raise SettingsError(f"the configuration file {str(path)!r} must end in .json, .yaml or .yml")
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        # The parser's message may quote the line with a key in it; only the place is safe to show.
        place = getattr(error, "lineno", None)
        where = f" (line {place})" if place else ""
        raise SettingsError(f"the configuration file {str(path)!r} is not valid{where}") from None
    if not isinstance(data, dict):
        raise SettingsError(f"the configuration file {str(path)!r} must hold a mapping of setting names to values")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _load_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise SettingsError("a YAML configuration file needs PyYAML (pip install pyyaml), or write JSON") from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError("not YAML") from error
