"""``python -m nxd_server DIR --port 8000``: the server without the other commands.

Every setting is an option, as in ``nxd-infer serve``; a boolean takes ``true`` or ``false``.
"""

from __future__ import annotations

import argparse
import signal
import sys

from nxd_infer.util.options import command_options
from nxd_server.app.run import serve
from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings


def main(arguments: list[str] | None = None) -> int:
    """Parse ``arguments`` and serve; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nxd_server", description="Serve an artifact over HTTP.")
    parser.add_argument("artifact", help="an artifact, or a model directory to trace: a directory or a URL")
    parser.add_argument("--config", help="JSON or YAML file with settings")
    for name, option in command_options(ServerSettings).items():
        flag = (option.flag or "").partition("/")[0]
        action = "append" if option.repeats else "store"
        parser.add_argument(flag, dest=name, action=action, help=option.help.replace("%", "%%"))
    given = vars(parser.parse_args(arguments))
    artifact, config = given.pop("artifact"), given.pop("config")
    try:
        settings = ServerSettings.resolve(config, **given)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return serve(artifact, settings)


if __name__ == "__main__":
    # Until the server handles it: an exception, so that a trace of a model is ended as well.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
