"""Progress of a training loop: a bar on a terminal, occasional plain lines elsewhere, and TensorBoard scalars."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from nxd_infer.errors import ParallelConfigError
from nxd_infer.trainer.first_rank import is_rank_zero
from nxd_infer.trainer.tensorboard import Number, TensorBoardLogger, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from typing_extensions import Self

__all__ = ["TrainingProgress"]

REDRAW_SECONDS = 0.1
"""Seconds between redraws of the bar. The loss is read from its device only then."""
WINDOW = 50
"""Steps whose speed is shown."""


class TrainingProgress:
    """Shows steps, loss, tokens per second and the time left on rank 0; on other ranks it does nothing.

    ::

        with nxd.trainer.TrainingProgress(total=1000, log_dir="runs/first") as progress:
            for batch in batches:
                loss = model.run_train(**batch)
                optimizer.step()
                optimizer.zero_grad()
                progress.step(loss, tokens=8 * 1024, grad_norm=optimizer.grad_norm)

    On a terminal it is a bar; elsewhere a line at the first step, then every ``line_every`` seconds, and at the end.

    Args:
        total: the number of the last step; None if unknown.
        seconds: how long the loop will train; progress is then shown in time. The loop ends itself.
        initial: steps already done, for a resumed job.
        description: text before the bar and the lines.
        log_dir: write TensorBoard scalars into this folder: ``loss``, ``tokens_per_second`` and the scalars passed to
            ``step``. Needs ``nxd-infer[train]``; without it, every rank raises MissingPackageError.
        log_every: steps between two sets of scalars.
        line_every: seconds between plain lines.
        console: where to draw; default: standard error.

    Raises ParallelConfigError if ``total`` is not above ``initial``, or if ``seconds``, ``log_every`` or ``line_every``
    is not above 0.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        seconds: float | None = None,
        initial: int = 0,
        description: str = "training",
        log_dir: str | os.PathLike[str] | None = None,
        log_every: int = 1,
        line_every: float = 10.0,
        console: Console | None = None,
    ):
        if total is not None and total <= initial:
            raise ParallelConfigError(f"total is the number of the last step: it must be above {initial}, got {total}")
        for name, value in (("seconds", seconds), ("log_every", log_every), ("line_every", line_every)):
            if value is not None and not value > 0:
                raise ParallelConfigError(f"{name} must be above 0, got {value!r}")
        logger = None if log_dir is None else TensorBoardLogger(log_dir, initial=initial)
        self.total, self.seconds, self.description = total, seconds, description
        self.steps = initial
        """Steps done, including those before this job."""
        self._initial, self._log_every, self._line_every = initial, log_every, line_every
        self._logger = logger
        self._start = time.monotonic()
        self._drawn = -math.inf  # the first step is shown at once
        self._marks = deque([(self._start, 0, 0)], maxlen=WINDOW + 1)
        """(time, steps, tokens) after each step."""
        self._loss: Number = float("nan")
        self._bubble: float | None = None
        self._shows = is_rank_zero()
        self._console: Console | None = None
        self._bar: Progress | None = None
        if self._shows:
            self._console = console or _standard_error()
            if self._console.is_terminal:
                from nxd_infer.util.progress_bar import progress_bar  # optional: rich

                bar = self._bar = progress_bar(self._console)
                self._task = bar.add_task(description, total=1.0 if total or seconds else None, note="")
                bar.start()

    def step(self, loss: Number, tokens: int = 0, bubble: float | None = None, **scalars: Number | None) -> None:
        """Record a completed step.

        Args:
            loss: this rank's loss, a number or a one-element tensor. Every data-parallel rank has its own.
            tokens: number of tokens in the step, over all data-parallel ranks.
            bubble: share of the step in which this rank waited for other pipeline stages: ``model.bubble``.
            scalars: more numbers for TensorBoard, by name; None is skipped.
        """
        self.steps += 1
        if not self._shows:
            return
        now = time.monotonic()
        _, steps, total = self._marks[-1]
        self._marks.append((now, steps + 1, total + tokens))
        self._loss, self._bubble = loss, bubble
        if self._logger is not None and self.steps % self._log_every == 0:
            speed = {"tokens_per_second": self._speed(2)} if tokens else {}
            self._logger.log(self.steps, loss=loss, bubble=bubble, **speed, **scalars)
        if now - self._drawn >= (self._line_every if self._bar is None else REDRAW_SECONDS):
            self._drawn = now
            self._draw(now)

    def close(self) -> None:
        """Draw the last state and flush the TensorBoard scalars. Can be called more than once."""
        if self._console is not None:
            self._draw(time.monotonic())
        if self._bar is not None:
            self._bar.stop()
        if self._logger is not None:
            self._logger.close()
        self._console = self._bar = self._logger = None
        self._shows = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, now: float) -> None:
        assert self._console is not None
        done, left = self._done(now)
        parts = [f"step {self.steps}" + (f"/{self.total}" if self.total else "")]
        if self.steps > self._initial:
            parts.append(f"loss {number(self._loss):.4g}")
        if speed := self._speed(2):
            parts.append(f"{speed:,.0f} tokens/s")
        if self._bubble is not None:
            parts.append(f"bubble {self._bubble:.0%}")
        if left is not None:
            parts.append(f"{datetime.timedelta(seconds=round(left))} left")
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note="  ".join(parts))
        else:
            percent = "" if done is None else f" {done:.0%}"
            self._console.print(f"{self.description}{percent}  {'  '.join(parts)}", markup=False, soft_wrap=True)

    def _speed(self, what: int) -> float:
        """Return steps (1) or tokens (2) a second, over the last steps."""
        first, last = self._marks[0], self._marks[-1]
        return (last[what] - first[what]) / max(last[0] - first[0], 1e-9)

    def _done(self, now: float) -> tuple[float | None, float | None]:
        """Return the fraction done and the seconds left; None if unknown."""
        if self.seconds is not None:
            left = max(0.0, self.seconds - (now - self._start))
            return 1 - left / self.seconds, left
        if self.total is None:
            return None, None
        done = min(1.0, self.steps / self.total)
        speed = self._speed(1)
        return done, (max(0, self.total - self.steps) / speed if speed else None)


def _standard_error() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)
