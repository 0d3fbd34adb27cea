"""Tokens of many documents on disk, mapped into memory: written once by one process, read by all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nxd_infer.recipes.data.encode import Example
from nxd_infer.recipes.data.rows import Documents, mapped

IDS, COUNTS, BOUNDS, FACTS = "ids.bin", "counts.bin", "bounds.npy", "facts.json"


class TokenStore(Documents):
    """The documents of a folder that :func:`write_store` wrote."""

    def __init__(self, folder: Path):
        self.bounds = np.load(folder / BOUNDS)
        size = int(self.bounds[-1])
        self.ids, self.counts = mapped(folder / IDS, np.int32, size), mapped(folder / COUNTS, np.bool_, size)
        self.facts = json.loads((folder / FACTS).read_text())
        """What :func:`write_store` has returned."""


def write_store(folder: Path, examples: Iterable[Example]) -> dict[str, int]:
    """Write documents into a folder. Empty ones are left out.

    Return how many ``documents`` and ``tokens`` there are and how many documents nothing counts in (``silent``); how
    many were ``cut``, and how many tokens that count were ``lost`` by it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounds, facts = [0], {"silent": 0, "cut": 0, "lost": 0}
    with (folder / IDS).open("wb") as ids, (folder / COUNTS).open("wb") as counts:
        for example in examples:
            if len(example.ids):
                ids.write(np.asarray(example.ids, np.int32).tobytes())
                counts.write(np.asarray(example.counts, np.bool_).tobytes())
                bounds.append(bounds[-1] + len(example.ids))
                facts["silent"] += not any(example.counts[1:])  # nothing predicts a first token
                facts["cut"] += example.lost is not None
                facts["lost"] += example.lost or 0
    np.save(folder / BOUNDS, np.asarray(bounds, np.int64))
    facts |= {"documents": len(bounds) - 1, "tokens": bounds[-1]}
    (folder / FACTS).write_text(json.dumps(facts))
    return facts
