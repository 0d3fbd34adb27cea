"""A checkpoint whose files were changed by hand, with the checksums that go with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_infer.layout.files.manifest import DONE, MANIFEST, mark_of
from nxd_infer.util.reading import checksum_of


def resign(folder: Path, **changes: Any) -> None:
    """Make manifest and mark fit the files; ``changes``: other values in the manifest."""
    manifest = {**json.loads((folder / MANIFEST).read_text()), **changes}
    for path in folder.iterdir():
        if path.is_file() and path.name not in (MANIFEST, DONE):
            manifest["files"][path.name] = path.stat().st_size
            manifest["blake3"][path.name] = checksum_of(path)
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / DONE).write_bytes(mark_of(text, manifest["counter"]))
