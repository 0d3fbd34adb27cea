"""The end of a step: here it is nothing but a time for what waits for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

_closures: list[Callable[[], Any]] = []


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Call ``closure(*args)`` when the step ends, in order; one that is ``run_async``, too."""
    _closures.append(functools.partial(closure, *args))


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step: call what :func:`add_step_closure` was given."""
    waiting = _closures[:]
    _closures.clear()
    for closure in waiting:
        closure()


@contextlib.contextmanager
def step():
    """A step, for ``with`` or as a decorator."""
    sync()
    try:
        yield
    finally:
        sync()


def compile(f: Any = None, full_graph: Any = False, name: Any = None, max_different_graphs: Any = None) -> Any:
    """Return ``f`` as a step of its own, or without it :func:`step`. Nothing is compiled, so nothing limits graphs."""
    return step() if f is None else step()(f)
