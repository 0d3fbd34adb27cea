"""The two files that identify a checkpoint: the manifest, and the mark that is written last.

::

    manifest.json   format, tag, counter, degrees, world_size, every file with its size and checksum
    done            the manifest's sha256 and its counter: "3f1c... 7"

Both have the counter, so that the number of a damaged manifest is still known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nxd_infer.context import AXES
from nxd_infer.errors import CheckpointError
from nxd_infer.util.reading import BLAKE3, SHA256, parse_json

FORMAT = "nxd-checkpoint 1.1"
"""1.1 has BLAKE3 checksums. 1.0 had sha256, and the earliest had none."""
KNOWN = ("nxd-checkpoint 1.0", FORMAT)
MANIFEST, DONE = "manifest.json", "done"
COUNTERS = range(1, 1 << 62)
YEAR_10000 = 253402300800
Read = Callable[[str], bytes]
"""The contents of a file of the checkpoint, by its name. Raises OSError."""


def mark_of(manifest: bytes, counter: int) -> bytes:
    """Return the content of DONE."""
    return f"{hashlib.sha256(manifest).hexdigest()} {counter}".encode()


def marked_number(read: Read) -> int | None:
    """Return the counter in DONE, even if the manifest is damaged; None if it is not there."""
    try:
        found = re.search(rb" (\d{1,18})\s*$", read(DONE))
    except OSError:
        return None
    return int(found[1]) if found else None


def read_manifest(read: Read, where: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the manifest of a complete checkpoint, or None if the folder is not one or is incomplete.

    ``where`` returns a file's name for messages. Raises CheckpointError if the manifest or the mark is damaged, or has
    a format that this release does not know.
    """
    try:
        recorded = read(DONE).decode(errors="replace").strip().partition(" ")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # it exists: an older checkpoint, or none, must not count as the newest
        raise CheckpointError(f"{where(DONE)} cannot be read: {error}") from error
    try:
        text = read(MANIFEST)
    except FileNotFoundError as error:
        if not re.fullmatch("[0-9a-f]{64}", recorded):  # from the reference or another tool
            return None
        raise CheckpointError(f"{where(MANIFEST)} is missing; restore it, or remove the folder") from error
    except OSError as error:
        raise CheckpointError(f"{where(MANIFEST)} cannot be read: {error}") from error
    if recorded and hashlib.sha256(text).hexdigest() != recorded:
        raise CheckpointError(
            f"{where(MANIFEST)} differs from its checksum in {DONE!r}: it was damaged or changed after it was saved; "
            "restore it, or remove the folder"
        )
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where(MANIFEST)} is not JSON: {error}; restore it, or remove the folder") from error
    if not recorded and not (isinstance(manifest, dict) and str(manifest.get("format")).startswith("nxd-checkpoint")):
        return None  # not one of ours
    _require_known(manifest, where(MANIFEST))
    if not recorded and checksums_of(manifest)[1]:  # the earliest checkpoints had neither
        raise CheckpointError(f"{where(DONE)} is empty, so it was damaged; restore it, or remove the folder")
    return manifest


def checksums_of(manifest: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
    """Return the algorithm of a checkpoint's checksums, and the checksums by file."""
    algorithm = BLAKE3 if BLAKE3 in manifest else SHA256
    return algorithm, manifest.get(algorithm, {})


def _require_known(manifest: Any, where: str) -> None:
    """Raise CheckpointError, naming the value, unless the manifest has every field that is read, with its type."""

    def check(key: str, fits: bool, wanted: str) -> None:
        if not fits:
            shown = f"{manifest.get(key)!r:.80}"
            raise CheckpointError(f"{where}: {key!r} must be {wanted}, got {shown}; restore it, or load another tag")

    if not isinstance(manifest, dict):
        raise CheckpointError(f"{where} must be a JSON object, got {manifest!r:.80}; restore it, or load another tag")
    if manifest.get("format") not in KNOWN:
        raise CheckpointError(
            f"{where} has the format {manifest.get('format')!r}; this release reads {' and '.join(KNOWN)}: load it "
            "with the release that wrote it, or load another tag"
        )
    counter, degrees, world = (manifest.get(key) for key in ("counter", "degrees", "world_size"))
    check("counter", whole(counter) and counter in COUNTERS, "a whole number from 1 to 2^62")
    check("tag", isinstance(manifest.get("tag"), str), "text")
    complete = isinstance(degrees, dict) and all(whole(degrees.get(axis)) and degrees[axis] > 0 for axis in AXES)
    check("degrees", complete, f"an object with a whole number for each of {', '.join(AXES)}")
    check("world_size", whole(world) and world in COUNTERS, "a whole number of at least 1")
    saved = manifest.get("saved_at")
    check("saved_at", isinstance(saved, int | float) and 0 <= saved < YEAR_10000, "a time in seconds")
    check("files", is_object(manifest.get("files"), int), "an object of numbers")
    for algorithm in (BLAKE3, SHA256):
        check(algorithm, is_object(manifest.get(algorithm, {}), str), "an object of strings")


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_object(value: Any, kind: type) -> bool:
    """Return whether ``value`` is a JSON object with values of one kind."""
    return isinstance(value, Mapping) and all(isinstance(item, kind) for item in value.values())
