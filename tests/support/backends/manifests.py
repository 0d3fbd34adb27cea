"""Change the manifest of an artifact on disk, including its checksum."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.writer import CHECKSUM_KEY, manifest_checksum


@contextlib.contextmanager
def changed(artifact: Path) -> Iterator[dict[str, Any]]:
    path = artifact / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    yield manifest
    manifest[CHECKSUM_KEY] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))
