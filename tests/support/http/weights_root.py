"""A folder of weights for ``weights_root``, and ways that lead out of it."""

from __future__ import annotations

import os
from pathlib import Path


def weights_root(top: Path) -> Path:
    """``top/root``, with the weights 1 and 2 of the toy model, and a secret beside it."""
    root = top / "root"
    (root / "deep").mkdir(parents=True)
    (root / "one").write_text("1")
    (root / "deep" / "two").write_text("2")
    (root / "wrong").write_text("no number")
    (top / "secret").write_text("3")
    (root / "out").symlink_to(top / "secret")
    (root / "up").symlink_to(top)
    (root / "link").symlink_to(root / "one")
    (root / "holds_out").mkdir()
    (root / "holds_out" / "model.safetensors").symlink_to(top / "secret")
    (root / "holds_link").mkdir()
    (root / "holds_link" / "deep").symlink_to(root / "deep")
    (root / "holds_link" / "back").symlink_to(root / "holds_link")
    (root / "holds_link_out").mkdir()
    (root / "holds_link_out" / "deep").symlink_to(root / "holds_out")
    (root / "circle").symlink_to(root / "circle")
    (root / "pipes").mkdir()
    os.mkfifo(root / "pipes" / "model.safetensors")
    return root
