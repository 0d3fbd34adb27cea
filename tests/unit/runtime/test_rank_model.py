"""What RankModel knows of arrays, of types and of torch's version in torch's place."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import numpy as np
import pytest
import torch

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from nxd_infer.errors import InputMismatchError, InputRangeError, ModelClosedError
from nxd_infer.runtime.ipc import InputBlock
from nxd_infer.runtime.rank_model import takes_arrays
from nxd_infer.runtime.ranks import CallLock
from nxd_infer.util.dtypes import ITEM_BYTES, LARGEST_FLOAT, SAFETENSORS_DTYPES
from nxd_infer.util.machine import torch_version


def test_arrays_that_do_not_fit_are_refused():
    bucket = BucketSpec(
        name="b",
        inputs=[
            InputSpec.of("ids", torch.zeros(2, 3, dtype=torch.int64), minimum=0, maximum=9),
            InputSpec.of("mask", torch.zeros(2, 3), default=1.0),
        ],
        outputs=[],
        graphs=["g"],
    )
    ids = np.zeros((2, 3), np.int64)
    InputBlock.of(bucket, {"ids": ids}).check()
    InputBlock.of(bucket, {"ids": ids, "mask": np.ones((2, 3), np.float32)}).check()
    assert (InputBlock.of(bucket, {"ids": ids, "mask": None})["mask"] == 1.0).all()
    for inputs, words in (
        ({}, "input 'ids' is missing and has no default"),
        ({"ids": ids, "more": ids}, "there is no input 'more'"),
        ({"ids": ids.tolist()}, "'ids' is a list, expected a numpy.ndarray"),
        ({"ids": torch.from_numpy(ids)}, "'ids' is a Tensor, expected a numpy.ndarray"),
        ({"ids": ids[:1]}, r"'ids' is int64\[1, 3\], bucket 'b' takes int64\[2, 3\]"),
        ({"ids": ids.astype(np.int32)}, r"'ids' is int32\[2, 3\], bucket 'b' takes int64"),
    ):
        with pytest.raises(InputMismatchError, match=words):
            InputBlock.of(bucket, inputs)
    for value in (-1, 10):
        with pytest.raises(InputRangeError, match=f"holds the value {value}; it must be 0 to 9"):
            InputBlock.of(bucket, {"ids": np.where(np.eye(2, 3) > 0, value, ids)}).check()


def test_arrays_need_types_that_numpy_has():
    for dtype, taken in ((torch.float32, True), (torch.bfloat16, False)):
        bucket = BucketSpec(name="b", inputs=[], outputs=[OutputSpec.of("y", torch.zeros(1, dtype=dtype))], graphs=[])
        assert takes_arrays(Manifest(backend="eager", tp_degree=1, buckets=[bucket], graphs={})) == taken


def test_types_are_known_as_torch_knows_them():
    for name, size in ITEM_BYTES.items():
        dtype = getattr(torch, name)
        assert dtype.itemsize == size
        if dtype.is_floating_point:
            assert LARGEST_FLOAT[name] == torch.finfo(dtype).max == -torch.finfo(dtype).min
        elif dtype != torch.bool:
            spec = {"name": "x", "dtype": name, "shape": [1], "stride": [1]}
            info = torch.iinfo(dtype)
            for value in (info.min, info.max):
                InputSpec(**spec, default=None, minimum=value, maximum=value)
            with pytest.raises(ValueError, match=f"which holds {info.min} to {info.max}"):
                InputSpec(**spec, minimum=info.max + 1)
    assert LARGEST_FLOAT.keys() == {name for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in SAFETENSORS_DTYPES.values())


def test_the_version_of_torch_is_known_while_another_thread_imports_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert torch_version() == torch.__version__


def test_a_turn_within_a_turn_is_refused_and_another_thread_waits():
    turns, order = CallLock(), []

    def other():
        with turns.take():
            order.append("other")

    with turns.take():
        with pytest.raises(ModelClosedError, match="in the middle of one of its calls"):
            turns.take()
        thread = threading.Thread(target=other)
        thread.start()
        order.append("first")
    thread.join(120)
    assert order == ["first", "other"]
