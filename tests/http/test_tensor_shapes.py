"""Shapes that no tensor has: each was a 500 from /v1/predict, whichever library it came out of."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from nxd_server.http.errors import ApiError
from nxd_server.http.tensors import tensor_from_json, tensors_from_safetensors

SHAPES = [[549755813888, 549755813888, 0], [0, 2**63], [0, 2**62], [2**64, 0], [0] * 100, [2**31, 2**31, 0], [-1, 0]]


@pytest.mark.check
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_no_tensor_are_400(shape):
    with pytest.raises(ApiError) as caught:
        tensor_from_json({"data": [], "shape": shape, "dtype": "float32"}, None, "inputs.x")
    assert (caught.value.status, (caught.value.body()["error"]["param"])) == (400, "inputs.x.shape")
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    packed = base64.b64encode(struct.pack("<Q", len(header)) + header).decode()
    with pytest.raises(ApiError) as caught:
        tensors_from_safetensors(packed, "safetensors")
    assert caught.value.status == 400 and "Traceback" not in caught.value.message


def test_lists_nested_deeper_than_any_tensor_are_400():
    """torch made a tensor of them and failed in what it did with it next."""
    value = 1
    for _ in range(70):
        value = [value]
    for given in (value, {"data": value}):
        with pytest.raises(ApiError) as caught:
            tensor_from_json(given, None, "inputs.x")
        assert caught.value.status == 400


def test_an_empty_tensor_is_one():
    assert list(tensor_from_json({"data": [], "shape": [3, 0]}, None, "x").shape) == [3, 0]
