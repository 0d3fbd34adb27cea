"""Ranks as threads of one process, for tests that go through every degree: a real transport, but a cheap one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context

_keys = itertools.count()


class ThreadCollectives:
    """Collectives of the tp axis between threads that meet at a barrier."""

    def __init__(self, degree: int):
        self._slots: list[Any] = [None] * degree
        self._barrier = threading.Barrier(degree, timeout=600)
        self._local = threading.local()
        self.calls = 0

    def join(self, rank: int) -> None:
        self._local.rank = rank

    def abort(self) -> None:
        self._barrier.abort()

    def _exchange(self, x):
        rank = self._local.rank
        self._slots[rank] = x.detach().clone()
        self._barrier.wait()
        everyone = list(self._slots)
        if rank == 0:
            self.calls += 1
        self._barrier.wait()
        return everyone

    def all_reduce(self, x, axis, op="sum"):
        assert op == "sum"
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x, axis, dim):
        return torch.cat(self._exchange(x), dim)

    def close(self):
        pass


_building = threading.Lock()


def built(make: Callable[..., Any], *args: Any) -> Any:
    """``make(*args)`` with the same random numbers on every rank: threads share one generator."""
    with _building:
        torch.manual_seed(0)
        return make(*args)


def run_threads(fn: Callable[..., Any], degree: int, *args: Any) -> list[Any]:
    """``fn(*args)`` on ``degree`` thread ranks, each with its own context; results in rank order."""
    key = f"threads-{next(_keys)}"
    transport = ThreadCollectives(degree)
    register_collectives(key, transport)

    def rank_main(rank: int) -> Any:
        transport.join(rank)
        try:
            with use_context(make_context(degree, rank, tp=degree, collectives=key)):
                return fn(*args)
        except BaseException:
            transport.abort()
            raise

    try:
        with ThreadPoolExecutor(degree) as pool:
            futures = [pool.submit(rank_main, rank) for rank in range(degree)]
            failures = [future.exception() for future in futures]
            # A thread that was waiting for one that failed only knows that the barrier broke.
            for failure in sorted(failures, key=lambda f: isinstance(f, threading.BrokenBarrierError)):
                if failure is not None:
                    raise failure
            return [future.result() for future in futures]
    finally:
        unregister_collectives(key)
