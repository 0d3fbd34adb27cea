"""Bodies are JSON objects and nothing else, and none takes long to parse."""

from __future__ import annotations

import pytest

from nxd_server.errors import BodyError
from nxd_server.text.strict_json import MOST_CONTAINERS, parse_json


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b" ", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"a": 1} x', "invalid_json"),
        (b'{"a": "\x01"}', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "invalid_json"),
        (b'{"a": ' + b"1" * 2**20 + b"}", "invalid_json"),
        (b'{"a": [' + b"[]," * MOST_CONTAINERS + b"1]}", "body_too_complex"),
    ],
    ids=[
        "empty",
        "a list",
        "more",
        "a control character",
        "NaN",
        "no UTF-8",
        "a lone surrogate",
        "deep",
        "one long number",
        "very many lists",
    ],
)
def test_what_is_refused(data, code):
    with pytest.raises(BodyError) as caught:
        parse_json(data)
    assert caught.value.code == code


def test_large_ones_are_taken():
    assert len(parse_json(b'{"a": [' + b"1," * 2**20 + b"1]}")["a"]) == 2**20 + 1
    assert parse_json(b'{"a": [' + b"[]," * (MOST_CONTAINERS - 10) + b"1]}")
