"""The file of keys: what a line may say, and what is said of one that is wrong."""

from __future__ import annotations

import hashlib
import json

import pytest

from nxd_server.api_keys import ApiKey, read_keys
from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings

SHA = hashlib.sha256(b"secret").hexdigest()


def read(tmp_path, text, **settings):
    (tmp_path / "keys").write_text(text)
    return read_keys(ServerSettings(api_keys_file=tmp_path / "keys", **settings))


def test_a_line_is_a_key_or_says_more_of_one(tmp_path):
    limits = {"requests_per_minute": 60, "tokens_per_minute": 1000, "concurrent_requests": 2}
    line = json.dumps({"name": "alice", "sha256": SHA, "scopes": ["use", "metrics"], **limits})
    keys = read(tmp_path, f"plain \n\n{line}\n", api_keys=["ü", "ü"], admin_key="root")
    assert keys == [
        ApiKey("key-1", hashlib.sha256("ü".encode()).hexdigest()),
        ApiKey("line-1", hashlib.sha256(b"plain").hexdigest()),
        ApiKey("alice", SHA, ["use", "metrics"], **limits),
        ApiKey("admin", hashlib.sha256(b"root").hexdigest(), ["admin"]),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"name": "secret"', "line 2: is not a JSON object"),
        ({"name": "a"}, "line 2: `sha256` is missing"),
        ({"sha256": SHA}, "line 2: `name` is missing"),
        (
            {"name": "a", "sha256": "secret"},
            "line 2: sha256 must be a SHA-256 in 64 hexadecimal digits, in lower case$",
        ),
        ({"name": "a", "sha256": ["secret"]}, "line 2: sha256 must be a text$"),
        ({"name": "a b", "sha256": SHA}, "line 2: name must be 1 to 64 letters"),
        ({"name": "a", "sha256": SHA, "scope": ["use"]}, "line 2: a key has no field 'scope'; did you mean scopes"),
        ({"name": "a", "sha256": SHA, "scopes": ["root"]}, r"line 2: scopes must be .*use.* got \['root'\]"),
        ({"name": "a", "sha256": SHA, "requests_per_minute": 0}, "requests_per_minute must be .* at least 1, .*got 0"),
        ({"name": "first", "sha256": SHA}, "two keys have the same name or SHA-256: 'first' and 'first'"),
        ({"name": "a", "sha256": "00" * 32}, "two keys have the same name or SHA-256: 'first' and 'a'"),
    ],
)
def test_a_faulty_line_is_named_and_no_key_is_shown(tmp_path, line, words):
    first = json.dumps({"name": "first", "sha256": "00" * 32})
    with pytest.raises(SettingsError, match=words) as caught:
        read(tmp_path, f"{first}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    assert "secret" not in str(caught.value) and SHA not in str(caught.value)
