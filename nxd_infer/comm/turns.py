"""Ranks that take turns, and learn of each other's failures."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from nxd_infer.comm.functional import all_reduce
from nxd_infer.context import AXES, ParallelContext
from nxd_infer.errors import CheckpointError
from nxd_infer.util.devices import transport_device

T = TypeVar("T")


def in_turns(
    context: ParallelContext,
    at_a_time: int,
    action: Callable[[], T],
    *,
    of_world: bool = False,
    of_host: bool = False,
) -> T:
    """Run ``action`` on every rank, ``at_a_time`` data-parallel ranks at once; all wait, and all fail, together.

    Returns what this rank's ``action`` returned.

    ``of_world``: at most ``at_a_time`` ranks of the world at once. ``of_host``: of each host; 0 or less: all.
    """
    if of_host and at_a_time < 1:
        at_a_time = context.world_size
    at_a_time = max(1, at_a_time)
    failure: Exception | None = None
    result: T | None = None
    place, count = (context.rank, context.world_size) if of_world else (context.dp.rank, context.dp.degree)
    if of_host:
        count = int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size))  # of the launcher; else all are on one host
        place = context.rank % count
    for first in range(0, count, at_a_time):
        if first <= place < first + at_a_time:
            try:
                result = action()
            except Exception as error:  # raised below, after the other ranks have been told
                failure = error
        if not largest(context, int(failure is not None)):
            continue
        if failure is not None:
            raise failure
        raise CheckpointError(f"rank {context.rank} gave up because another rank could not read or write its files")
    return cast("T", result)


def largest(context: ParallelContext, number: int) -> int:
    """The largest ``number`` of all ranks. A collective."""
    value = torch.tensor([number], dtype=torch.int64, device=transport_device())
    for axis in AXES:
        value = all_reduce(value, context, axis, "max")
    return int(value)
