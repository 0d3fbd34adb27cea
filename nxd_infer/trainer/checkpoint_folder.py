"""The folder of a job's checkpoints: each tag is there as a whole or not at all, numbered in the order of saving.

::

    ckpts/step_100/manifest.json                  what was saved, by how many ranks, and every file with its size
                   done                           written last: the checkpoint is whole
                   rank_00000.json ...            the runs: what each tensor of this rank's files is made of
                   rank_00000.safetensors ...     its random state; of rank 0 the tensors of user contents too
                   model.tp_rank_00.pp_rank_00.safetensors
                   optim.dp_rank_00.tp_rank_00.pp_rank_00.safetensors
    ckpts/.saving-00000007/                       being written, renamed to its tag when it is whole

A checkpoint is known by its manifest, not by the name of its folder: whatever holds ``done`` is whole, so a job killed
between ``done`` and the rename has saved. The next save tidies up. One job at a time saves into a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.errors import CheckpointError
from nxd_infer.parallel_layers.checkpoint_files import replacing, sync_directory

FORMAT = "nxd-checkpoint 1.0"
MANIFEST = "manifest.json"
DONE = "done"
UNTAGGED = "_untagged"
"""The folder of the tag ""."""
_SAVING = ".saving-"
_REMOVING = ".removing-"


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def tag(self) -> str:
        return self.manifest["tag"]

    @property
    def counter(self) -> int:
        """1 for the first that was saved into the folder, and so on."""
        return self.manifest["counter"]

    @property
    def degrees(self) -> dict[str, int]:
        """Of the job that saved it, by axis."""
        return self.manifest["degrees"]

    def require_files(self) -> None:
        """Raise CheckpointError, naming them, when files are missing or of another size than they were written."""
        wrong = []
        for name, size in self.manifest["files"].items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                wrong.append(f"{name} is missing" if found is None else f"{name} has {found} bytes instead of {size}")
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(
                f"the checkpoint {self.folder} of {self.manifest['world_size']} ranks is damaged: {shown}; restore "
                "the files, or load another tag"
            )


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """The whole checkpoints of a folder, oldest first; one a tag."""
    newest: dict[str, Checkpoint] = {}
    for folder in root.iterdir() if root.is_dir() else ():
        found = None if folder.name.startswith(_REMOVING) else _read(folder)
        if found and (found.tag not in newest or newest[found.tag].counter < found.counter):
            newest[found.tag] = found
    return sorted(newest.values(), key=lambda checkpoint: checkpoint.counter)


def find_checkpoint(root: Path, tag: str | None) -> Checkpoint:
    """The checkpoint of ``tag``, or the newest one. Raises CheckpointError, which lists those that there are."""
    there = complete_checkpoints(root)
    fitting = [checkpoint for checkpoint in there if tag is None or checkpoint.tag == tag]
    if fitting:
        return fitting[-1]
    listed = ", ".join(repr(checkpoint.tag) for checkpoint in there[-8:]) or "none"
    what = "no complete checkpoint" if tag is None else f"no complete checkpoint with the tag {tag!r}"
    raise CheckpointError(
        f"{root} holds {what}; complete are: {listed}. trainer.checkpoint.has_checkpoint(path) says whether there is "
        "one to resume from"
    )


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder, None when it is not whole or something else."""
    try:
        if not (folder / DONE).is_file():
            return None
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and isinstance(manifest["files"], dict)
        known = known and isinstance(manifest["tag"], str) and isinstance(manifest["counter"], int)
        known = known and isinstance(manifest["degrees"], dict) and isinstance(manifest["world_size"], int)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Checkpoint(folder, manifest) if known else None


# --- writing ----------------------------------------------------------------------------------------------


def checked_tag(tag: Any) -> str:
    """``tag`` as text. Raises CheckpointError unless it can be the name of a folder."""
    text = str(tag)
    if "/" in text or "\0" in text or text.startswith(".") or text == UNTAGGED or len(os.fsencode(text)) > 200:
        raise CheckpointError(
            f"{text!r} cannot be a tag: it becomes the name of a folder, so it holds no '/', does not begin with '.', "
            f"is not {UNTAGGED!r} and has at most 200 bytes"
        )
    return text


def begin(root: Path, tag: str) -> int:
    """Tidy up, make the folder to write into, and return the checkpoint's number. One rank calls it."""
    root.mkdir(parents=True, exist_ok=True)
    _tidy_up(root)
    target = root / (tag or UNTAGGED)
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no checkpoint; it is left alone: choose another tag or path")
    counter = 1 + max((checkpoint.counter for checkpoint in complete_checkpoints(root)), default=0)
    folder_of(root, counter).mkdir()
    return counter


def folder_of(root: Path, counter: int) -> Path:
    """Where the ranks write the checkpoint of this number."""
    return root / f"{_SAVING}{counter:08d}"


def finish(root: Path, tag: str, counter: int, facts: Mapping[str, Any], keep: int | None) -> None:
    """Every rank has written: make the checkpoint whole, give it its name, and remove all but the newest ``keep``."""
    folder = folder_of(root, counter)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    manifest = {"format": FORMAT, "tag": tag, "counter": counter, "saved_at": time.time(), **facts, "files": files}
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    with replacing(folder / DONE) as temporary:
        temporary.touch()
    _publish(Checkpoint(folder, manifest))
    for old in complete_checkpoints(root)[:-keep] if keep else ():
        _remove(old.folder)


def abandon(root: Path, counter: int) -> None:
    """Remove what was written of a checkpoint that failed."""
    shutil.rmtree(folder_of(root, counter), ignore_errors=True)


def _publish(checkpoint: Checkpoint) -> None:
    """Rename a whole checkpoint to its tag. Killed halfway, it is still found under the name it had."""
    target = checkpoint.folder.parent / (checkpoint.tag or UNTAGGED)
    old = _set_aside(target) if target.exists() else None
    os.rename(checkpoint.folder, target)
    sync_directory(target.parent)
    if old is not None:
        shutil.rmtree(old)


def _set_aside(folder: Path) -> Path:
    """Take a checkpoint out of the list in one step, before its files go one by one."""
    aside = folder.with_name(f"{_REMOVING}{folder.name}")
    os.rename(folder, aside)
    sync_directory(folder.parent)
    return aside


def _remove(folder: Path) -> None:
    shutil.rmtree(_set_aside(folder))


def _tidy_up(root: Path) -> None:
    """Finish or remove what killed jobs left."""
    for folder in root.iterdir():
        if folder.name.startswith(_REMOVING):
            shutil.rmtree(folder)
    for folder in root.iterdir():
        if folder.name.startswith(_SAVING):
            found = _read(folder)
            if found is not None:
                _publish(found)
            else:
                shutil.rmtree(folder)
