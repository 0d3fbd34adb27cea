"""Console output of the commands: one console, durations as text, a progress bar, a table."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

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


class Bars:
    """Draws the progress of work that reports it (:class:`nxd_infer.util.progress.Progress`), a bar for each stage."""

    def __init__(self, display: Progress):
        self.display = display
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self.display.add_task(stage, note=note)
        self.display.update(self._tasks[stage], completed=done, total=total or None, note=note)


@contextmanager
def slow_bar(after: float = 2.0) -> Iterator[Bars]:
    """Yield what draws a bar for each stage of the work, if it takes longer than ``after`` seconds."""
    display = progress_bar(console)
    timer = threading.Timer(after, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield Bars(display)
    finally:
        timer.cancel()
        timer.join()
        if display.live.is_started:
            display.stop()


@contextmanager
def spinner(description: str, on: Console = console, *, line: bool = False) -> Iterator[None]:
    """Show on a terminal that work of unknown length is in progress; with ``line`` also elsewhere, by a line."""
    if line and not on.is_terminal:
        on.print(f"{description} ...", markup=False)
    with progress_bar(on, drawn=on.is_terminal) as display:
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
