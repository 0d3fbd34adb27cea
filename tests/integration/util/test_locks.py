"""One process at a time, and a lock ends with its holder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nxd_infer.util.locks import only_one

HOLDER = """
import sys, time
from pathlib import Path
from nxd_infer.util.locks import only_one
with only_one(Path(sys.argv[1]), 10):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_holder(tmp_path: Path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(TimeoutError), only_one(path, 0.1):
                pass
        finally:
            holder.kill()
    with only_one(path, 60):
        assert path.exists()
