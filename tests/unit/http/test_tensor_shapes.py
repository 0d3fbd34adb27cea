"""What /v1/predict is sent for tensors: shapes that none has, which were a 500 whichever library they came out of, and
more of them than any model takes."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from nxd_server.errors import QueueFullError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.predict import PredictBody, predict, unpack
from nxd_server.http.tensors import tensor_from_json, tensors_from_safetensors
from nxd_server.settings import ServerSettings
from nxd_server.threads import ConcurrencyLimit

SHAPES = [[549755813888, 549755813888, 0], [0, 2**63], [0, 2**62], [2**64, 0], [0] * 100, [2**31, 2**31, 0], [-1, 0]]


def packed(header: bytes, data: bytes = b"") -> str:
    return base64.b64encode(struct.pack("<Q", len(header)) + header + data).decode()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_no_tensor_are_400(shape):
    with pytest.raises(ApiError) as caught:
        tensor_from_json({"data": [], "shape": shape, "dtype": "float32"}, None, "inputs.x")
    assert (caught.value.status, (caught.value.body()["error"]["param"])) == (400, "inputs.x.shape")
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    with pytest.raises(ApiError) as caught:
        tensors_from_safetensors(packed(header), "safetensors")
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


EMPTY = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}


def test_what_is_no_file_of_the_models_inputs_is_400():
    few = json.dumps({"0": EMPTY}).encode()
    with pytest.raises(ApiError, match=r"`safetensors.0`: there is no such input; this model takes x"):
        unpack(packed(few), {"x": None})
    for header in (b"", b"x", b"[1]", b'{"x":', b"[" * 9999, b"\xff"):
        with pytest.raises(ApiError, match="`safetensors` is not a safetensors file"):
            unpack(packed(header), {"x": None})
    for text in ("eHh4eA==eHh4", "eHh4" * 300_000 + "e", "é" * 8):
        with pytest.raises(ApiError, match="`safetensors` is not base64"):
            unpack(text, {"x": None})


@pytest.mark.parametrize("body", [{"inputs": {"x": [1]}}, {"safetensors": packed(b"{}")}], ids=list)
def test_what_waits_to_be_made_tensors_has_a_limit(body):
    """Threads that nothing limits held the bodies of all requests, those of clients that had left too."""

    async def main():
        gate, lane = threading.Event(), ConcurrencyLimit("tensors", 1, 0)
        busy = asyncio.create_task(lane.run(lambda: gate.wait(120)))
        await asyncio.sleep(0)
        service = SimpleNamespace(model_name="m", task="", require_ready=lambda: None, input_specs=dict)
        context = SimpleNamespace(service=service, settings=ServerSettings(), tensors=lane)
        scope = {"type": "http", "headers": [], "app": SimpleNamespace(state=SimpleNamespace(context=context))}
        try:
            await predict(Request(scope, asyncio.Event().wait), PredictBody.parse(body))  # pyright: ignore
        finally:
            gate.set()
            await busy

    with pytest.raises(QueueFullError, match="1 tensors"):
        asyncio.run(main())
