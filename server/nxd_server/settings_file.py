"""Read settings from a JSON or YAML file. Messages never quote its lines, because they may hold a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_server.errors import SettingsError


def read_text(path: Path, what: str) -> str:
    """Return the text of a file. Raises SettingsError with the reason; ``what`` names the kind of file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {why}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """Return settings by name. Raises SettingsError if the file cannot be read or is not a mapping."""
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
        # The parser's message may quote a line that holds a key; only the line number is safe to show.
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
