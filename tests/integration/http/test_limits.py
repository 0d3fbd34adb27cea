"""Bodies, queues, deadlines and keys: what the server refuses before it costs anything, or delays others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time

import openai
import pytest

from tests.support.http.http_servers import http_request, is_error, raw, read_all, toy_server, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "hello", "max_tokens": 3900, "temperature": 0, "ignore_eos": True}
KEYS = ["first-key", "schlüssel-中", "third"]
OPEN = ("/livez", "/readyz", "/health", "/ping", "/metrics")
CLOSED = ("/v1/models", "/v1/buckets", "/version", "/openapi.json", "/nope")
ONE_SLOT = {"slots": 1, "max_len": 4000, "batch_sizes": [1]}


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """While this file exists and says so, no step of ``limited`` ends."""
    return tmp_path_factory.mktemp("limited") / "hold"


@pytest.fixture(scope="module")
def limited(hold):
    """1 slot, 2 waiting, bodies of 4 KiB."""
    limits = {"max_queued_requests": 2, "max_body_bytes": 4096, "max_choices": 8}
    with toy_server(toy=ONE_SLOT, arguments=("--fail-file", str(hold)), **limits) as server:
        yield server


@pytest.fixture(scope="module")
def hasty():
    """1 slot, 1.5 s a request, and steps of 50 ms."""
    with toy_server(toy={**ONE_SLOT, "delay": 0.05}, request_timeout=1.5) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """Three keys, one of them not ASCII; one comes from a file."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\n" + KEYS[2] + "\n")
    with toy_server(api_keys=KEYS[:2], api_keys_file=str(file)) as server:
        yield server


def test_a_body_over_the_limit_is_413_declared_or_not(limited, toy):
    exact = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""})
    exact = exact.replace('"user": ""', '"user": "' + "u" * (4096 - len(exact)) + '"')
    assert len(exact) == 4096
    assert limited.post(COMPLETIONS, content=exact).status_code == 200
    error = is_error(limited.post(COMPLETIONS, content=exact + " "), 413)
    assert "4096" in error["message"]
    is_error(limited.post(COMPLETIONS, content=b"x" * 3_000_000), 413)

    def chunks():
        for _ in range(40):
            yield b"x" * 1000

    is_error(limited.post(COMPLETIONS, content=chunks()), 413)
    assert limited.post(COMPLETIONS, content=(part for part in [exact.encode()])).status_code == 200
    is_error(toy.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * 3 * 2**20 + b'"}'), 413)  # from the model's length


