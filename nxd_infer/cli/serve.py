"""``nxd-infer serve``: settings from the command line, the environment and a file, in that order of precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run(artifact: Path, config: Path | None, **given: Any) -> int:
    """Serve until a signal ends it; returns the exit status."""
    from nxd_server.app.run import serve
    from nxd_server.settings import load_settings

    settings = load_settings(config, **{name: value for name, value in given.items() if value is not None})
    return serve(artifact, settings)
