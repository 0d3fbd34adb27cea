"""Tokens of many documents on disk, mapped into memory: written once by one process, read by all ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nxd_infer.recipes.data.encode import Example
from nxd_infer.recipes.data.rows import Documents

IDS, COUNTS, BOUNDS, FACTS = "ids.npy", "counts.npy", "bounds.npy", "facts.json"


class TokenStore(Documents):
    """The documents of a folder that :func:`write_store` wrote."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ids = np.load(folder / IDS, mmap_mode="r")
        self.counts = np.load(folder / COUNTS, mmap_mode="r")
        self.bounds = np.load(folder / BOUNDS)
        self.facts = json.loads((folder / FACTS).read_text())
        """What :func:`write_store` has returned."""


def write_store(folder: Path, examples: Iterable[Example]) -> dict[str, int]:
    """Write documents; the folder is there once all of it is. Empty ones are left out.

    Return how many ``documents`` and ``tokens`` there are and how many documents nothing counts in (``silent``); how
    many were ``cut``, and how many tokens that count were ``lost`` by it.
    """
    building = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    bounds, facts = [0], {"silent": 0, "cut": 0, "lost": 0}
    with (building / "ids").open("wb") as ids, (building / "counts").open("wb") as counts:
        for example in examples:
            if len(example.ids):
                ids.write(np.asarray(example.ids, np.int32).tobytes())
                counts.write(np.asarray(example.counts, np.bool_).tobytes())
                bounds.append(bounds[-1] + len(example.ids))
                facts["silent"] += not any(example.counts[1:])  # nothing predicts a first token
                facts["cut"] += example.lost is not None
                facts["lost"] += example.lost or 0
    for name, kind, file in (("ids", np.int32, IDS), ("counts", np.bool_, COUNTS)):
        raw = building / name
        data = np.memmap(raw, kind, "r") if bounds[-1] else np.zeros(0, kind)
        np.save(building / file, data)
        del data
        raw.unlink()
    np.save(building / BOUNDS, np.asarray(bounds, np.int64))
    facts |= {"documents": len(bounds) - 1, "tokens": bounds[-1]}
    (building / FACTS).write_text(json.dumps(facts))
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    return facts
