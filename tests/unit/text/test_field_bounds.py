"""What a body may hold is asked where it is parsed, whatever its size, and nothing of what is refused goes further."""

from __future__ import annotations

import json

import pytest

from nxd_server.errors import BodyError, RequestError, TextTooLongError
from nxd_server.text.field_bounds import MOST_ELEMENTS, MOST_IDS, body_bounds
from nxd_server.text.strict_json import parse_json

TOO_MUCH = [
    ({"prompt": [[5], [5] * 65_537]}, "prompt", "a list of 65537 numbers; at most 65536"),
    ({"prompt": [[5]] * 1025}, "prompt", "1025 values; at most 1024"),
    ({"prompt": ["a", "a" * 1001]}, "prompt", "1001 characters"),
    ({"messages": [{}] * 4097}, "messages", "4097 values; at most 4096"),
    ({"messages": [{"content": ["a"] * 33_000}]}, "messages", "at most 32768"),
    ({"messages": [{"content": "a" * 600}, {"content": [{"text": "a" * 401}]}]}, "messages", "1001 characters"),
    ({"stop": [["a"] * 600, ["a"] * 600]}, "stop", "at most 1024"),
    ({"chat_template_kwargs": {"a": [[[1] * 3000], {"b": [1] * 3000}]}}, "chat_template_kwargs", "at most 4096"),
    ({"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, "logit_bias", "4097 values; at most 4096"),
    ({"stream_options": dict.fromkeys(map(str, range(65)), 1)}, "stream_options", "65 values; at most 64"),
    ({"n" * 200: [[1] * 5000] * 2}, "n" * 100, "at most 8192"),
]
BOUNDS = body_bounds("generate", 64, 64, 1000)


@pytest.mark.parametrize(("body", "field", "says"), TOO_MUCH)
def test_a_field_that_holds_more_is_named(body, field, says):
    with pytest.raises(RequestError, match=says) as caught:
        parse_json(json.dumps({"model": "m", **body}).encode(), BOUNDS)
    assert caught.value.field == field
    long = "characters" in says or "65537" in says
    assert isinstance(caught.value, TextTooLongError) == long


@pytest.mark.parametrize("name", ["outputs", "tokens", "user"])
def test_where_tensors_are_taken_nothing_else_is_as_large(name):
    """400,000 names of outputs were looked at one by one, in the event loop."""
    body = {"inputs": {"x": [0.5] * 90_000}, name: [0.5] * 70_000}
    with pytest.raises(RequestError, match=f"at most {MOST_IDS if name == 'tokens' else ''}") as caught:
        parse_json(json.dumps(body).encode(), body_bounds("", 0, 64, None))
    assert caught.value.field == name


def test_as_much_as_is_taken():
    for body in (
        {"prompt": [5] * 65_536},
        {"prompt": [[5] * 60] * 1024},
        {"prompt": ["a" * 1000] * 1024},
        {"messages": [{"content": "a" * 500}] * 2, "chat_template_kwargs": {"a": "a" * 1000}},
        {"messages": [{"role": "", "content": ""}] * 4096},
        {"stop": ["a"] * 1024, "chat_template_kwargs": {"a": [1] * 4095}, "user": [1] * 8192},
        {"prompt": None, "stop": [], "messages": {}, "n": 10**30},
    ):
        assert parse_json(json.dumps(body).encode(), BOUNDS) == body


def test_the_values_of_a_body_follow_from_the_models_length():
    assert [body_bounds("generate", length, 64, None).values for length in (64, 4096, 10**6)] == [
        2**16 + 2**14, 64 * 4096 + 2**14, MOST_ELEMENTS
    ]  # fmt: skip
    assert body_bounds("generate", 10**6, 64, None).ids == 10**6 > MOST_IDS
    with pytest.raises(BodyError, match=f"more than {BOUNDS.values} values"):
        parse_json(json.dumps({"prompt": [[5] * 50_000] * 2}).encode(), BOUNDS)
    tensors = {"inputs": {"x": [[0.5] * 100_000]}, "safetensors": "a" * 2**21}
    assert parse_json(json.dumps(tensors).encode(), body_bounds("embed", 0, 64, 1000)) == tensors
