"""``nxd-infer serve``: its options are the server's settings, which the environment or a file may give as well."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main


def command(name: str, summary: str, epilog: str) -> Any:
    """The command with an option for each setting. Made when it is called: importing the settings takes its time."""
    from nxd_server.settings_options import setting_options

    options = list(setting_options())

    def serve(artifact: Path, config: Path | None, **given: Any) -> None:
        raise typer.Exit(run(artifact, config, given))

    annotations: dict[str, Any] = {
        "artifact": Annotated[
            Path, typer.Argument(help="An artifact that `nxd-infer trace` wrote.", show_default=False)
        ],
        "config": Annotated[Path | None, typer.Option(help="JSON or YAML file with any of the settings below.")],
    }
    for option in options:
        kind: Any = option.kind
        if option.choices:
            kind = enum.Enum(option.setting, {choice: choice for choice in option.choices}, type=str)
        shown = typer.Option(
            option.flag, help=option.help, min=option.minimum, max=option.maximum, rich_help_panel=option.group
        )
        annotations[option.setting] = Annotated[list[kind] | None if option.repeats else kind | None, shown]
    parameters = [
        inspect.Parameter(
            parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if parameter == "artifact" else None,
            annotation=annotation,
        )
        for parameter, annotation in annotations.items()
    ]
    serve.__annotations__ = annotations
    serve.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, help=summary, epilog=epilog)(serve)
    return typer.main.get_command(app)


def run(artifact: Path, config: Path | None, given: dict[str, Any]) -> int:
    """Serve until a signal ends it; returns the exit status. ``given``: settings by name, None where one is not."""
    from nxd_server.app.run import serve
    from nxd_server.settings import load_settings

    values = {name: value.value if isinstance(value, enum.Enum) else value for name, value in given.items()}
    return serve(artifact, load_settings(config, **values))
