"""The two files that identify a checkpoint: the manifest, and the mark that is written last.

::

    manifest.json   format, tag, counter, degrees, world_size, every file with its size and checksum
    done            the manifest's sha256 and its counter: "3f1c... 7"

Both have the counter, so that the number of a damaged manifest is still known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from nxd_infer.errors import CheckpointError
from nxd_infer.util.reading import parse_json

FORMAT = "nxd-checkpoint 1.1"
MANIFEST, DONE = "manifest.json", "done"
YEAR_10000 = 253402300800
Read = Callable[[str], bytes]
"""The contents of a file of the checkpoint, by its name. Raises OSError."""


class Manifest(BaseModel):
    """The content of ``manifest.json``."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    format: Literal["nxd-checkpoint 1.1"] = FORMAT
    tag: str
    counter: int = Field(ge=1, lt=1 << 62)
    """1 for the first checkpoint saved into the folder, and so on."""
    saved_at: float = Field(ge=0, lt=YEAR_10000)
    world_size: PositiveInt
    degrees: dict[Literal["pp", "dp", "cp", "tp"], PositiveInt] = Field(min_length=4)
    """Of the job that saved it."""
    files: dict[str, int]
    """Sizes."""
    blake3: dict[str, str]
    """Checksums."""


def mark_of(manifest: bytes, counter: int) -> bytes:
    """Return the content of DONE."""
    return f"{hashlib.sha256(manifest).hexdigest()} {counter}".encode()


def marked_number(read: Read) -> int | None:
    """Return the counter in DONE, even if the manifest is damaged; None if it is not there."""
    try:
        match = re.search(rb" (\d{1,18})\s*$", read(DONE))
    except OSError:
        return None
    return int(match[1]) if match else None


def read_manifest(read: Read, where: Callable[[str], str]) -> Manifest | None:
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
    ours = re.fullmatch("[0-9a-f]{64}", recorded)  # the reference and other tools have such a file, too
    try:
        text = read(MANIFEST)
    except FileNotFoundError as error:
        if not ours:
            return None
        raise CheckpointError(f"{where(MANIFEST)} is missing; restore it, or remove the folder") from error
    except OSError as error:
        raise CheckpointError(f"{where(MANIFEST)} cannot be read: {error}") from error
    if hashlib.sha256(text).hexdigest() != recorded:
        if not ours and b'"nxd-checkpoint' not in text:
            return None
        raise CheckpointError(
            f"{where(MANIFEST)} differs from its checksum in {DONE!r}: it was damaged or changed after it was saved; "
            "restore it, or remove the folder"
        )
    return _parsed(text, where(MANIFEST))


def _parsed(text: bytes, where: str) -> Manifest:
    try:
        fields = parse_json(text)
        if isinstance(fields, dict) and fields.get("format", FORMAT) != FORMAT:
            raise CheckpointError(
                f"{where} has the format {fields['format']!r:.80}; this release reads {FORMAT}: load it with the "
                "release that wrote it, or load another tag"
            )
        return Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the whole"
        raise CheckpointError(
            f"{where}: {name!r}: {first['msg']}, got {first['input']!r:.80}; restore it, or load another tag"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}; restore it, or remove the folder") from error
