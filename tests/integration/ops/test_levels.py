"""The native kernels at every level of instructions, all in one process a level: the level is read once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nxd_infer import native
from nxd_infer.native import NativeLibrary
from tests.support.needs import needs_native
from tests.support.ops.native_sampling import digest

pytestmark = needs_native

KERNELS = """
from tests.support.ops import expert_products, int4_products, native_attention, native_sampling, packed_products
library = native.load()
packed_products.check_threads_that_wait(library)
for kind in packed_products.KINDS.values():
    packed_products.check_every_shape(library, kind)
    packed_products.check_rows_alone_and_together(library, kind)
int4_products.check_every_shape(library)
int4_products.check_rows_alone_and_together(library)
expert_products.check_every_shape(library)
expert_products.check_rows_alone_and_together(library)
native_attention.check_every_kernel(library)
print(native_sampling.digest(library))
from tests.support.ops import crew  # whose threads begin here
crew.check_sizes()
"""

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Each includes those before it; ``NXD_INFER_CPU_LEVEL`` takes them."""


def run_at(library: NativeLibrary, level: str, code: str, **variables: str) -> str:
    """What ``code`` prints in a process whose kernels are those of ``level``: it is read once, as ``variables`` are.

    Skips where the machine lacks ``level``: another one's kernels would run.
    """
    here = library.cpu_level()
    if LEVELS.index(level) > LEVELS.index(here):
        pytest.skip(f"this machine's best instructions are {here}, not {level}")
    environment = {**os.environ, "NXD_INFER_CPU_LEVEL": level, "OMP_NUM_THREADS": "2", **variables}
    check = f"from nxd_infer import native\nassert native.load().cpu_level() == {level!r}\n"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", check + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_exact_and_samples_the_same_bits(level: str) -> None:
    library = native.load()
    assert run_at(library, level, KERNELS, NXD_INFER_CPU_ASKS="1") == digest(library)


def test_the_threads_of_a_crew_come_sleep_and_may_stay_away() -> None:
    assert run_at(native.load(), "avx2", "from tests.support.ops import crew; crew.check_all()") == ""


def test_settings_that_cannot_be_are_refused() -> None:
    code = "from tests.support.ops import packed_products as p; p.check_every_shape(native.load(), p.PLAIN)"
    with pytest.raises(AssertionError, match="NXD_INFER_CPU_ASKS='no' is neither 0 nor 1"):
        run_at(native.load(), "avx2", code, NXD_INFER_CPU_ASKS="no")
    with pytest.raises(ValueError, match=r"3 threads need a core each, got \[0, 1\]"):
        native.load().engage_crew(3, [0, 1])
