"""Which loops of a compiled graph are shared among threads: large ones that neither reduce along themselves nor raise.

Inductor shares every loop if the number of threads is left open (``cpp.dynamic_threads``). Starting threads takes some
microseconds, waking them more: longer than most loops of a decoding step. And a sum that is added up from one part per
thread has different bits with another number of threads, and different bits alone than beside other rows: a step that
verifies guesses would not always agree with the steps that it replaces.

A loop that checks an index raises if it is out of range, and an exception that leaves a region of several threads ends
the process. So such a loop runs on one thread, outside of any region.
"""

from __future__ import annotations

from typing import Any

SERIAL = 128 * 1024
"""Elements that one thread processes in about 50 microseconds. Waking another takes about as long in a rank, because
the crew of the native operators spins on its core (``csrc/crew.h``). 16 rows of a model with an inner width of 8192
have as many: steps of smaller models share no loop."""
_RAISES = ("TORCH_CHECK", "throw ")


def keep_small_loops_serial() -> None:
    """Apply to every graph that this process compiles from now on; no effect if torch decides in another way."""
    from torch._inductor.codegen import cpp

    decide = getattr(cpp.CppKernel, "decide_parallel_depth", None)
    generate = getattr(cpp.CppKernel, "codegen_loops_impl", None)
    if decide is None or generate is None:
        return

    def decided(self: Any, max_parallel_depth: Any, threads: int) -> Any:
        found = decide(self, max_parallel_depth, threads)
        whole = self.reduction_depth if self.reduction_depth is not None else len(self.call_ranges)
        small = self.size_hint() < SERIAL or found.start_depth + found.parallel_depth > whole
        if small or _raises(self):
            return type(found)(parallel_depth=0, start_depth=found.start_depth)
        return found

    def decided_together(self: Any, max_parallel_depth: Any, threads: int) -> Any:
        found = decide_together(self, max_parallel_depth, threads)
        return type(found)(parallel_depth=0, start_depth=found.start_depth) if _raises(self) else found

    def generated(self: Any, loop_nest: Any, code: Any, worksharing: Any) -> None:
        if _raises(loop_nest.get_kernel()):
            worksharing.close()
        generate(self, loop_nest, code, worksharing)

    decide_together = cpp.OuterLoopFusedKernel.decide_parallel_depth
    cpp.CppKernel.decide_parallel_depth = decided
    cpp.OuterLoopFusedKernel.decide_parallel_depth = decided_together
    cpp.CppKernel.codegen_loops_impl = generated


def _raises(kernel: Any) -> bool:
    """Return whether the code of a loop, or of one that is fused with it, can raise."""
    inner = [*getattr(kernel, "kernels", ()), *(nest.get_kernel() for nest in getattr(kernel, "inner", ()))]
    code = "".join(buffer.getrawvalue() for buffer in (kernel.loads, kernel.compute, kernel.stores))
    return any(word in code for word in _RAISES) or any(map(_raises, inner))
