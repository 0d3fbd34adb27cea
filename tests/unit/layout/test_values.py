"""What one would give to torch.save goes into a checkpoint and comes back; nothing that a file names is run."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.unpack import MOST_ALIKE, unpack
from nxd_infer.layout.files.values import Record, pack
from nxd_infer.parallel_layers.checkpointing import load, save


@dataclasses.dataclass
class Settings:
    rate: float
    inner: Any = None

    def __post_init__(self) -> None:
        MADE.append(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str


class Point(NamedTuple):
    x: int
    y: Any


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


MADE: list[Any] = []
"""Of every Settings whose constructor has run."""
CLASSES: list[Any] = [Settings, Key, Point, Color, Level]


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flat = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad) and torch.equal(*flat)
    if isinstance(a, np.random.Generator | np.random.RandomState):
        return copy.deepcopy(a).bytes(9) == copy.deepcopy(b).bytes(9)
    if isinstance(a, np.ndarray) and a.dtype != object:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, set | frozenset):
        return a == b
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items())) and repr(a)[:30] == repr(b)[:30]  # a default's factory
    if isinstance(a, list | tuple | collections.deque | np.ndarray):
        return len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(same, a, b))
    if isinstance(a, Settings | types.SimpleNamespace | argparse.Namespace):
        return same(vars(a), vars(b))
    return repr(a) == repr(b)  # also of numbers that are none, of a fold, of a minus before zero


def arguments(**found: Any) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(found)
    return made


PARIS, EAST = zoneinfo.ZoneInfo("Europe/Paris"), datetime.timezone(datetime.timedelta(hours=2))
SAMPLE: dict[Any, Any] = {
    "array": np.arange(6, dtype=np.float16).reshape(2, 3),
    "large": np.arange(5000),
    "text": np.array(["a", "é"]),
    "mixed": np.array([{"a": 1}, None], dtype=object),
    "structure": np.array([(1, 2.0, 3)], dtype=[("n", "<i4"), ("x", "<f8", (1,)), (("title", "t"), "M8[s]")]),
    "number": np.float32(0.1),
    "dtypes": [np.dtype("<f4"), torch.float16, torch.strided, torch.channels_last],
    "random": [np.random.get_state(), random.getstate()],
    "bytes": [b"\x00\xff", bytes(range(256)) * 40, bytearray(b"a")],
    "sets": [{1, "a", (2, 3)}, frozenset([Key("a")])],
    "when": [
        datetime.datetime(2024, 2, 29, 12, tzinfo=PARIS),
        datetime.datetime(2024, 10, 27, 2, 30, fold=1),
        datetime.time(1, 2, tzinfo=EAST),
        datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "name")),
        datetime.date(2024, 2, 29),
        datetime.timedelta(1, 2, 3),
    ],
    "paths": [Path("/data"), pathlib.PureWindowsPath("c:/x"), pathlib.PurePosixPath("y")],
    "namespaces": [arguments(lr=1e-3, betas=(0.9, 0.95), self=1), types.SimpleNamespace(a=[...])],
    "mappings": [
        collections.Counter("hello"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.defaultdict(None, a=1),
    ],
    "sequences": [collections.deque([1, 2], 4), collections.deque(), range(1, 9, 2), slice(1, None), ((), ((),))],
    "state": nn.Linear(2, 2).state_dict(),
    "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "trained": torch.ones(2, requires_grad=True),
    "computed": torch.ones(2, dtype=torch.float8_e4m3fn, requires_grad=True),
    "complex": [torch.tensor([1 + 2j], requires_grad=True), torch.tensor([1 + 2j]).conj(), complex(-0.0, math.inf)],
    "wide": torch.tensor([2**31], dtype=torch.uint32),
    "empty": [torch.zeros(0, 3), torch.zeros(())],
    "torch": [torch.Size([2, 3]), torch.device("cpu", 0)],
    "numbers": [True, None, 7**5000, -0.0, math.nan, -math.inf, decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
    3: {1: {2: "ints as keys"}, (1, None): "and tuples"},
    "classes": [Settings(0.5, [Settings(1.5)]), Point(1, {"a": 2}), Color.RED, Level.LOW | Level.HIGH],
    "uuid": uuid.UUID(int=5),
    "generators": [np.random.default_rng(1), np.random.RandomState(3)],
}


@pytest.mark.parametrize("xser", [False, True])
def test_in_the_files_of_parallel_layers(tmp_path: Path, xser: bool):
    save(SAMPLE, tmp_path, save_xser=xser)
    with torch.serialization.safe_globals(CLASSES):
        assert same(load(tmp_path, load_xser=xser), SAMPLE)


def test_in_a_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, "a", user_content=SAMPLE)
    save_checkpoint(tmp_path, "b", user_content=SAMPLE, async_save=True)
    wait_for_save()
    for tag in ("a", "b"):
        with torch.serialization.safe_globals(CLASSES):
            assert same(load_checkpoint(tmp_path, tag), SAMPLE)


@pytest.mark.parametrize("down_cast", [False, True])
def test_views_that_negate_are_stored_each_by_itself(down_cast: bool):
    """What they stand for is made to be stored, and nothing else may be taken for it once its memory is free again."""
    views = [torch.full((64,), complex(0, i)).conj().imag for i in range(8)]
    structure, tensors = pack(views, down_cast)
    assert [float(found[0]) for found in unpack(structure, tensors.__getitem__)] == [-i for i in range(8)]


def test_classes_come_back_where_they_are_allowed():
    """Their fields are set; nothing of them is called. Elsewhere they are namespaces, tuples and values."""
    value = {Key("a"): Settings(0.5, Point(1, Color.RED)), "level": Level.LOW}
    structure = pack(value)[0]
    MADE.clear()
    with torch.serialization.safe_globals(CLASSES):
        found = unpack(structure, torch.empty)
    assert same(found, value) and not MADE
    found = unpack(structure, torch.empty)
    (key, settings), (_, level) = found.items()
    assert type(key) is Record and key.name == "a" and key.class_name.endswith("test_values.Key")
    assert type(settings) is Record and settings.inner == (1, "red") and settings.inner._fields == ("x", "y")
    assert level == 1
    for read in (found, copy.deepcopy(found), {pickle.loads(pickle.dumps(key)): settings}):
        with torch.serialization.safe_globals(CLASSES):  # what was read and saved again is still the same
            again = unpack(pack(read)[0], torch.empty)
        assert next(iter(again)) == Key("a") and again[Key("a")].inner == Point(1, "red")


@pytest.mark.parametrize("name", ["antigravity.Fly", "subprocess.Popen", "os.system", f"{__name__}.Settings"])
def test_nothing_that_a_file_names_is_imported_or_run(tmp_path: Path, name: str):
    """Neither modules that are not there yet, nor what is loaded, whatever kind it is said to be."""
    MADE.clear()
    for kind in ("dataclass", "named_tuple"):
        found = unpack({kind: [name, [["args", f"touch {tmp_path}/run"]]]}, torch.empty)
        assert found.args == f"touch {tmp_path}/run"
    assert unpack({"enum": [name, f"touch {tmp_path}/run"]}, torch.empty) == f"touch {tmp_path}/run"
    assert "antigravity" not in sys.modules and not MADE and not list(tmp_path.iterdir())


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, 2, Thing()]}, "user_content['a'][3] is a {here}.Thing, which"),
        ({"f": len}, "user_content['f'] is a builtin_function_or_method"),
        (Settings(0.5, {"x": Thing}), "user_content.inner['x'] is a type"),
        (np.array([None, Thing()]), "user_content[1] is a {here}.Thing"),
        (collections.defaultdict(Thing), "user_content is a defaultdict with the factory a type"),
        (argparse.Namespace(a={Thing}), "user_content.a element is a type"),
        ({"t": torch.zeros(2, 2).to_sparse()}, "user_content['t'] is a torch.sparse_coo tensor"),
    ],
    ids=["in a list", "function", "in a dataclass", "array", "factory", "in a set", "sparse"],
)
def test_what_only_a_pickle_could_hold_is_named(tmp_path: Path, value: Any, message: str):
    said = message.format(here=__name__)
    with pytest.raises(CheckpointError, match="^" + re.escape(said)):
        save_checkpoint(tmp_path, "a", user_content=value)
    with pytest.raises(CheckpointError, match=re.escape(said.removeprefix("user_content"))):
        save({"value": value}, tmp_path / "b")


@pytest.mark.parametrize("kind", [dict, Settings])
def test_values_in_themselves_are_named(tmp_path: Path, kind: type):
    value: Any = Settings(0.5) if kind is Settings else {}
    inside, path = {"b": [value]}, ".inner" if kind is Settings else "['x']"
    if kind is Settings:
        value.inner = inside
    else:
        value["x"] = inside
    said = f"user_content['a'][1]{path}['b'][0] is user_content['a'][1] itself, which contains it"
    with pytest.raises(CheckpointError, match="^" + re.escape(said)):
        save_checkpoint(tmp_path, "a", user_content={"a": [[], value]})
    shared: list[Any] = [1]  # one that occurs several times is not within itself
    save_checkpoint(tmp_path, "a", user_content={"a": shared, "b": [shared, shared]})
    assert load_checkpoint(tmp_path) == {"a": [1], "b": [[1], [1]]}


def nested(depth: int, wrap: Any) -> Any:
    return wrap(nested(depth - 1, wrap)) if depth else 1


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: Settings(0.5, value)], ids=["list", "class"])
def test_what_is_nested_too_deeply_to_be_read_is_not_written(wrap: Any):
    """Its path is named, shortened; what is not refused can be read."""
    structure, tensors = pack(nested(100, wrap))
    with torch.serialization.safe_globals(CLASSES):
        assert same(unpack(json.loads(json.dumps(structure)), tensors.__getitem__), nested(100, wrap))
    said = r"^user_content[\[.].{20,150} is nested too deeply, in more than 100 other values: flatten them$"
    for depth in (101, 400):
        with pytest.raises(CheckpointError, match=said):
            pack(nested(depth, wrap), what="user_content")

    def deeper(calls: int) -> Any:
        return deeper(calls - 1) if calls else pack(nested(90, wrap), what="user_content")

    with pytest.raises(CheckpointError, match=r"user_content[\[.].* is nested too deeply"):
        deeper(sys.getrecursionlimit() - 200)  # the caller is deep in calls itself


def test_what_was_written_before_is_read():
    """The kinds that there were, as they were written."""
    tensors = [torch.arange(3), torch.ones(2, dtype=torch.complex64)]
    structure = {
        "dict": [
            ["list", {"list": [1, 2.5, "é", None, True, {"float": "-inf"}]}],
            [3, {"tuple": [{"tensor": 0}, {"tensor": 1}, {"tensor": 0}]}],
            ["size", {"size": [2, 3]}],
            ["counter", {"counter": [[30, 2]]}],
            ["dtype", {"dtype": "bfloat16"}],
        ]
    }
    found = unpack(structure, lambda number: tensors[number])
    assert found["list"] == [1, 2.5, "é", None, True, -math.inf]
    assert found[3][0] is tensors[0] and found[3][1] is tensors[1] and found[3][2] is found[3][0]
    assert same(found["size"], torch.Size([2, 3])) and same(found["counter"], collections.Counter({30: 2}))
    assert found["dtype"] == torch.bfloat16


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
        {"named_tuple": ["a.b", [["import os", 1]]]},
        {"fraction": ["1e9"]},
        {"deque": [None, {"range": [0, 9, 1]}]},
        {"zone": ["../../etc/passwd"]},
        {"set": [{"list": []}]},
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


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_keys_with_one_hash_are_refused(kind: str):
    """Each is compared with all before it: a second for 16,000."""
    keys = [number * sys.hash_info.modulus for number in range(MOST_ALIKE + 1)]
    structure = keys if kind == "set" else [[key, 1] for key in keys]
    with pytest.raises(CheckpointError, match="have the same hash"):
        unpack({kind: structure}, torch.zeros)
    assert len(unpack({kind: structure[:-1]}, torch.zeros)) == MOST_ALIKE


def test_whatever_a_structure_asks_too_much_of_is_told():
    def too_much(number: int) -> torch.Tensor:
        raise MemoryError

    with pytest.raises(CheckpointError, match="structure of the checkpoint is damaged"):
        unpack({"tensor": 0}, too_much)
