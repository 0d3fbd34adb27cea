"""A process that compiles graphs: ``python -m nxd_infer.backends.compile.worker BACKEND FD PARENT``.

Reads one JSON job a line from standard input and answers one JSON line on descriptor FD; what the compiler prints goes
to standard error. Ends with its input, or with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path


def restrict_instruction_set(simdlen: int) -> None:
    """Keep inductor from using more than the target has: for AVX-512, neither VNNI nor AMX nor BF16."""
    if simdlen != 512:
        return
    from torch._inductor import cpu_vec_isa

    if hasattr(cpu_vec_isa, "VecAVX512") and hasattr(cpu_vec_isa, "valid_vec_isa_list"):
        cpu_vec_isa.VecAVX512.build_arch_flags = lambda self: self._arch_flags
        plain = cpu_vec_isa.VecAVX512()
        cpu_vec_isa.valid_vec_isa_list = lambda: [plain]


def main(arguments: list[str]) -> int:
    from nxd_infer.util.processes import die_with_parent

    die_with_parent(int(arguments[2]))
    answers = os.fdopen(int(arguments[1]), "w", buffering=1)
    gc.disable()  # what is imported stays: to look through it again and again takes a fifth of the import

    from nxd_infer.backends.cpu import inductor
    from nxd_infer.backends.cpu.serial_loops import keep_small_loops_serial
    from nxd_infer.backends.cpu.target import cpu_target
    from nxd_infer.util.machine import cpu_features

    gc.freeze()
    gc.enable()
    prepared = False
    for line in sys.stdin:
        job = json.loads(line)
        start = time.monotonic()
        answer = {"graph": job["graph"], "error": ""}
        try:
            if not prepared:
                keep_small_loops_serial()
                restrict_instruction_set(cpu_target(job["options"].get(inductor.CPU_TARGET), cpu_features()).simdlen)
                prepared = True
            inductor.compile_here(Path(job["graph"]), job["options"])
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            answer["traceback"] = traceback.format_exc()
        answer["seconds"] = time.monotonic() - start
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
