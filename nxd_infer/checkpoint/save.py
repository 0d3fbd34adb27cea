"""Write one rank's part, and wait for all ranks.

A rank writes safetensors, then a JSON file with the runs of each tensor. These files tell rank 0 when all ranks have
written, so finishing an asynchronous save needs no communication that could interfere with the training's.
"""

from __future__ import annotations

import contextlib
import json
import time

from safetensors.torch import save_file

from nxd_infer.checkpoint.contents import Content
from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.modules.lora.find import SUBFOLDER
from nxd_infer.modules.lora.peft import write_adapter
from nxd_infer.util.reading import BLAKE3, checksum_of, checksum_of_bytes

SILENCE_SECONDS = 600.0
"""Seconds without a new or longer file after which rank 0 abandons an asynchronous save: another rank is gone."""
HEARTBEAT_SECONDS = 30.0
"""Seconds between two signs of a rank whose save continues without visible changes to files."""


def write_rank(storage: Storage, folder: str, rank: int, content: Content) -> None:
    """Write this rank's files, its JSON with their checksums last."""
    last, heartbeat = f"{rank_stem(rank)}.json", HeartbeatFile(storage, f"{folder}/{rank_stem(rank)}.alive")
    with storage.writing(folder, last, heartbeat) as place:
        for name, tensors in content.files.items():
            with replacing(place / name) as temporary:
                save_file(tensors, temporary)
            heartbeat(0)
        written = {name: place / name for name in content.files}
        if content.adapter is not None and rank == 0:
            inside = content.adapter[1].get("save_lora_config_adapter", False)
            write_adapter(place / SUBFOLDER, *content.adapter, apart=not inside)
            adapter = [path for path in (place / SUBFOLDER).iterdir() if path.is_file()]
            written |= {path.relative_to(place).as_posix(): path for path in adapter}
        # Files just written are still in memory, and every rank reads its own.
        checksums = {name: checksum_of(path, progress=heartbeat) for name, path in written.items()}
        heartbeat.end()
        with replacing(place / last) as temporary:
            temporary.write_text(json.dumps({**content.record, BLAKE3: checksums}), encoding="utf-8")


class HeartbeatFile:
    """A small file that grows while a rank reads or uploads large ones; removed before the rank's JSON appears."""

    def __init__(self, storage: Storage, name: str):
        self._storage, self._name = storage, name
        self._signs, self._last, self._there = 0, time.monotonic(), False

    def __call__(self, count: int, /) -> None:
        if time.monotonic() - self._last < HEARTBEAT_SECONDS:
            return
        self._signs += 1
        with contextlib.suppress(OSError, CheckpointError):  # rank 0 may have given up and removed the folder
            self._storage.write(self._name, b"." * self._signs)
        self._last, self._there = time.monotonic(), True

    def end(self) -> None:
        if self._there:
            with contextlib.suppress(OSError, CheckpointError):  # it may stay in a store without deletion
                self._storage.delete(self._name)
            self._there = False


def wait_for_ranks(storage: Storage, folder: str, world_size: int) -> dict[str, str]:
    """Wait until every rank has written; return the checksums of all their files, including the JSON files.

    Raises CheckpointError if one has failed or nothing happens any more.
    """
    missing = {f"{rank_stem(rank)}.json" for rank in range(world_size)}
    checksums: dict[str, str] = {}
    there: dict[str, int] = {}
    last = time.monotonic()
    while True:
        names = storage.files(folder)
        for name in sorted(missing & names.keys()):
            text = storage.read(f"{folder}/{name}")
            with contextlib.suppress(json.JSONDecodeError):  # sftp, for example, shows files that are being written
                record = json.loads(text)
                if BLAKE3 not in record:
                    raise CheckpointError(
                        f"{storage.where(folder)}/{name} has no {BLAKE3} checksums: it was written by another release "
                        "of nxd_infer; install the same one for all ranks"
                    )
                checksums |= record[BLAKE3] | {name: checksum_of_bytes(text)}
                missing.remove(name)
        if not missing:
            return checksums
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            reason = storage.read(f"{folder}/{failed[0]}").decode(errors="replace")
            raise CheckpointError(f"{storage.where(folder)}/{failed[0]}: {reason}")
        if names != there:
            there, last = names, time.monotonic()
        elif time.monotonic() - last > SILENCE_SECONDS:
            raise CheckpointError(
                f"{storage.where(folder)}: nothing came for {SILENCE_SECONDS:.0f} s; missing: {sorted(missing)[:8]}"
            )
        time.sleep(0.01 if storage.local else 1.0)
