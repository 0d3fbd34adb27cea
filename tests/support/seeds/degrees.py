"""A documented call runs in one process, without anything around it, and on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nxd_infer import parallel_state
from tests.support.ranks import run_ranks


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` in this process, which has no process group: degree 1."""
    try:
        return fn(*args)
    finally:
        parallel_state.destroy_model_parallel()


def at_degree(tp: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of all ``tp`` ranks."""
    return [alone(fn, *args)] if tp == 1 else run_ranks(fn, tp, *args)
