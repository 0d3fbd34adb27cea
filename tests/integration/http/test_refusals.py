"""Every refusal, in one table: its status, OpenAI's shape, and the field it names. The server goes on afterwards."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.support.http.http_servers import events_of, http_request, is_error, raw, read_all

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

# route, what is wrong with it, the field the answer names
BODIES = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 3}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[3], [3, -1]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": [97]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 65}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 40, "n": 2}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 3 + [3]}, "stop[3]"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"97": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(9)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [str(i) for i in range(17)]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (COMPLETIONS, {"prompt": "a", "messages": HELLO}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages[0].mood"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls"),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, "functions"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "web_search_options": {}}, "web_search_options"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": HELLO, "service_tier": "flex"}, "service_tier"),
    (CHAT, {"messages": HELLO, "prediction": {"type": "content"}}, "prediction"),
    ("/v1/embeddings", {"input": "a"}, None),
    ("/v1/classify", {"input": "a"}, None),
    ("/v1/predict", {"inputs": {"x": [1]}}, None),
    ("/v1/predict", {}, "inputs"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [97]}, "tokens"),
    ("/invocations", {}, None),
]


@pytest.mark.parametrize(("route", "body", "param"), BODIES, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_body_is_a_400_that_names_the_field(toy, route, body, param):
    error = is_error(toy.post(route, body), 400, param)
    if not body and param:
        assert error["code"] == "missing_parameter"
    assert param is None or param.split(".")[-1].split("[")[0] in error["message"], error


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (COMPLETIONS, {"prompt": "a", "max_token": 5}, "unknown field `max_token`; did you mean max_tokens?"),
        (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "`messages[0].contents`; did you mean content?"),
        (COMPLETIONS, {"prompt": "a", "input": "b"}, "unknown field `input`"),  # no slip for min_p
        (COMPLETIONS, {"prompt": "a", "max_new_tokens": 5}, "`max_new_tokens`; did you mean max_tokens?"),
        (COMPLETIONS, {"prompt": "a", "repeat_penalty": 1.3}, "not supported by this server: use `repetition_penalty`"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "`temperature` must be a number, got 'hot'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "`max_tokens` must be a whole number, got 1.5"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "`stream` must be true or false, got 'yes'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": [5]}, "`max_tokens` must be a whole number"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "`stop`: must be a string or a list of strings"),
        (COMPLETIONS, {"prompt": [3, 1.0]}, "must be a token id: a whole number from 0 to 2147483647, got 1.0"),
        (COMPLETIONS, {"prompt": "a" * 60, "min_tokens": 5}, "5 is more than the 4 tokens that are generated here"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, "leave it out, or send 'none'"),
        (CHAT, {"messages": HELLO, "min_tokens": 60}, "60 is more than the 43 tokens that are generated here"),
    ],
)
def test_a_refusal_names_the_value_and_the_likely_name(toy, route, body, message):
    told = is_error(toy.post(route, body), 400, None)["message"]
    assert told.endswith(message)


RAW_BODIES = [
    (b"", "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', None),
    (b'{"prompt": "a", "logit_bias": {"1": 1e999}}', None),
]


@pytest.mark.parametrize(("data", "code"), RAW_BODIES, ids=lambda value: repr(value)[:40])
def test_a_body_that_is_not_strict_json_is_a_400(toy, data, code):
    is_error(toy.post(COMPLETIONS, content=data), 400, code=code)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/to%0Ay", 404),
        ("GET", "/%ED%A0%80", 404),
        ("GET", "/v1/completions", 405),
    ],
)
def test_unknown_routes_and_methods(toy, method, path, status):
    response = httpx.request(method, toy.url + path, timeout=60)
    is_error(response, status)
    if status == 405:
        assert response.headers["allow"]


def test_another_models_name_is_a_404_that_openai_clients_know(toy):
    for route, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        error = is_error(toy.post(route, {**body, "model": "gpt-4"}), 404, "model", "model_not_found")
        assert "'toy'" in error["message"]


LONG = [{"role": "user", "content": "a" * 65}]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 65}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b" * 70]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[2], [2] * 65]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "a" * 60, "max_tokens": 5}, "max_tokens"),
        (CHAT, {"messages": LONG}, "messages"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 64}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 64}, "max_tokens"),
    ],
    ids=str,
)
def test_what_does_not_fit_names_the_requests_own_field_in_the_words_that_clients_look_for(toy, route, body, param):
    error = is_error(toy.post(route, body), 400, param, "context_length_exceeded")
    assert "this model's maximum context length is 64 tokens" in error["message"]


def test_the_default_run_of_a_load_generator_passes(toy):
    """What guidellm sends: both limits, and counts in every chunk."""
    more = {
        "max_tokens": 5, "stream": True, "ignore_eos": True, "stop": None, "priority": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    for route, asked in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO, "max_completion_tokens": 5})):
        answer = toy.post(route, {**asked, **more})
        assert answer.status_code == 200, answer.text
        *chunks, last, done = events_of(answer.text)
        assert done == "[DONE]" and last["usage"]["completion_tokens"] == 5
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 5 and len(set(counts)) > 2
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_padded_chunks_have_few_sizes(toy):
    body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
    plain = toy.post(COMPLETIONS, {**body, "temperature": 0}).text
    options = {"stream_options": {"include_obfuscation": True}}
    padded = toy.post(COMPLETIONS, {**body, **options, "temperature": 0}).text
    sizes = {len(event.encode()) + 2 for event in padded.split("\n\n")[:-2]}
    assert all(size % 64 == 0 for size in sizes) and len(sizes) <= 2
    for before, after in zip(events_of(plain)[:-1], events_of(padded)[:-1], strict=True):
        assert after.pop("obfuscation") is not None and after["choices"] == before["choices"]


NOTHING = {
    "annotations": [], "priority": 0, "detokenize": True, "store": False, "request_id": "r",
    "repeat_penalty": 1.0, "encoder_repetition_penalty": 1, "typical_p": 1.0, "typical": 1.0, "tfs_z": 1.0, "top_a": 0,
    "mirostat": 0, "mirostat_mode": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "no_repeat_ngram_size": 0,
    "length_penalty": 1.0, "spaces_between_special_tokens": True,
    "structured_outputs": {}, "cache_prompt": True, "cache_salt": "", "n_probs": 0, "min_keep": 0,
    "separate_reasoning": True, "no_stop_trim": False, "vllm_xargs": {}, "return_full_text": False,
    "decoder_input_details": False, "return_hidden_states": False, "min_new_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_fields_that_ask_for_nothing_pass_and_those_that_ask_do_not(toy, route):
    asked = {"prompt": "hello"} if route == COMPLETIONS else {"messages": [{**HELLO[0], "annotations": []}]}
    if route == CHAT:
        asked["top_logprobs"] = 0
    whole = {"max_tokens": 2.0, "n": 1.0, "top_k": 0.0, "seed": 3.0, "min_tokens": 1.0}
    unused = {"mirostat_tau": 5.0, "dry_base": 1.75, "xtc_threshold": 0.1, "dry_sequence_breakers": ["\n"]}
    assert toy.post(route, {**asked, **NOTHING, **whole, **unused}).status_code == 200
    options = {"include_usage": False, "continuous_usage_stats": False, "include_obfuscation": False}
    answer = toy.post(route, {**asked, "max_tokens": 2, "stream": True, "stream_options": options})
    assert answer.status_code == 200 and "usage" not in answer.text and "obfuscation" not in answer.text
    for name, value in NOTHING.items():
        if name in ("request_id", "priority", "cache_prompt", "cache_salt", "structured_outputs"):
            continue
        other = [{"x": 1}] if isinstance(value, list) else {"x": 1} if isinstance(value, dict) else not value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            other = value + 2
        is_error(toy.post(route, {**asked, name: other}), 400, name, "unsupported_parameter")


def test_bytes_that_are_not_http_are_refused_as_json(toy):
    with raw(toy, b"\x16\x03\x01\x02\x00hello\r\n\r\n") as connection:
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_request_id_is_kept_or_replaced(toy):
    assert toy.get("/livez", headers={"X-Request-Id": "abc-123"}).headers["x-request-id"] == "abc-123"
    for bad in ("a" * 200, "x y", "<script>"):
        assert toy.get("/livez", headers={"X-Request-Id": bad}).headers["x-request-id"].startswith("req-")
    with raw(toy, http_request("/v1/completions", b"{}", "X-Request-Id: id-9", "Connection: close")) as connection:
        assert b"x-request-id: id-9" in read_all(connection)
