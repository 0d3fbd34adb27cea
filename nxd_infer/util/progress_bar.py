"""The progress bar of the commands and of training. Needs rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn


def progress_bar(console: Console, *, drawn: bool = True) -> Progress:
    """Return a bar if the total is known, otherwise a spinner with elapsed time. Tasks have a field ``note``."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    return Progress(*columns, console=console, disable=not drawn)
