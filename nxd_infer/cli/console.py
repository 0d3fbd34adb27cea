"""Console output of the commands: one console, durations as text, a progress bar, a table."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from nxd_infer.util import progress
from nxd_infer.util.progress_bar import progress_bar

console = Console(highlight=False)
aside = Console(highlight=False, stderr=True)
"""For output that is not part of a command's answer, so that a redirected answer stays clean."""


def verbatim(text: str, *, bold: bool = False, end: str = "") -> None:
    """Print foreign text unchanged: the console would wrap lines, expand tabs and turn ":warning:" into an emoji."""
    if bold and console.is_terminal and not console.is_dumb_terminal:
        text = f"\x1b[1m{text}\x1b[0m"
    print(text, end=end, flush=True)


def duration(seconds: float) -> str:
    """Format seconds as text, in milliseconds below one second."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@contextmanager
def bar(on: Console = console, *, drawn: bool = True) -> Iterator[Progress]:
    """Show progress: a bar if the total is known, otherwise a spinner with elapsed time. With ``drawn=False`` nothing
    is drawn, for callers that print lines instead."""
    with progress_bar(on, drawn=drawn) as display:
        yield display


@contextmanager
def slow_bar(after: float = 2.0) -> Iterator[progress.Progress]:
    """Yield what draws a bar for each stage of the work, if it takes longer than ``after`` seconds."""
    bars = progress_bar(console)
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total or None, note=note)
        bars.update(tasks[stage], completed=done, total=total or None, note=note)

    timer = threading.Timer(after, bars.start)
    timer.daemon = True
    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        timer.join()
        if bars.live.is_started:
            bars.stop()


@contextmanager
def spinner(description: str, on: Console = console, *, line: bool = False) -> Iterator[None]:
    """Show on a terminal that work of unknown length is in progress; with ``line`` also elsewhere, by a line."""
    if line and not on.is_terminal:
        on.print(f"{description} ...", markup=False)
    with bar(on, drawn=on.is_terminal) as display:
        task = display.add_task(description, total=None, note="")
        yield
        display.update(task, total=1, completed=1)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under headings; the first column is left-aligned, the others right."""
    view = Table(title=escape(title) or None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        view.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        view.add_row(*map(escape, row))
    console.print(view)
