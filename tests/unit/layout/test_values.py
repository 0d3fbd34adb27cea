"""Plain values go into a checkpoint and come back; what only a pickle could hold is refused by its path."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.values import pack, unpack
from nxd_infer.parallel_layers.checkpointing import load, save


@dataclasses.dataclass
class Settings:
    rate: float


class Level(enum.IntFlag):
    LOW = 1


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, set | frozenset):
        return a == b
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)  # also of numbers that are none, and of a minus before zero


SAMPLE: dict[Any, Any] = {
    "array": np.arange(6, dtype=np.float16).reshape(2, 3),
    "large": np.arange(5000),
    "scalars": [np.float32(0.1), np.float64(2.5), np.bool_(True), np.complex64(1 + 2j)],
    "random": [random.getstate(), torch.get_rng_state()],
    "bytes": [b"\x00\xff", bytes(range(256)) * 40],
    "sets": [{1, "a", (2, 3)}, frozenset([1.5])],
    "mappings": [collections.Counter("hello"), collections.OrderedDict(b=1, a=2)],
    "sequences": [[], (), ((), ((),)), torch.Size([2, 3])],
    "state": nn.Linear(2, 2).state_dict(),
    "empty": [torch.zeros(0, 3), torch.zeros(())],
    "dtype": torch.float16,
    "numbers": [True, None, 7**1000, -0.0, math.nan, -math.inf],
    3: {1: {2: "ints as keys"}, (1, None): "and tuples"},
}


@pytest.mark.parametrize("xser", [False, True])
def test_in_the_files_of_parallel_layers(tmp_path: Path, xser: bool):
    save(SAMPLE, tmp_path, save_xser=xser)
    assert same(load(tmp_path, load_xser=xser), SAMPLE)


@pytest.mark.parametrize("async_save", [False, True])
def test_in_a_checkpoint(tmp_path: Path, async_save: bool):
    save_checkpoint(tmp_path, "a", user_content=SAMPLE, async_save=async_save)
    wait_for_save()
    assert same(load_checkpoint(tmp_path, "a"), SAMPLE)


@pytest.mark.parametrize("down_cast", [False, True])
def test_views_that_negate_are_stored_each_by_itself(down_cast: bool):
    """What they stand for is made to be stored, and nothing else may be taken for it once its memory is free again."""
    views = [torch.full((64,), complex(0, i)).conj().imag for i in range(8)]
    structure, tensors = pack(views, down_cast)
    assert [float(loaded[0]) for loaded in unpack(structure, tensors.__getitem__)] == [-i for i in range(8)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, 2, object()]}, "user_content['a'][3] is a object, which"),
        ({"f": len}, "user_content['f'] is a builtin_function_or_method"),
        (Settings(0.5), "user_content is a {here}.Settings"),
        ([Level.LOW], "user_content[0] is a {here}.Level"),
        ({"paths": (Path("/data"),)}, "user_content['paths'][0] is a pathlib."),
        ({datetime.date(2024, 2, 29): 1}, "user_content key is a datetime.date"),
        (argparse.Namespace(a=1), "user_content is a argparse.Namespace"),
        (np.array([None]), "user_content is a numpy.ndarray"),
        ({"t": torch.zeros(2, 2).to_sparse()}, "user_content['t'] is a torch.sparse_coo tensor"),
        ({"t": torch.zeros(2, dtype=torch.complex64)}, "user_content['t'] is a tensor of torch.complex64"),
    ],
    ids=lambda value: value[13:40] if isinstance(value, str) else "",
)
def test_what_only_a_pickle_could_hold_is_named(tmp_path: Path, value: Any, message: str):
    expected = message.format(here=__name__)
    with pytest.raises(CheckpointError, match="^" + re.escape(expected)):
        save_checkpoint(tmp_path, "a", user_content=value)
    with pytest.raises(CheckpointError, match=re.escape(expected.removeprefix("user_content"))):
        save({"value": value}, tmp_path / "b")


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def test_what_is_nested_too_deeply_to_be_read_is_not_written():
    """Its path is named, shortened; what is not refused can be read."""
    structure, tensors = pack(nested(100))
    assert unpack(json.loads(json.dumps(structure)), tensors.__getitem__) == nested(100)
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (nested(101), nested(400), cyclic):
        with pytest.raises(CheckpointError, match=r"^user_content\[.{20,150} is nested too deeply, .* flatten it$"):
            pack(value, what="user_content")

    def deeper(calls: int) -> Any:
        return deeper(calls - 1) if calls else pack(nested(90), what="user_content")

    with pytest.raises(CheckpointError, match="user_content is nested too deeply"):
        deeper(sys.getrecursionlimit() - 200)  # the caller is deep in calls itself


@pytest.mark.parametrize(
    "structure",
    [
        {"dtype": "load"},
        {"numpy": ["array", "|O", [1], "AAAAAAAAAAA="]},
        {"numpy": ["array", "<f8", [9], "AAAA"]},
        {"dataclass": ["subprocess.Popen", [["args", "true"]]]},
        {"size": ["x"]},
        {"set": [{"list": []}]},
        {"tensor": 1, "list": []},
        {"tensor": "no number"},
        [1],
    ],
    ids=str,
)
def test_a_damaged_structure_is_refused(structure: Any):
    with pytest.raises(CheckpointError, match="structure of the checkpoint is damaged"):
        unpack(structure, {"1": torch.zeros(4, dtype=torch.uint8)}.__getitem__)
