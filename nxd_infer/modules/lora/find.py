"""Where an adapter is: in a folder of its own, or in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
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

Folder = str | os.PathLike[str]


def find_together(folder: Folder, tag: str | None = None) -> Path:
    """Return what :func:`find_adapter` finds on rank 0: the others could find another one, while a job saves there.

    Every rank of a process group calls it.
    """
    root, context = Path(folder), current_context()
    if context.world_size == 1 or not group_exists():  # or what is built to be counted or traced, rank by rank
        return find_adapter(root, tag)
    name = ""

    def find() -> None:
        nonlocal name
        name = "" if context.rank else find_adapter(root, tag).relative_to(root).as_posix()

    in_turns(context, context.world_size, find, of_world=True)
    for axis in AXES:
        name = gather_texts(name, context, axis)[0]
    return root / name


def find_adapter(folder: Folder, tag: str | None = None) -> Path:
    """Find an adapter's folder: ``folder`` or ``folder/lora_adapter``, of ``tag`` or of the newest checkpoint below.

    The newest is the complete checkpoint with the highest number; without checkpoints, the only adapter below
    ``folder``. Raises CheckpointError if there is none, if there are several without an order, or if it is damaged.
    """
    root = Path(folder) / tag if tag else Path(folder)
    for place in (root, root / SUBFOLDER):
        if is_adapter(place):
            return _verified(place)
    below = sorted(path for path in root.glob("*") if path.is_dir() and not path.name.startswith(REMOVING))
    saved = [path for path in below if of_checkpoint(path)]
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


def of_checkpoint(folder: Path) -> bool:
    """Return whether a trainer has saved there, or started to: a rank writes its adapter after its other files."""
    return any(folder.glob(f"rank_{'[0-9]' * 5}.*"))


def _reader(folder: Path) -> Callable[[str], bytes]:
    return lambda name: (folder / name).read_bytes()


def _manifest(folder: Path) -> Manifest | None:
    return read_manifest(_reader(folder), lambda name: str(folder / name))


def _verified(adapter: Path) -> Path:
    """Return ``adapter`` after verifying it against the checksums of its checkpoint, if it is in one."""
    folder = adapter.parent
    if adapter.name != SUBFOLDER or not of_checkpoint(folder):
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
