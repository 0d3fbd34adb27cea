"""The folder of a job's checkpoints: each tag is complete or absent, and numbered in the order of saving.

::

    ckpts/step_100/manifest.json                  contents, number of ranks, each file's size and checksum
                   done                           written last, marks it complete; the manifest's sha256, the number
                   rank_00000.json ...            the runs: the layout of each tensor in this rank's files
                   rank_00000.safetensors ...     its random state; on rank 0 also tensors of user contents
                   model.tp_rank_00.pp_rank_00.safetensors
                   optim.dp_rank_00.tp_rank_00.pp_rank_00.safetensors
    ckpts/.saving-00000007/                       being written, renamed to its tag when complete

A checkpoint is identified by its manifest, not by its folder's name: a folder with ``done`` is complete, so a job
killed between ``done`` and the rename has saved. The next save cleans up. Only one job at a time may save into a
folder. In a bucket, which cannot rename, the folder is ``step_100.00000007`` from the first file on.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer.checkpoint.storage import Storage
from nxd_infer.context import AXES, ParallelContext
from nxd_infer.errors import CheckpointError, CheckpointTagError
from nxd_infer.layout.files.manifest import DONE, MANIFEST, Manifest, mark_of, marked_number, read_manifest
from nxd_infer.util.reading import checksum_of, checksum_of_bytes

WHILE_READ = "was removed or saved again while it was read: load again, or keep more of them (num_kept_ckpts)"
UNTAGGED = "_untagged"
"""The folder of the tag ""."""
SHARDS = "shards"
"""The tag in the folder of ``Parallelizer.save_model_sharded_checkpoint``, where the model's configuration lies too."""
_SAVING = ".saving-"
_OURS = re.compile(r"rank_\d{5}\.|model\.tp_rank_|optim\.dp_rank_|lora_adapter(/|$)|manifest\.json")
"""Names of the files in a checkpoint without DONE."""
_NUMBERED = {True: re.compile(r"^\.saving-(\d{1,18})$"), False: re.compile(r"\.(\d{8,18})$")}
"""Folders with the checkpoint's number in their name, in a file system (True) and in a bucket."""


def model_file(context: ParallelContext) -> str:
    """Return the name of the file with a rank's shard of the model, or of its experts."""
    experts = f".ep_rank_{context.ep.rank:02d}" if context.ep.rank else ""
    return f"model.tp_rank_{context.tp.rank:02d}.pp_rank_{context.pp.rank:02d}{experts}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    storage: Storage
    folder: str
    manifest: Manifest

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def counter(self) -> int:
        return self.manifest.counter

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the job that saved it, by axis."""
        return {**self.manifest.degrees}

    @property
    def where(self) -> str:
        """The name for messages."""
        return self.storage.where(self.folder)

    def replaced(self) -> bool:
        """Whether its folder is gone, or holds another one by now: a save renames and removes whole folders."""
        try:
            return _read(self.storage, self.folder) != self
        except CheckpointError:
            return True

    def path(self, name: str) -> Path:
        """Return the path of one of its files. Raises CheckpointError if it is missing or not one of its files."""
        if name.startswith("/") or ".." in name.split("/"):
            raise CheckpointError(f"{self.where} names the file {name!r}, which would lie outside of it")
        try:
            return self.storage.path(_inside(self.folder, name))
        except FileNotFoundError as error:  # in a bucket, where a file is fetched when it is needed
            problem = WHILE_READ if self.replaced() else f"is damaged: {name} is missing"
            raise CheckpointError(f"the checkpoint {self.where} {problem}") from error

    def read(self, name: str) -> bytes:
        """Return the contents of a small file, checked. Raises CheckpointError if it is missing or differs."""
        try:
            data = self.storage.read(_inside(self.folder, name))
        except OSError as error:
            raise CheckpointError(f"{self.where}/{name} cannot be read: {error}") from error
        if name in self.manifest.blake3:
            self._compare(name, checksum_of_bytes(data))
        return data

    def require_files(self) -> None:
        """Raise CheckpointError naming the files that are missing or have another size than recorded."""
        sizes = self.storage.files(self.folder)
        wrong = []
        for name, size in self.manifest.files.items():
            if name not in sizes:
                wrong.append(f"{name} is missing")
            elif sizes[name] != size:
                wrong.append(f"{name} has {sizes[name]} bytes instead of {size}")
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(
                f"the checkpoint {self.where} of {self.manifest.world_size} ranks is damaged: {shown}; restore "
                "the files, or load another tag"
            )

    def verify(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if one of these files differs from its record, byte for byte."""
        for name in names:
            if name in self.manifest.blake3:
                self._compare(name, checksum_of(self.path(name)))

    def _compare(self, name: str, actual: str) -> None:
        recorded = self.manifest.blake3[name]
        if actual != recorded:
            raise CheckpointError(
                f"{self.where}/{name} differs from its checksum (blake3 {actual[:12]}..., recorded "
                f"{recorded[:12]}...): it was damaged or changed after it was saved; restore the file, or load another "
                "tag"
            )


