"""``nxd-infer serve``: its options are the server's settings, which the environment or a file may give as well."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from nxd_infer.cli.parameters import with_options
from nxd_server.settings import load_settings
from nxd_server.settings_options import setting_options

SOURCE = "NXD_INFER_ARTIFACT"
"""The variable that names what to serve where the command line does not, as in a container."""


def command(name: str, summary: str, epilog: str) -> Any:
    """The command with an option for each setting. Made when it is called: importing the settings takes its time."""

    @with_options(setting_options())
    def serve(
        artifact: Annotated[
            str,
            typer.Argument(
                envvar=SOURCE,
                help="An artifact that `nxd-infer trace` wrote, or a Hugging Face model directory, which is traced "
                "first; a directory, or its URL in a store (s3://bucket/prefix).",
                show_default=False,
            ),
        ],
        config: Annotated[Path | None, typer.Option(help="JSON or YAML file with any of the settings below.")] = None,
        **given: Any,
    ) -> None:
        raise typer.Exit(run(artifact, config, given))

    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, help=summary, epilog=epilog)(serve)
    return typer.main.get_command(app)


def run(artifact: str, config: Path | None, given: dict[str, Any]) -> int:
    """Serve until a signal ends it; returns the exit status. ``given``: settings by name, None where one is not."""
    from nxd_server.app.run import serve  # slow: `serve --help` and completion do without

    return serve(artifact, load_settings(config, **given))
