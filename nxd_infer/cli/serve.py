"""``nxd-infer serve``: settings from the command line, the environment and a file, in that order of precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run(artifact: Path, config: Path | None, **given: Any) -> int:
    """Serve until a signal ends the server; return the exit status."""
    from nxd_server.config import load_settings
    from nxd_server.run import serve

    settings = load_settings(config, **{name: value for name, value in given.items() if value is not None})
    return serve(artifact, settings)
