"""Training checkpoints: ours, with what their files say of each other, and those that the reference wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.folder import find_checkpoint
from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import ParamLayout
from nxd_infer.layout.files.manifest import DONE, MANIFEST, mark_of
from nxd_infer.layout.files.values import pack, unpack
from nxd_infer.util.reading import checksum_of_bytes, parse_json
from tests.fuzz.mutations import TORCH_FILE
from tests.fuzz.target import Target, object_with

RECORD = "rank_00000.json"


def ours(place: Path) -> Target:
    """A checkpoint's manifest and the record of its rank, whose checksums are made to fit."""
    save_checkpoint(
        place / "jobs", "step", torch.nn.Linear(3, 2), user_content={"at": [1, (2.5, b"x")], "t": torch.ones(2)}
    )
    folder = place / "jobs" / "step"
    before = json.loads((folder / MANIFEST).read_bytes())
    made = json.dumps({"manifest": before, "record": json.loads((folder / RECORD).read_bytes())}).encode()

    def read(data: bytes) -> None:
        both: Any = json.loads(data)
        record, manifest = json.dumps(both["record"]).encode(), both["manifest"]
        (folder / RECORD).write_bytes(record)
        if isinstance(manifest, dict):
            for table, value in (("files", len(record)), ("blake3", checksum_of_bytes(record))):
                if isinstance(manifest.get(table), dict) and RECORD in manifest[table]:
                    manifest[table][RECORD] = value
        text = json.dumps(manifest).encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / DONE).write_bytes(mark_of(text, 1))
        archive = Archive(find_checkpoint(storage_of(place / "jobs"), "step"))
        archive.verify(["model", "values"])
        archive.value(0, "values")
        source = weight_source(place / "jobs", "step")
        for name in list(source.keys()):
            assert tuple(source.read(name).shape) == tuple(source.shape(name))

    return Target("checkpoint", object_with(read, "manifest", "record"), (CheckpointError,), [made])


def values(place: Path) -> Target:
    """What stands for values that are no tensors; what was accepted can be packed again, and is the same then."""
    example = {"a": (1, [2.0, float("inf")]), 3: {4, 5}, "b": b"bytes", "t": torch.ones(2, 2), "d": torch.int8}

    def read(data: bytes) -> None:
        try:
            structure = parse_json(data)
        except ValueError:
            return
        again, tensors = pack(unpack(structure, stored.__getitem__))
        assert json.dumps(pack(unpack(again, tensors.__getitem__))[0]) == json.dumps(again)

    structure, stored = pack(example)
    return Target("values", read, (CheckpointError,), [json.dumps(structure).encode()])


def reference(place: Path) -> Target:
    """A file of the reference's checkpoints, which is a pickle: nothing in it but tensors and plain values is made."""
    file = place / "jobs" / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
    file.parent.mkdir(parents=True)
    state = {"model": {"weight": torch.ones(2, 3)}, "step": 3, "lists": [1, (2, "x"), {"y": None}]}
    made = io.BytesIO()
    torch.save(state, made)

    def read(data: bytes) -> None:
        file.write_bytes(data)
        archive = ReferenceArchive(place / "jobs")
        for stage in archive.stages():
            archive.know({name: ParamLayout.of(list(one.shape), name) for name, one in stage[0].items()})
        archive.pieces("model")
        archive.value(0, "values")
        list(archive.parts("optimizer"))

    return Target("reference", read, (CheckpointError,), [made.getvalue()], form=TORCH_FILE)
