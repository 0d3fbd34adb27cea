"""``nxd-infer serve``: its options are the server's settings, which the environment or a file may give as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_server.app.run import serve
from nxd_server.settings import load_settings


def run(artifact: str, config: Path | None, given: dict[str, Any]) -> int:
    """Serve until a signal ends it; returns the exit status. ``given``: settings by name, None where one is not."""
    return serve(artifact, load_settings(config, **given))
