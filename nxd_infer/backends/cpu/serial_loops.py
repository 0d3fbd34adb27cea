"""Which loops of a compiled graph are shared among threads: large ones, and never one that sums over itself.

Inductor shares every loop where the number of threads is left open (``cpp.dynamic_threads``). To start threads takes
some microseconds, and to wake them more, longer than most loops of a decoding step; and a row whose sum is put together
from a part of each thread has other bits with another number of threads, and other bits alone than beside other rows: a
step that verifies guesses would not always agree with the steps that it stands for.
"""

from __future__ import annotations

from typing import Any

SERIAL = 128 * 1024
"""Elements that one thread goes through in some 50 microseconds. To wake another takes about as long in a rank, where
the crew of the native operators waits awake in its place (``csrc/crew.h``). 16 rows of a model with an inner width of
8192 are as many: steps of smaller ones share no loop."""


def keep_small_loops_serial() -> None:
    """For every graph that this process compiles from now on; without effect on a torch that decides otherwise."""
    from torch._inductor.codegen import cpp

    decide = getattr(cpp.CppKernel, "decide_parallel_depth", None)
    if decide is None:
        return

    def decided(self: Any, max_parallel_depth: Any, threads: int) -> Any:
        found = decide(self, max_parallel_depth, threads)
        whole = self.reduction_depth if self.reduction_depth is not None else len(self.call_ranges)
        if self.size_hint() < SERIAL or found.start_depth + found.parallel_depth > whole:
            return type(found)(parallel_depth=0, start_depth=found.start_depth)
        return found

    cpp.CppKernel.decide_parallel_depth = decided
