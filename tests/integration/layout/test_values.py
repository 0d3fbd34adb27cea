"""What one would give to torch.save goes into a checkpoint and comes back, and nothing that a file names is run."""

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
import subprocess
import sys
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.unpack import unpack
from nxd_infer.layout.files.values import Record, pack
from nxd_infer.parallel_layers.checkpointing import load, save


@dataclasses.dataclass
class Settings:
    rate: float
    inner: Any = None

    def __post_init__(self) -> None:
        self.made = True
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


def through(value: Any) -> Any:
    """``value``, packed, written as JSON, read and unpacked."""
    structure, tensors = pack(value)
    return unpack(json.loads(json.dumps(structure)), lambda number: tensors[number].clone())


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flat = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad) and torch.equal(*flat)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and all(map(same, a.ravel(), b.ravel()))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, collections.Counter | set | frozenset):
        return a == b
    if isinstance(a, dict):
        factories = getattr(a, "default_factory", None), getattr(b, "default_factory", None)
        return factories[0] is factories[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, types.SimpleNamespace | argparse.Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, float):
        return math.isnan(b) if math.isnan(a) else a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, decimal.Decimal):
        return str(a) == str(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, datetime.datetime | datetime.time):
        return (a, a.fold, a.tzinfo) == (b, b.fold, b.tzinfo)
    return a == b


ZONES = st.sampled_from([None, datetime.UTC, zoneinfo.ZoneInfo("UTC"), datetime.timezone(datetime.timedelta(hours=2))])
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=40),
    st.dates(),
    st.timedeltas(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Path("/a/b"), pathlib.PureWindowsPath("c:/x"), pathlib.PurePosixPath("y"), ..., Color.RED]),
    st.sampled_from([torch.float16, torch.strided, torch.channels_last, torch.device("cpu", 0), torch.Size([2, 3])]),
    st.builds(Key, st.text()),
    st.builds(Level, st.integers(0, 3)),
)
ARRAYS = npst.arrays(
    st.one_of(
        npst.scalar_dtypes(),
        npst.array_dtypes(npst.scalar_dtypes(), max_size=2, allow_subarrays=True),
    ),
    npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
TENSORS = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=torch.uint8).to(dtype) if dtype.itemsize else torch.empty(0),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint32]
    ),
    st.lists(st.integers(0, 3), max_size=3),
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    st.decimals(),
    st.binary(min_size=5000, max_size=5010),
    st.builds(bytearray, st.binary(max_size=9)),
    st.builds(range, st.integers(0, 9), st.integers(0, 9)),
    st.builds(slice, st.integers(0, 9), st.none()),
    ARRAYS,
    npst.from_dtype(np.dtype("float32")),
    npst.from_dtype(np.dtype("M8[s]")),
    TENSORS,
)


