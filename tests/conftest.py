"""What every test process needs: two of them at once (pytest-xdist) must not claim the same cores."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each process would pin its ranks to the same cores and time out there; the kernel places them better.
    os.environ.setdefault("NXD_INFER_PIN", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
