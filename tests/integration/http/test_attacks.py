"""Legal bodies that must not delay other requests."""

from __future__ import annotations

import json

import pytest

from tests.support.http.http_servers import http_request, is_error, raw, toy_server
from tests.support.processes import descendants

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
VARIABLES = {f"v{number}": 1 for number in range(10**5)}
COUNTED = {
    "prompts": (COMPLETIONS, '{"prompt": [' + "[1]," * 450_000 + "[1]]}"),
    "ids": ("/detokenize", '{"tokens": [' + "5," * 900_000 + "5]}"),
    "variables": (CHAT, json.dumps({"messages": HELLO, "chat_template_kwargs": VARIABLES}, separators=(",", ":"))),
}


@pytest.mark.parametrize("name", COUNTED)
def test_very_many_values_are_counted_and_not_read(toy, name):
    """The parser held the event loop for up to five seconds of each."""
    path, body = COUNTED[name]
    is_error(toy.post(path, content=body), 400, code="body_too_complex")
    assert toy.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_body_beyond_what_the_models_length_needs_is_413(toy):
    is_error(toy.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * 3 * 2**20 + b'"}'), 413)


@pytest.mark.parametrize(  # where the body is parsed aside, and where it is not
    ("path", "data", "param", "says"),
    [
        (COMPLETIONS, '{"prompt": [' + "5," * 70_000 + "5]}", "prompt", "70001"),
        (COMPLETIONS, '{"prompt": [' + "[1]," * 1000 + "[1]]}", "prompt", "1001"),
    ],
    ids=["ids", "prompts"],
)
def test_what_is_read_and_too_much_is_a_400_of_its_field(toy, path, data, param, says):
    assert says in is_error(toy.post(path, content=data), 400, param)["message"]


def test_a_large_body_is_parsed_in_a_process_and_nothing_of_it_stays():
    """Held up by the parser, a look at /livez and a stream's next token took a tenth of a second and more."""
    with toy_server(max_body_bytes=16 * 2**20, access_log=False) as server:
        before = descendants(server.process.pid)
        is_error(server.post("/tokenize", {"prompt": "a", "secret": "b" * 100}), 400, code="unknown_parameter")
        assert descendants(server.process.pid) == before, "a small body does not need it"
        is_error(server.post("/tokenize", {"prompt": "a", "secret": "b" * 2**17}), 400, code="unknown_parameter")
        assert len(descendants(server.process.pid) - before) == 1
        text = json.dumps({"prompt": "中\n" * 2_000_000})
        assert "characters" in is_error(server.post("/tokenize", content=text), 400, "prompt")["message"]
        assert server.metric("nxd_texts_aside", kind="bodies") == 0
        is_error(server.post("/tokenize", content=text[:-1]), 400, code="invalid_json")
        is_error(server.post("/tokenize", content=text.encode().replace(b"\\n", b"\xff")), 400, code="invalid_json")
        is_error(server.post("/tokenize", content=text[:-1] + ', "prompt": "a"}'), 400, code="invalid_json")
        with raw(server, http_request("/tokenize", text.encode())):
            pass
        server.wait_metric("nxd_texts_aside", 0.0)
        assert server.post("/tokenize", content=json.dumps({"prompt": "a" * 2**17})).json()["count"] == 2**17
