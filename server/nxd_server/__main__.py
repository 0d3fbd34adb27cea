"""``python -m nxd_server DIR --port 8000``: the server without the command line's other tools.

Every setting of :class:`~nxd_server.settings.ServerSettings` is an option of the same name.
"""

from __future__ import annotations

import argparse
import sys

from nxd_server.app.run import serve
from nxd_server.settings import ServerSettings, SettingsError


def main(arguments: list[str] | None = None) -> int:
    """Parse ``arguments`` and serve; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nxd_server", description="Serve an artifact over HTTP.")
    parser.add_argument("artifact", help="directory that `nxd-infer trace` wrote")
    parser.add_argument("--config", help="JSON or YAML file with settings")
    parser.add_argument("--api-key", dest="api_keys", action="append", help="key that opens the server; repeatable")
    parser.add_argument("--lora", action="append", help="LoRA adapter to begin with, as NAME=PATH; repeatable")
    for name, field in ServerSettings.model_fields.items():
        if name not in ("api_keys", "lora"):
            parser.add_argument("--" + name.replace("_", "-"), dest=name, help=field.description)
    given = vars(parser.parse_args(arguments))
    artifact, config = given.pop("artifact"), given.pop("config")
    try:
        settings = ServerSettings.resolve(config, **given)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return serve(artifact, settings)


if __name__ == "__main__":
    sys.exit(main())
