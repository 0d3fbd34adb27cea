"""Checkpoints as earlier releases wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from nxd_infer.layout.files.manifest import DONE, MANIFEST, mark_of


def with_sha256(folder: Path) -> list[str]:
    """Make a new checkpoint one of format 1.0, whose checksums are sha256; return its files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    names = sorted(manifest.pop("blake3"))
    manifest["format"] = "nxd-checkpoint 1.0"
    manifest["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DONE).write_bytes(mark_of(text, manifest["counter"]))
    return names


def without_checksums(folder: Path, **changes: object) -> None:
    """Make a new checkpoint, whose JSON files may have changed, one of the first version; ``changes``: its manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["blake3"]
    for path in folder.glob("*.json"):
        if path.name != MANIFEST:
            manifest["files"][path.name] = path.stat().st_size
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    (folder / DONE).write_text("")
