"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_infer.layout.files.atomic import replacing


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int):
    """Whoever writes them: safetensors lets only their owner read them."""
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "text") as temporary:
            temporary.write_text("a")
        with replacing(tmp_path / "tensors") as temporary:
            save_file({"a": torch.zeros(1)}, temporary)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "text": mode,
        "tensors": mode,
    }


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise ValueError("no")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
