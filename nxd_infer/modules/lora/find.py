"""Where an adapter is: in a folder of its own, or in a checkpoint, which another job may replace meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nxd_infer.comm.texts import gather_texts
from nxd_infer.comm.turns import in_turns
from nxd_infer.context import AXES, current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import REMOVING
from nxd_infer.layout.files.manifest import Manifest, marked_number, read_manifest
from nxd_infer.util.devices import group_exists
from nxd_infer.util.reading import checksum_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SUBFOLDER = "lora_adapter"
"""The folder of the adapter in a checkpoint."""
TRIES = 5
"""How often a folder is searched because a save has changed its names meanwhile."""

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Found:
    """An adapter's folder."""

    folder: Path
    number: int | None
    """Of the checkpoint that it is in."""

    def require_same(self) -> None:
        """Raise CheckpointError unless the folder is of the same checkpoint as when it was found."""
        if marked_number(_reader(self.folder.parent)) != self.number:
            raise CheckpointError(f"{self.folder} was removed or saved again while it was read: load it again")


def find_together(folder: Folder, tag: str | None = None) -> Found:
    """Return what :func:`find_adapter` finds on rank 0: the others could find another one, while a job saves there.

    Every rank of a process group calls it.
    """
    root, context = Path(folder), current_context()
    found: list[tuple[str, int | None]] = []

    def find() -> None:
        path = find_adapter(root, tag)
        found.append((path.relative_to(root).as_posix(), marked_number(_reader(path.parent))))

    if context.world_size == 1 or not group_exists():  # or what is built to be counted or traced, rank by rank
        find()
        return Found(root / found[0][0], found[0][1])
    in_turns(context, context.world_size, lambda: None if context.rank else find(), of_world=True)
    text = json.dumps(found)
    for axis in AXES:
        text = gather_texts(text, context, axis)[0]
    ((name, number),) = json.loads(text)
    return Found(root / name, number)


def find_adapter(folder: Folder, tag: str | None = None, tries: int = TRIES) -> Path:
    """Find an adapter's folder: ``folder`` or ``folder/lora_adapter``, of ``tag`` or of the newest checkpoint below.

    The newest is the complete checkpoint with the highest number; without checkpoints, the only adapter below
    ``folder``. Raises CheckpointError if there is none, if there are several without an order, or if it is damaged.
    """
    root = Path(folder) / tag if tag else Path(folder)
    listed = _listed(folder, root)
    try:
        found = _find(root, tag)
    except CheckpointError:
        if tries == 1 or _listed(folder, root) == listed:
            raise
    else:
        if tries == 1 or _listed(folder, root) == listed:
            return found
    return find_adapter(folder, tag, tries - 1)  # a save may have renamed or replaced what was read


def _listed(*folders: Folder) -> list[list[str]]:
    """Return the names in each folder; of one that is not there, none."""
    return [sorted(path.name for path in Path(folder).glob("*")) for folder in folders]


def _find(root: Path, tag: str | None) -> Path:
    for found in (root, root / SUBFOLDER):
        if is_adapter(found):
            return _verified(found)
    below = sorted(path for path in root.glob("*") if path.is_dir() and not path.name.startswith(REMOVING))
    saved = [path for path in below if _of_checkpoint(path)]
    newest = _newest_checkpoint(saved)
    if newest is not None:
        return _verified(newest / SUBFOLDER)
    places = (place for path in below if path not in saved for place in (path, path / SUBFOLDER))
    plain = [place for place in places if is_adapter(place)]
    if tag or not plain:
        raise CheckpointError(f"{root} has no adapter: there is no {CONFIG} in it")
    if len(plain) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in plain[:8])
        raise CheckpointError(
            f"{root} has {len(plain)} adapters, and it is unknown which is the newest: {names}; choose one with "
            "lora_load_tag"
        )
    return plain[0]


def is_adapter(folder: Path) -> bool:
    """Return whether there is an adapter, intact or not."""
    return any((folder / name).is_file() for name in (CONFIG, WEIGHTS))


def _newest_checkpoint(folders: list[Path]) -> Path | None:
    """Return the newest complete checkpoint with an adapter. Raises CheckpointError if a damaged one may be newer."""
    numbers: dict[Path, int] = {}
    damaged: list[tuple[int | None, CheckpointError]] = []
    for folder in folders:
        try:
            manifest = _manifest(folder)
        except CheckpointError as error:
            if (folder / SUBFOLDER).is_dir():
                damaged.append((marked_number(_reader(folder)), error))
            continue
        if manifest is not None and f"{SUBFOLDER}/{WEIGHTS}" in manifest.files:
            numbers[folder] = manifest.counter
    last = max(numbers.values(), default=0)
    for number, error in damaged:
        if number is None or number > last:
            raise error
    newest = [folder for folder, number in numbers.items() if number == last]
    if len(newest) > 1:
        raise CheckpointError(
            f"{' and '.join(map(str, newest))} are both checkpoint number {last}: one is a copy of the other; choose "
            "one with lora_load_tag"
        )
    return newest[0] if newest else None


def _of_checkpoint(folder: Path) -> bool:
    """Return whether a trainer has saved there, or started to: a rank writes its adapter after its other files."""
    return any(folder.glob(f"rank_{'[0-9]' * 5}.*"))


def _reader(folder: Path) -> Callable[[str], bytes]:
    return lambda name: (folder / name).read_bytes()


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(_reader(folder), lambda name: str(folder / name))


def _verified(adapter: Path) -> Path:
    """Return ``adapter`` after verifying it against the checksums of its checkpoint, if it is in one."""
    folder = adapter.parent
    if adapter.name != SUBFOLDER or not _of_checkpoint(folder):
        return adapter
    manifest = _manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} has an adapter, but the checkpoint is incomplete: load another tag")
    for name in (CONFIG, WEIGHTS):
        if f"{SUBFOLDER}/{name}" not in manifest.files:  # the configuration is in the weights' header
            continue
        if not (adapter / name).is_file():
            raise CheckpointError(f"{adapter / name} is missing; restore the file, or load another tag")
        if checksum_of(adapter / name) != manifest.blake3.get(f"{SUBFOLDER}/{name}"):
            raise CheckpointError(
                f"{adapter / name} differs from its checksum: it was damaged or changed after it was saved; restore "
                "the file, or load another tag"
            )
    return adapter