def complete_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Return the complete checkpoints of a folder, oldest first; one per tag."""
    return _survey(storage)[0]


def holds_checkpoint(storage: Storage, tag: str | None = None) -> bool:
    """Whether there is a checkpoint, complete or damaged, that :func:`find_checkpoint` would return or name."""
    complete, damaged = _survey(storage)
    if tag is not None:
        return tag in [*(one.tag for one in complete), *(_tag_of(storage, folder) for folder in damaged)]
    try:
        return bool(complete or damaged) or _read(storage, "") is not None
    except CheckpointError:
        return True


def find_checkpoint(storage: Storage, tag: str | None) -> Checkpoint:
    """Return the checkpoint ``tag``, or the newest one. ``storage`` may also be the folder of a single checkpoint.

    Raises CheckpointError, listing those that exist; also if the manifest of a candidate is damaged, so that an
    older one is never mistaken for the newest.
    """
    itself = _read(storage, "") if tag is None else None
    if itself is not None:
        return itself
    complete, damaged = _survey(storage)
    fitting = [checkpoint for checkpoint in complete if tag is None or checkpoint.tag == tag]
    last = fitting[-1].counter if fitting else 0
    for folder, error in damaged.items():
        number = _number_of(storage, folder)
        if (tag is None or _tag_of(storage, folder) == tag) and (number is None or number > last):
            raise error
    if fitting:
        return fitting[-1]
    if storage.local and not Path(storage.where()).exists():
        raise CheckpointError(f"{storage.where()} does not exist; give the folder that save_checkpoint() was given")
    listed = ", ".join(repr(checkpoint.tag) for checkpoint in complete[-8:]) or "none"
    which, kind = ("", CheckpointError) if tag is None else (f" with the tag {tag!r}", CheckpointTagError)
    raise kind(f"{storage.where()} holds no complete checkpoint{which}; complete are: {listed}")


def numbered_checkpoint(storage: Storage, tag: str | None, counter: int) -> Checkpoint | None:
    """Return the checkpoint that :func:`find_checkpoint` has found elsewhere, even if there is a newer one by now."""
    itself = _read(storage, "") if tag is None else None
    complete = [itself] if itself is not None else _survey(storage)[0]
    return next((checkpoint for checkpoint in complete if checkpoint.counter == counter), None)


def _survey(storage: Storage, tries: int = 5) -> tuple[list[Checkpoint], dict[str, CheckpointError]]:
    """Return the complete checkpoints, oldest first and one per tag, and the folders of damaged ones."""
    newest: dict[str, Checkpoint] = {}
    damaged: dict[str, CheckpointError] = {}
    names = storage.folders()
    for folder in names:
        try:
            checkpoint = _read(storage, folder)
        except CheckpointError as error:
            damaged[folder] = error
            continue
        if checkpoint and (checkpoint.tag not in newest or newest[checkpoint.tag].counter < checkpoint.counter):
            newest[checkpoint.tag] = checkpoint
    if tries > 1 and storage.folders() != names:  # a save may have renamed a checkpoint before it was read
        return _survey(storage, tries - 1)
    return sorted(newest.values(), key=lambda checkpoint: checkpoint.counter), damaged


def _read(storage: Storage, folder: str) -> Checkpoint | None:
    """Return a folder's checkpoint; None if it is incomplete or something else. Raises CheckpointError if damaged."""

    def read() -> Manifest | None:
        return read_manifest(_reader(storage, folder), lambda name: storage.where(_inside(folder, name)))

    try:
        manifest = read()
    except CheckpointError:  # a save may have replaced the folder between its two files
        manifest = read()
    return None if manifest is None else Checkpoint(storage, folder, manifest)


def _reader(storage: Storage, folder: str) -> Callable[[str], bytes]:
    return lambda name: storage.read(_inside(folder, name))


def _number_of(storage: Storage, folder: str) -> int | None:
    """Return a checkpoint's number from its folder's name or its DONE: its manifest may be damaged."""
    named = _NUMBERED[storage.local].search(folder)
    return int(named[1]) if named else marked_number(_reader(storage, folder))


def _tag_of(storage: Storage, folder: str) -> str:
    """Return the tag that a folder is named after."""
    tag = folder if storage.local else _NUMBERED[False].sub("", folder)
    return "" if tag == UNTAGGED else tag


def rank_stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


# --- writing ----------------------------------------------------------------------------------------------


