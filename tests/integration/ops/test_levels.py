"""The native kernels at every level of instructions, all in one process a level: the level is read once."""

from __future__ import annotations

import pytest

from nxd_infer import native
from tests.support.needs import needs_native
from tests.support.ops.levels import LEVELS, run_at
from tests.support.ops.native_sampling import digest

pytestmark = needs_native

KERNELS = """
from tests.support.ops import asking, native_attention, native_sampling, packed_products
library = native.load()
packed_products.check_threads_that_wait(library)
for kind in packed_products.KINDS.values():
    packed_products.check_every_shape(library, kind)
    packed_products.check_rows_alone_and_together(library, kind)
native_attention.check_every_kernel(library)
print(native_sampling.digest(library), asking.digest(library))
from tests.support.ops import crew  # whose threads begin here
crew.check_sizes()
"""
ASKED = "from tests.support.ops import asking; print(asking.digest(native.load()))"


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_exact_and_gives_the_same_bits_however_it_is_asked(level: str) -> None:
    library = native.load()
    tokens, asked = run_at(library, level, KERNELS, NXD_INFER_CPU_ASKS="1").split()
    assert tokens == digest(library), "sampling has the same bits at every level"
    if level in ("avx2", "avx512_bf16"):  # kernels that ask for what they read soon, or leave it to the processor
        assert run_at(library, level, ASKED, NXD_INFER_CPU_ASKS="0") == asked


def test_the_threads_of_a_crew_come_sleep_and_may_stay_away() -> None:
    assert run_at(native.load(), "avx2", "from tests.support.ops import crew; crew.check_all()") == ""


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(AssertionError, match="NXD_INFER_CPU_ASKS='no' is neither 0 nor 1"):
        run_at(native.load(), "avx2", ASKED, NXD_INFER_CPU_ASKS="no")
    with pytest.raises(ValueError, match=r"3 threads need a core each, got \[0, 1\]"):
        native.load().engage_crew(3, [0, 1])
