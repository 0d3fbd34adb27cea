"""Which loops of a compiled graph are shared among threads: large ones, and none that reduces along itself.

Inductor shares every loop if the number of threads is left open (``cpp.dynamic_threads``). Starting threads takes some
microseconds, waking them more: longer than most loops of a decoding step. And a sum that is added up from one part per
thread has different bits with another number of threads, and different bits alone than beside other rows: a step that
verifies guesses would not always agree with the steps that it replaces.
"""

from __future__ import annotations

from typing import Any

SERIAL = 128 * 1024
"""Elements that one thread processes in about 50 microseconds. Waking another takes about as long in a rank, because
the crew of the native operators spins on its core (``csrc/crew.h``). 16 rows of a model with an inner width of 8192
have as many: steps of smaller models share no loop."""


def keep_small_loops_serial() -> None:
    """Apply to every graph that this process compiles from now on; no effect if torch decides in another way."""
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