def checked_tag(tag: Any) -> str:
    """Return ``tag`` as text. Raises CheckpointError unless it can be the name of a folder."""
    text = str(tag)
    if "/" in text or "\0" in text or text.startswith(".") or text == UNTAGGED or len(os.fsencode(text)) > 200:
        raise CheckpointError(
            f"{text!r} cannot be a tag: it becomes the name of a folder, so it holds no '/', does not begin with '.', "
            f"is not {UNTAGGED!r} and has at most 200 bytes"
        )
    return text


def begin(storage: Storage, tag: str) -> int:
    """Clean up, create the folder to write into, and return the checkpoint's number. One rank calls it."""
    storage.tidy_up()
    highest = max((_number_of(storage, folder) or 0 for folder in storage.folders()), default=0)
    for folder in storage.folders():
        if _unfinished(storage, folder):
            try:
                complete = _read(storage, folder)
            except CheckpointError:  # damaged; keep it for a repair; loading will name it
                continue
            if complete is None:
                storage.remove(folder)
            else:
                _publish(complete)
    target = tag or UNTAGGED
    if storage.local and _is_foreign(Path(storage.where(target))):
        raise CheckpointError(
            f"{storage.where(target)} exists and is not a checkpoint; it is left alone: choose another tag or path"
        )
    storage.make(folder_of(storage, tag, highest + 1))
    return highest + 1


def folder_of(storage: Storage, tag: str, counter: int) -> str:
    """Return the folder into which the ranks write the checkpoint of this number."""
    return f"{_SAVING}{counter:08d}" if storage.local else f"{tag or UNTAGGED}.{counter:08d}"


def finish(
    storage: Storage,
    tag: str,
    counter: int,
    context: ParallelContext,
    checksums: Mapping[str, str],
    keep: int | None = None,
    **facts: Any,
) -> None:
    """Complete the checkpoint after every rank has written, name it, and remove all but the newest ``keep``.

    ``checksums`` are those of all ranks' files, by file; ``facts`` are further entries of the manifest.
    """
    folder = folder_of(storage, tag, counter)
    manifest = Manifest(
        tag=tag,
        counter=counter,
        saved_at=time.time(),
        world_size=context.world_size,
        degrees={axis: context.axis(axis).degree for axis in AXES},
        files=storage.files(folder),
        blake3=dict(checksums),
        **{"torch": str(torch.__version__), **facts},
    )
    text = manifest.model_dump_json(indent=1).encode()
    storage.write(f"{folder}/{MANIFEST}", text)
    storage.write(f"{folder}/{DONE}", mark_of(text, counter))
    _publish(Checkpoint(storage, folder, manifest))
    complete = complete_checkpoints(storage)
    for old in complete[:-keep] if keep else ():
        storage.remove(old.folder)


def abandon(storage: Storage, tag: str, counter: int) -> None:
    """Remove a failed checkpoint, unless it is complete: then only a later step failed."""
    folder = folder_of(storage, tag, counter)
    with contextlib.suppress(OSError, CheckpointError):
        if folder in storage.folders() and DONE not in storage.files(folder):
            storage.remove(folder)


def remove(storage: Storage, tag: str) -> None:
    """Remove the complete checkpoint of a tag, if there is one. One rank calls it, while none is being saved."""
    for checkpoint in complete_checkpoints(storage):
        if checkpoint.tag == tag:
            storage.remove(checkpoint.folder)


def _publish(checkpoint: Checkpoint) -> None:
    """Rename a complete checkpoint to its tag. If killed halfway, it is still found under its old name."""
    storage, target = checkpoint.storage, checkpoint.tag or UNTAGGED
    if storage.local:
        storage.replace(checkpoint.folder, target)
        return
    for folder in storage.folders():  # one per tag, as in a file system
        try:
            older = _read(storage, folder)
            replaced = older is not None and older.tag == checkpoint.tag and older.counter < checkpoint.counter
        except CheckpointError:
            number = _number_of(storage, folder)
            replaced = _tag_of(storage, folder) == checkpoint.tag and number is not None and number < checkpoint.counter
        if replaced:
            storage.remove(folder)


def _unfinished(storage: Storage, folder: str) -> bool:
    """Whether a killed job left it, renamed or not."""
    if storage.local:
        return folder.startswith(_SAVING)
    if _NUMBERED[False].search(folder) is None:
        return False
    files = storage.files(folder)  # a folder with a date in its name, for example, is not ours
    return DONE not in files and all(map(_OURS.match, files))


def _is_foreign(target: Path) -> bool:
    """Whether there is something at ``target`` that is not from one of our saves and must not be replaced."""
    if not target.is_dir():
        return target.exists()
    return any(target.iterdir()) and not any(target.glob(f"{rank_stem(0)}.*"))