def arguments(found: dict[str, Any]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(found)
    return made


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    pairs = st.dictionaries(HASHABLE, inner, max_size=3)
    names = st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        pairs,
        pairs.map(collections.OrderedDict),
        pairs.map(lambda found: collections.defaultdict(list, found)),
        st.lists(inner, max_size=3).map(lambda found: collections.deque(found, maxlen=4)),
        names.map(lambda found: types.SimpleNamespace(**found)),
        names.map(arguments),
        st.builds(Settings, st.floats(), inner),
        st.builds(Point, st.integers(), inner),
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_every_value_comes_back(value: Any):
    with torch.serialization.safe_globals(CLASSES):
        assert same(through(value), value)


SAMPLE: dict[Any, Any] = {
    "array": np.arange(6, dtype=np.float16).reshape(2, 3),
    "large": np.arange(5000),
    "text": np.array(["a", "é"]),
    "mixed": np.array([{"a": 1}, None], dtype=object),
    "structure": np.array([(1, 2.0)], dtype=[("n", "<i4"), ("x", "<f8", (1,))]),
    "number": np.float32(0.1),
    "dtype": np.dtype("<f4"),
    "random": np.random.get_state(),
    "python": random.getstate(),
    "bytes": b"\x00\xff",
    "many": bytes(range(256)) * 40,
    "set": {1, "a", (2, 3)},
    "when": datetime.datetime(2024, 2, 29, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    "path": Path("/data"),
    "arguments": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95)),
    "counts": collections.Counter("hello"),
    "state": nn.Linear(2, 2).state_dict(),
    "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "trained": torch.ones(2, requires_grad=True),
    "computed": torch.ones(2, dtype=torch.float8_e4m3fn, requires_grad=True),
    "complex": torch.tensor([1 + 2j], requires_grad=True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "wide": torch.tensor([2**31], dtype=torch.uint32),
    "huge": 7**5000,
    3: {1: {2: "ints as keys"}},
    "settings": Settings(0.5, [Settings(1.5)]),
    "uuid": uuid.UUID(int=5),
    "fraction": fractions.Fraction(1, 3),
    "decimal": decimal.Decimal("1.10"),
}


@pytest.mark.parametrize("xser", [False, True])
def test_in_the_files_of_parallel_layers(tmp_path: Path, xser: bool):
    save(SAMPLE, tmp_path, save_xser=xser)
    with torch.serialization.safe_globals(CLASSES):
        assert same(load(tmp_path, load_xser=xser), SAMPLE)


@pytest.mark.parametrize("async_save", [False, True])
def test_in_a_checkpoint(tmp_path: Path, async_save: bool):
    save_checkpoint(tmp_path, "a", user_content=SAMPLE, async_save=async_save)
    with torch.serialization.safe_globals(CLASSES):
        assert same(load_checkpoint(tmp_path, "a"), SAMPLE)


@pytest.mark.parametrize("down_cast", [False, True])
def test_views_that_negate_are_stored_each_by_itself(down_cast: bool):
    """What they stand for is made to be stored, and nothing else may be taken for it once its memory is free again."""
    views = [torch.full((64,), complex(0, i)).conj().imag for i in range(8)]
    structure, tensors = pack(views, down_cast)
    assert [float(found[0]) for found in unpack(structure, tensors.__getitem__)] == [-i for i in range(8)]


def test_generators_go_on():
    generators = np.random.default_rng(1), np.random.Generator(np.random.Philox(2)), np.random.RandomState(3)
    found = through(generators)
    assert [one.random() for one in found[:2]] == [one.random() for one in generators[:2]]
    assert found[2].random_sample() == generators[2].random_sample()


# --- classes ----------------------------------------------------------------------------------------------


def test_classes_come_back_where_they_are_allowed():
    """Their fields are set; nothing of them is called. Elsewhere they are namespaces, tuples and values."""
    value = {Key("a"): Settings(0.5, Point(1, Color.RED)), "level": Level.LOW}
    structure = pack(value)[0]
    MADE.clear()
    with torch.serialization.safe_globals(CLASSES):
        found = unpack(structure, torch.empty)
    assert same(found, value) and not MADE
    found = unpack(structure, torch.empty)
    (key, settings_), (_, level) = found.items()
    assert type(key) is Record and key.name == "a" and key.class_name.endswith("test_values.Key")
    assert type(settings_) is Record and settings_.inner == (1, "red") and settings_.inner._fields == ("x", "y")
    assert level == 1
    for read in (found, copy.deepcopy(found), {pickle.loads(pickle.dumps(key)): settings_}):
        with torch.serialization.safe_globals(CLASSES):  # what was read and saved again is still the same
            again = unpack(pack(read)[0], torch.empty)
        assert next(iter(again)) == Key("a") and again[Key("a")].inner == Point(1, "red")


def test_nothing_that_a_file_names_is_imported_or_run(tmp_path: Path):
    """Neither modules that are not there yet, nor what is loaded, whatever kind it is said to be."""
    names = ("antigravity.Fly", "subprocess.Popen", "os.system", f"{__name__}.Settings", "builtins.eval")
    script = f"""
import sys
import torch
from nxd_infer.layout.files.unpack import unpack
for name in {names!r}:
    for kind in ("dataclass", "named_tuple"):
        print(unpack({{kind: [name, [["args", "touch {tmp_path}/run"]]]}}, torch.empty))
    print(unpack({{"enum": [name, "touch {tmp_path}/run"]}}, torch.empty))
print("antigravity" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False" and "Record(args='touch" in done.stdout
    assert not list(tmp_path.iterdir())


# --- what only a pickle could hold --------------------------------------------------------------------------


class Thing:
    def __repr__(self) -> str:  # in the names of tests, which must be the same in every process
        return "Thing()"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, 2, Thing()]}, "user_content['a'][3] is a {here}.Thing, which"),
        ({"f": len}, "user_content['f'] is a builtin_function_or_method"),
        ((Thing,), "user_content[0] is a type"),
        ({"kind": int}, "user_content['kind'] is a type"),
        (Settings(0.5, {"x": Thing()}), "user_content.inner['x'] is a {here}.Thing"),
        (np.array([None, Thing()]), "user_content[1] is a {here}.Thing"),
        (collections.defaultdict(Thing), "user_content is a defaultdict with the factory a type"),
        (argparse.Namespace(a={Thing}), "user_content.a element is a type"),
        ({"t": torch.zeros(2, 2).to_sparse()}, "user_content['t'] is a torch.sparse_coo tensor"),
        (nn.Linear(2, 2), "user_content is a torch.nn.modules.linear.Linear"),
    ],
    ids=str,
)
def test_what_only_a_pickle_could_hold_is_named(tmp_path: Path, value: Any, message: str):
    with pytest.raises(CheckpointError, match="^" + re.escape(message.format(here=__name__))):
        save_checkpoint(tmp_path, "a", user_content=value)
    with pytest.raises(CheckpointError, match=re.escape(message.format(here=__name__)[len("user_content") :])):
        save({"value": value}, tmp_path / "b")


@pytest.mark.parametrize("kind", [list, dict, collections.deque, argparse.Namespace, Settings])
def test_values_in_themselves_are_named(tmp_path: Path, kind: type):
    value: Any = Settings(0.5) if kind is Settings else kind()
    inside, path = {"b": [value]}, {"list": "[0]", "deque": "[0]", "dict": "['x']"}.get(kind.__name__, ".inner")
    if isinstance(value, list | collections.deque):
        value.append(inside)
    elif isinstance(value, dict):
        value["x"] = inside
    else:
        value.inner = inside
    said = f"user_content['a'][1]{path}['b'][0] is user_content['a'][1] itself, which contains it"
    with pytest.raises(CheckpointError, match="^" + re.escape(said)):
        save_checkpoint(tmp_path, "a", user_content={"a": [[], value]})


def nested(depth: int, wrap: Any) -> Any:
    return wrap(nested(depth - 1, wrap)) if depth else 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: [value],
        lambda value: {"a": value},
        lambda value: types.SimpleNamespace(a=value),
        lambda value: Point(1, value),
        lambda value: Settings(0.5, value),
        lambda value: np.array([None, value], dtype=object)[:2],
        lambda value: collections.deque([value]),
    ],
)
def test_what_is_nested_too_deeply_to_be_read_is_not_written(wrap: Any):
    """Its path is named, shortened; what is not refused can be read."""
    for depth in (1, 50, 100, 101, 300, 400):
        value = nested(depth, wrap)
        try:
            structure, tensors = pack(value, what="user_content")
        except CheckpointError as error:
            said = r"^user_content[\[.].{20,150} is nested too deeply, in more than 100 other values: flatten them$"
            assert re.match(said, str(error)) and depth > 45
        else:
            with torch.serialization.safe_globals(CLASSES):
                found = unpack(json.loads(json.dumps(structure)), tensors.__getitem__)
            assert same(found, value) and depth <= 100


def test_values_that_occur_several_times_are_not_within_themselves():
    shared: list[Any] = [1]
    value = {"a": shared, "b": [shared, shared, {"c": shared}], "t": ((), ((),))}
    assert same(through(value), value)


def test_deep_calls_leave_room_or_are_told():
    def deeper(calls: int) -> Any:
        return deeper(calls - 1) if calls else pack(nested(90, lambda value: [value]), what="user_content")

    with pytest.raises(CheckpointError, match=r"user_content\[0\].* is nested too deeply"):
        deeper(sys.getrecursionlimit() - 200)


# --- files of earlier releases ------------------------------------------------------------------------------


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
            ["numpy", {"tuple": ["MT19937", {"list": [1, 2]}, 624, 0, 0.0]}],
        ]
    }
    found = unpack(structure, lambda number: tensors[number])
    assert found["list"] == [1, 2.5, "é", None, True, -math.inf]
    assert found[3][0] is tensors[0] and found[3][1] is tensors[1] and found[3][2] is found[3][0]
    assert same(found["size"], torch.Size([2, 3])) and same(found["counter"], collections.Counter({30: 2}))
    assert found["dtype"] == torch.bfloat16 and found["numpy"] == ("MT19937", [1, 2], 624, 0, 0.0)
