"""Bodies of requests: JSON from strangers, the fields of every route, and tensors."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

from nxd_server.errors import RequestError
from nxd_server.http.admin import AdapterBody, WeightsBody
from nxd_server.http.error_responses import ApiError
from nxd_server.http.openai.chat import check_messages
from nxd_server.http.openai.schemas import (
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingBody,
    texts_or_pairs,
    token_lists,
)
from nxd_server.http.openai.tools import offered_tools, requested_form
from nxd_server.http.predict import PredictBody, read_tensors, unpack
from nxd_server.http.request_body import parse_json
from nxd_server.http.tensors import tensor_from_json, tensor_to_json
from nxd_server.http.tokenize import DetokenizeBody, TokenizeBody
from nxd_server.text.conversation import normalise_messages
from tests.fuzz.target import Target

BODIES = (
    AdapterBody, ChatBody, ClassifyBody, CompletionBody, DetokenizeBody, EmbeddingBody, PredictBody, TokenizeBody,
    WeightsBody,
)  # fmt: skip
REFUSALS = (ApiError, RequestError)


def body(place: Path) -> Target:
    """A body as JSON, then as that of every route; JSON that was accepted is what Python's parser reads, too."""

    def read(data: bytes) -> None:
        value = parse_json(data)
        assert value == json.loads(data)
        refused: Exception | None = None
        for kind in BODIES:
            try:
                _use(kind.parse(value))
            except REFUSALS as error:
                refused = error
            else:
                return
        assert refused is not None
        raise refused

    return Target("body", read, REFUSALS)


def _use(found: Any) -> None:
    """What a route does with its body before it asks the engine."""
    if isinstance(found, CompletionBody):
        token_lists(found.prompt, "prompt")
    if isinstance(found, ChatBody):
        normalise_messages(check_messages(found.messages, "mistral"))
        offered_tools(found.tools, found.tool_choice, "mistral")
    if isinstance(found, (CompletionBody, ChatBody)):
        found.check_stream_options()
        requested_form(found)
        found.sampling(found.max_tokens, None, {})
    if isinstance(found, EmbeddingBody):
        token_lists(found.input, "input")
    if isinstance(found, ClassifyBody):
        texts_or_pairs(found.input, "input")


SPECS = {name: SimpleNamespace(torch_dtype=None, default=0) for name in ("x", "n", "m", "none", "s")}
SPECS["ids"] = SimpleNamespace(torch_dtype=torch.int64, default=0)


def predict(place: Path) -> Target:
    """Tensors of ``/v1/predict`` in both forms; what was accepted is the same tensor when it is written again."""
    file = base64.b64encode(save({"x": torch.ones(2, 3), "n": torch.zeros(0, dtype=torch.int64)})).decode()
    made = json.dumps({"safetensors": file}).encode()

    def read(data: bytes) -> None:
        found = PredictBody.parse(parse_json(data))
        tensors = read_tensors(found.inputs or {}, SPECS)
        if found.safetensors is not None:
            tensors |= unpack(found.safetensors, SPECS)
        for tensor in tensors.values():
            if tensor.numel() and torch.isfinite(tensor.double() if not tensor.is_complex() else tensor.abs()).all():
                written = json.loads(json.dumps(tensor_to_json(tensor)))
                if written["dtype"] in ("int64", "float32", "bool", "float64"):
                    assert torch.equal(tensor_from_json(written, None, "x"), tensor)

    return Target("predict", read, REFUSALS, [made])
