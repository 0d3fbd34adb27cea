"""Bodies are counted before they are parsed, exactly, wherever a window ends; what is counted never disagrees."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_server.errors import BodyError
from nxd_server.text import strict_json
from nxd_server.text.strict_json import MOST_CONTAINERS, MOST_ELEMENTS, MOST_KEYS, Outline, parse_json

texts = st.text(alphabet='ab"\\,:[]{}\n\u4e2d', max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def counted(value) -> tuple[int, int, int]:
    """Commas, containers and keys of a value."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    commas, containers, keys = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return commas + max(0, len(value) - 1), containers + 1, keys + (len(value) if isinstance(value, dict) else 0)


@settings(max_examples=60)
@given(value=st.dictionaries(texts, values, max_size=4), window=st.integers(2, 9), ascii=st.booleans())
def test_what_is_counted_is_what_is_there(value, window, ascii):
    data = json.dumps(value, ensure_ascii=ascii).encode()
    whole = strict_json.WINDOW
    strict_json.WINDOW = window
    try:
        outline = Outline(data)
        assert parse_json(data) == value
    finally:
        strict_json.WINDOW = whole
    assert (outline.elements, outline.containers, outline.keys) == counted(value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": {}, "a": {}}',
        b'{"a": 1, "\\u0061": 1}',
        b'{"a": "{\\"a\\":1,\\"a\\":2}", "b": {"x": 1, "x": ":"}}',
    ],
)
def test_a_key_that_comes_twice_is_refused(data):
    with pytest.raises(BodyError, match="twice in one object") as caught:
        parse_json(data)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"a": [' + b"1," * MOST_ELEMENTS + b"1]}", "values"),
        (b'{"a": [' + b"[1]," * MOST_CONTAINERS + b"1]}", "lists and objects"),
        (b'{"a": {' + b'"k":1,' * MOST_KEYS + b'"k":1}}', "keys"),
        (b'{"a": [' + b"1" * 4000 + (b"," + b"1" * 4000) * 2000 + b"]}", "digits"),
        (b'{"a": ' + b"1" * 2**20 + b"}", "digits"),
    ],
    ids=["numbers", "lists", "keys", "long numbers", "one long number"],
)
def test_what_would_take_long_is_not_parsed(data, what, monkeypatch):
    monkeypatch.setattr(strict_json, "from_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(BodyError, match=f"{what}.*are not read"):
        parse_json(data)


def test_the_largest_that_are_parsed():
    assert len(parse_json(b'{"a": [' + b"1," * (MOST_ELEMENTS - 3) + b"1]}")["a"]) == MOST_ELEMENTS - 2
    text = '\\"[{,:' * 100_000  # none of it outside of the string
    assert len(parse_json(b'{"a": "' + text.encode() + b'"}')["a"]) == 500_000
    spaces = b'{"a":' + b" \n" * 2**20 + b"1}"
    assert parse_json(spaces) == {"a": 1}
