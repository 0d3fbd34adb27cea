"""Write one rank's part, and wait for all ranks.

A rank writes safetensors, then a JSON file with the runs of each tensor. These files tell rank 0 when all ranks have
written, so finishing an asynchronous save needs no communication that could interfere with the training's.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nxd_infer.checkpoint.contents import Content
from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.modules.lora.find import SUBFOLDER
from nxd_infer.modules.lora.peft import write_adapter
from nxd_infer.util.reading import BLAKE3, checksum_of, checksum_of_bytes

SILENCE_SECONDS = 3600.0
"""Seconds without a new or longer file after which rank 0 abandons an asynchronous save: another rank is gone. A rank
hashes or uploads its largest file in less."""


def write_content(storage: Storage, folder: str, rank: int, content: Content) -> None:
    """Write what this rank saves of a job."""

    def write(place: Path) -> Iterator[str]:
        for name, tensors in content.files.items():
            with replacing(place / name) as temporary:
                save_file(tensors, temporary)
            yield name
        if content.adapter is not None and rank == 0:
            inside = content.adapter[1].get("save_lora_config_adapter", False)
            write_adapter(place / SUBFOLDER, *content.adapter, apart=not inside)
            yield from (f"{SUBFOLDER}/{path.name}" for path in (place / SUBFOLDER).iterdir() if path.is_file())

    write_rank(storage, folder, rank, content.record, write)


def write_rank(
    storage: Storage, folder: str, rank: int, record: Mapping[str, Any], write: Callable[[Path], Iterable[str]]
) -> None:
    """Have ``write`` write a rank's files, whose names it returns; then write the record, with their checksums."""
    last = f"{rank_stem(rank)}.json"
    with storage.writing(folder, last) as place:
        # Files just written are still in memory, and every rank reads its own.
        checksums = {name: checksum_of(place / name) for name in write(place)}
        with replacing(place / last) as temporary:
            temporary.write_text(json.dumps({**record, BLAKE3: checksums}), encoding="utf-8")


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
