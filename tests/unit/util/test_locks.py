"""One at a time, and the next one when that is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_infer.util.locks import only_one


def test_a_held_lock_is_waited_for_as_long_as_is_said(tmp_path: Path):
    path = tmp_path / "lock"
    with only_one(path, 60), pytest.raises(TimeoutError), only_one(path, 0.05):
        pass
    with only_one(path, 60):
        assert path.exists()
