"""The two files by which a checkpoint is known: the manifest, and the mark that is written last.

::

    manifest.json   format, tag, counter, degrees, world_size, every file with its size and sha256
    done            the manifest's sha256 and its counter: "3f1c... 7"

The counter stands in both, so that a damaged manifest is not asked about its own number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nxd_infer.context import AXES
from nxd_infer.errors import CheckpointError
from nxd_infer.util.reading import parse_json

FORMAT = "nxd-checkpoint 1.0"
MANIFEST, DONE = "manifest.json", "done"
COUNTERS = range(1, 1 << 62)
YEAR_10000 = 253402300800
Read = Callable[[str], bytes]
"""The contents of a file of the checkpoint, by its name. Raises OSError."""


def mark_of(manifest: bytes, counter: int) -> bytes:
    """What stands in DONE."""
    return f"{hashlib.sha256(manifest).hexdigest()} {counter}".encode()


def marked_number(read: Read) -> int | None:
    """The counter in DONE, whatever has become of the manifest; None when nothing says it."""
    try:
        found = re.search(rb" (\d{1,18})\s*$", read(DONE))
    except OSError:
        return None
    return int(found[1]) if found else None


def read_manifest(read: Read, where: Callable[[str], str]) -> dict[str, Any] | None:
    """The manifest of a whole checkpoint, None for a folder that is not one or is not whole.

    ``where`` is what a message calls a file. Raises CheckpointError when the manifest or the mark is damaged, or of a
    format that this release does not know.
    """
    try:
        recorded = read(DONE).decode(errors="replace").strip().partition(" ")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # it is there: an older checkpoint, or none, must not be taken for the newest
        raise CheckpointError(f"{where(DONE)} cannot be read: {error}") from error
    try:
        text = read(MANIFEST)
    except FileNotFoundError as error:
        if not re.fullmatch("[0-9a-f]{64}", recorded):  # of the reference, say, or of any other tool
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
        raise CheckpointError(f"{where(MANIFEST)} is no JSON: {error}; restore it, or remove the folder") from error
    if not recorded and not (isinstance(manifest, dict) and str(manifest.get("format")).startswith("nxd-checkpoint")):
        return None  # somebody else's
    _require_known(manifest, where(MANIFEST))
    if not recorded and "sha256" in manifest:  # the first checkpoints had neither
        raise CheckpointError(f"{where(DONE)} is empty, so it was damaged; restore it, or remove the folder")
    return manifest


def _require_known(manifest: Any, where: str) -> None:
    """Raise CheckpointError, which names the value, unless it says all that is read of it."""

    def check(key: str, fits: bool, wanted: str) -> None:
        if not fits:
            shown = f"{manifest.get(key)!r:.80}"
            raise CheckpointError(f"{where}: {key!r} must be {wanted}, got {shown}; restore it, or load another tag")

    if not isinstance(manifest, dict):
        raise CheckpointError(f"{where} must hold an object, got {manifest!r:.80}; restore it, or load another tag")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{where} has the format {manifest.get('format')!r}; this release reads {FORMAT!r}: load it with the "
            "release that wrote it, or load another tag"
        )
    counter, degrees, world = (manifest.get(key) for key in ("counter", "degrees", "world_size"))
    check("counter", whole(counter) and counter in COUNTERS, "a whole number of 1 to 2^62")
    check("tag", isinstance(manifest.get("tag"), str), "text")
    complete = isinstance(degrees, dict) and all(whole(degrees.get(axis)) and degrees[axis] > 0 for axis in AXES)
    check("degrees", complete, f"an object with a whole number for each of {', '.join(AXES)}")
    check("world_size", whole(world) and world in COUNTERS, "a whole number of at least 1")
    saved = manifest.get("saved_at")
    check("saved_at", isinstance(saved, int | float) and 0 <= saved < YEAR_10000, "a time in seconds")
    check("files", is_object(manifest.get("files"), int), "an object of numbers")
    check("sha256", is_object(manifest.get("sha256", {}), str), "an object of texts")


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_object(value: Any, kind: type) -> bool:
    """Whether it is a JSON object with values of one kind."""
    return isinstance(value, Mapping) and all(isinstance(item, kind) for item in value.values())
