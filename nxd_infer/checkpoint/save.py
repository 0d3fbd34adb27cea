"""Write one rank's part, and wait for all ranks.

A rank writes safetensors, then a JSON file with the runs of each tensor. These files tell rank 0 when all ranks have
written, so finishing an asynchronous save needs no communication that could interfere with the training's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from nxd_infer.checkpoint.contents import Content, Unread
from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.modules.lora.find import SUBFOLDER
from nxd_infer.util.reading import BLAKE3, checksum_of, checksum_of_bytes

SILENCE_SECONDS = 3600.0
"""Seconds without a new or longer file after which rank 0 abandons an asynchronous save: another rank is gone. A rank
hashes or uploads its largest file in less."""


def write_content(
    storage: Storage, folder: str, rank: int, content: Content, advance: Callable[[], None] = lambda: None
) -> None:
    """Write a rank's files, then its record with their checksums. ``advance`` is called for each :class:`Unread`."""
    last = f"{rank_stem(rank)}.json"
    with storage.writing(folder, last) as place:
        for name, tensors in content.files.items():
            _write_file(place / name, tensors, advance)
        names = list(content.files)
        if content.write_adapter is not None:
            content.write_adapter(place / SUBFOLDER)
            names += [f"{SUBFOLDER}/{path.name}" for path in (place / SUBFOLDER).iterdir()]
        # Files just written are still in memory, and every rank reads its own.
        record = {**content.record, BLAKE3: {name: checksum_of(place / name) for name in names}}
        with replacing(place / last) as temporary:
            temporary.write_text(json.dumps(record), encoding="utf-8")


def _write_file(path: Path, tensors: Mapping[str, Tensor | Unread], advance: Callable[[], None]) -> None:
    def tensor(name: str) -> Tensor:
        one = tensors[name]
        if isinstance(one, Tensor):
            return one
        advance()
        return one.read()

    with replacing(path) as temporary, open(temporary, "wb") as file:
        write_safetensors(file, [(name, one.dtype, one.shape) for name, one in tensors.items()], tensor)


def wait_for_ranks(storage: Storage, folder: str, world_size: int) -> dict[str, str]:
    """Wait until every rank has written; return the checksums of all their files, including the JSON files.

    Raises CheckpointError if one has failed or nothing happens any more.
    """
    missing = {f"{rank_stem(rank)}.json" for rank in range(world_size)}
    checksums: dict[str, str] = {}
    seen: dict[str, int] = {}
    last = time.monotonic()
    while True:
        names = storage.files(folder)
        for name in sorted(missing & names.keys()):
            text = storage.read(f"{folder}/{name}")
            with contextlib.suppress(json.JSONDecodeError):  # sftp, for example, shows files that are being written
                checksums |= json.loads(text)[BLAKE3] | {name: checksum_of_bytes(text)}
                missing.remove(name)
        if not missing:
            return checksums
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            reason = storage.read(f"{folder}/{failed[0]}").decode(errors="replace")
            raise CheckpointError(f"{storage.where(folder)}/{failed[0]}: {reason}")
        if names != seen:
            seen, last = names, time.monotonic()
        elif time.monotonic() - last > SILENCE_SECONDS:
            raise CheckpointError(
                f"{storage.where(folder)}: nothing came for {SILENCE_SECONDS:.0f} s; missing: {sorted(missing)[:8]}"
            )
        time.sleep(0.01 if storage.local else 1.0)