def test_a_declared_giant_is_refused_without_being_read(limited):
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
    with raw(limited, head.encode()) as connection:  # which never sends it
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_expect_100_continue_is_honoured(limited):
    body = b'{"prompt": "a", "max_tokens": 1}'
    head, _, _ = http_request(COMPLETIONS, body, "Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
    with raw(limited, head + b"\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_an_early_refusal_reaches_a_client_that_is_still_writing(locked):
    """A body of megabytes, refused at its head: the client must see the 401 and not a reset, unless it takes
    longer than the server waits for it, as it may on a busy machine."""
    body = b"x" * 8_000_000

    def refused() -> bool:
        with contextlib.suppress(OSError), raw(locked, http_request(COMPLETIONS, body, "Connection: close")) as one:
            return read_all(one).startswith(b"HTTP/1.1 401 ")
        return False

    assert any(refused() for _ in range(3))


@pytest.mark.smoke
def test_a_full_queue_is_429_with_retry_after_and_free_room_is_used(limited, hold):
    """A request that does not fit takes no room from others: those of its prompts that fitted filled the queue."""
    short = {"prompt": "hello", "max_tokens": 2}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        hold.write_text("hold")
        running = [pool.submit(limited.post, COMPLETIONS, short) for _ in range(2)]  # 1 runs, 1 waits
        wait_for(lambda: limited.inside == 2)
        is_error(limited.post(COMPLETIONS, {**short, "prompt": ["hello"] * 3}), 429, code="queue_full")
        running.append(pool.submit(limited.post, COMPLETIONS, short))
        wait_for(lambda: running[-1].done() or limited.inside == 3)
        refused = limited.metric("nxd_admission_rejections_total", reason="queue_full")
        for stream in (False, True):
            response = limited.post(COMPLETIONS, {**short, "stream": stream})
            is_error(response, 429, code="queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert limited.metric("nxd_admission_rejections_total", reason="queue_full") == refused + 2
        client = openai.OpenAI(base_url=limited.url + "/v1", api_key="x", max_retries=0)
        with client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="toy", prompt="hello")
        hold.unlink()
        assert [future.result().status_code for future in running] == [200] * 3
    assert limited.metric("nxd_num_requests_waiting") == 0


def test_a_request_of_too_many_prompts_is_refused_whole(limited):
    """An idle server has no room for 4: no retry would help."""
    before = limited.metric("nxd_prompt_tokens_total")
    for count, status in ((4, 400), (9, 400), (3, 200)):
        answer = limited.post(COMPLETIONS, {"prompt": ["hello"] * count, "max_tokens": 2, "temperature": 0})
        assert answer.status_code == status and (status == 200 or is_error(answer, 400, "prompt"))
    assert limited.metric("nxd_prompt_tokens_total") == before + 3 * 5


def test_a_deadline_is_504_or_cuts_the_stream(hasty):
    begin = time.monotonic()
    is_error(hasty.post(COMPLETIONS, LONG), 504)  # which takes minutes
    assert time.monotonic() - begin > 1.3
    wait_for(lambda: hasty.metric("nxd_slots_free") == 1)
    text = hasty.post(COMPLETIONS, {**LONG, "stream": True}).text
    assert json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert "[DONE]" not in text and '"finish_reason":"' not in text
    wait_for(lambda: hasty.metric("nxd_slots_free") == 1)


@pytest.mark.smoke
def test_with_keys_everything_but_the_health_routes_needs_one(locked):
    for path in OPEN:
        assert locked.get(path).status_code == 200, path
    for path in CLOSED:
        response = locked.get(path)
        is_error(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"
    for path in (COMPLETIONS, CHAT, "/tokenize", "/invocations", "/v1/predict"):
        is_error(locked.post(path, {"prompt": "a"}), 401)


def test_every_key_opens_in_both_headers_and_is_never_logged(locked):
    for key in KEYS:
        data = key.encode()
        for headers in (
            {b"Authorization": b"Bearer " + data},
            {b"X-API-Key": data},
            {b"authorization": b"bearer  " + data},
        ):
            assert locked.get("/v1/models", headers=headers).status_code == 200
    is_error(locked.get("/v1/models?api_key=first-key&key=third"), 401)
    wait_for(lambda: locked.log.count("/v1/models 200") >= 9)
    assert not any(key in locked.log for key in KEYS)


@pytest.mark.parametrize(
    "headers",
    [
        {b"Authorization": b"Basic first-key"},
        {b"Authorization": b"Bearer"},
        {b"Authorization": b"Bearer first-key,third"},
        {b"X-API-Key": b"\xff\xfe"},
    ],
)
def test_what_is_no_key_does_not_open(locked, headers):
    is_error(locked.get("/v1/models", headers=headers), 401)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": ["ab", "ab " * 400_000]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": [[5], [96] * 70_000 + [99]]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": "a", "stop_token_ids": [5] * 70_000}, "stop_token_ids", None),
        ({"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9000)), 1)}, "logit_bias", None),
    ],
    ids=["text", "ids", "stop tokens", "biases"],
)
def test_a_giant_is_refused_before_it_is_looked_through(toy, body, param, code):
    """Each used to hold up the whole server for seconds: tokenised, or walked through at every token."""
    message = is_error(toy.post(COMPLETIONS, body), 400, param, code)["message"]
    assert "this model's maximum context length is" in message or "at most" in message
    assert len(message) < 400


def test_a_large_body_is_read():
    with toy_server(max_body_bytes=16 * 2**20, access_log=False) as server:
        text = json.dumps({"prompt": "中\n" * 2_000_000})
        assert "characters" in is_error(server.post("/tokenize", content=text), 400, "prompt")["message"]
        is_error(server.post("/tokenize", content=text[:-1]), 400, code="invalid_json")
        assert server.post("/tokenize", content=json.dumps({"prompt": "a" * 2**17})).json()["count"] == 2**17


def test_a_body_that_never_ends_is_504(hasty):
    begin = time.monotonic()
    with raw(hasty, f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{{".encode()) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 504 ") and b"request_timeout" in answer
    assert time.monotonic() - begin > 1.3
