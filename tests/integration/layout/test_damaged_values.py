"""A structure of a checkpoint that is damaged, or asks for too much, is refused."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.unpack import MOST_ALIKE, unpack


@pytest.mark.parametrize(
    "structure",
    [
        {"path": ["Popen", "x"]},
        {"default": ["eval", []]},
        {"dtype": "load"},
        {"numpy": ["array", "|O", [1], "AAAAAAAAAAA="]},
        {"numpy": ["array", "<f8", [9], "AAAA"]},
        {"numpy": ["array", "<f4", [1], "AAAAAAAAAAA="]},
        {"numpy": ["generator", {"dict": [["bit_generator", "default_rng"]]}]},
        {"numpy": ["nothing"]},
        {"numpy": []},
        {"named_tuple": ["a.b", [["import os", 1]]]},
        {"named_tuple": ["a.b", [["__class__", 1]]]},
        {"fraction": [1, 0]},
        {"fraction": ["1e9"]},
        {"deque": [None, {"range": [0, 9, 1]}]},
        {"zone": ["../../etc/passwd"]},
        {"zone": ["No/Where"]},
        {"bytes": "!"},
        {"datetime": [0, None, 1, 1]},
        {"set": [{"list": []}]},
        {"viewed": [0, "complex64", [7]]},
        {"requires_grad": {"tensor": 0}},
        {"requires_grad": 3},
        {"visit": 1},
        {"__init__": []},
        {"tensor": 1, "list": []},
        [1],
    ],
    ids=str,
)
def test_a_damaged_structure_is_refused(structure: Any):
    with pytest.raises(CheckpointError, match="structure of the checkpoint"):
        unpack(structure, lambda number: torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "counter"])
def test_keys_with_one_hash_are_refused(kind: str):
    """Each is compared with all before it: a second for 16,000."""
    for count, fits in ((MOST_ALIKE, True), (MOST_ALIKE + 1, False)):
        keys = [number * sys.hash_info.modulus for number in range(count)]
        structure = {kind: keys if "set" in kind else [[key, 1] for key in keys]}
        with contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="have the same hash"):
            assert len(unpack(structure, torch.zeros)) == count


@pytest.mark.parametrize("error", [MemoryError, SystemError, OSError])
def test_whatever_a_structure_asks_too_much_of_is_told(error: type[Exception]):
    def too_much(number: int) -> torch.Tensor:
        raise error

    with pytest.raises(CheckpointError, match="structure of the checkpoint is damaged"):
        unpack({"tensor": 0}, too_much)
