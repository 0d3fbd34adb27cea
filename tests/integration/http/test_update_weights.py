"""``POST /v1/weights`` over the toy model: who may call it, which paths it follows, what the answers say."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.support.engine.toy_model import naive_generate
from tests.support.http.http_servers import events_of, is_error, toy_server, wait_for
from tests.support.http.weights_root import weights_root

ADMIN = {"authorization": "Bearer root"}
WEIGHTS, COMPLETIONS, CHAT = "/v1/weights", "/v1/completions", "/v1/chat/completions"
HEADER = "x-weight-version"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return weights_root(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def server(root):
    settings = {"admin_key": "root", "api_keys": ["user"], "weights_root": str(root), "max_queued_requests": 400}
    # A stream that has begun with comments has no version in its header: here none does.
    more = {"access_log": False, "keep_alive_interval": 300, "arguments": ("--fail-file", str(root.parent / "hold"))}
    with toy_server(toy={"delay": 0.002}, **more, **settings) as server:
        yield server


def ask(server, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    return server.post(COMPLETIONS, body, headers={"x-api-key": "user"})


def swap(server, path, **more):
    return server.post(WEIGHTS, {"path": str(path), **more}, headers=ADMIN)


def test_it_is_closed_without_an_admin_key(toy):
    error = is_error(toy.post(WEIGHTS, {"path": "one"}), 403, code="admin_disabled")
    assert "--admin-key" in error["message"] and "NXD_INFER_ADMIN_KEY" in error["message"]


def test_it_wants_the_admin_key_and_no_other(server):
    body = {"path": "one"}
    is_error(server.post(WEIGHTS, body), 401)
    is_error(server.post(WEIGHTS, body, headers={"x-api-key": "nobody"}), 401)
    is_error(server.post(WEIGHTS, body, headers={"x-api-key": "user"}), 403, code="forbidden")
    is_error(server.get(WEIGHTS, headers=ADMIN), 405)
    assert server.get("/v1/models", headers=ADMIN).status_code == 200  # it opens the other routes as well
    is_error(server.post(WEIGHTS, {}, headers=ADMIN), 400, "path")
    for timeout in (0, 1e10):
        is_error(swap(server, "one", timeout=timeout), 400, "timeout")
    is_error(swap(server, "one", extra=1), 400, "extra")


def test_a_path_leads_nowhere_but_under_the_root(server, root):
    for path in ("deep/../one", str(root.parent / "secret"), "out", "up/secret", "holds_out", "holds_link_out"):
        is_error(swap(server, path), 403, "path", "forbidden_path")
    for path in ("nothing", "", "a\0b", "circle", "pipes", "x" * 300):
        is_error(swap(server, path), 400, "path")
    is_error(server.post(WEIGHTS, content=b'{"path": "\\ud800"}', headers=ADMIN), 400)
    error = is_error(swap(server, "wrong"), 400, "path", "weights_refused")
    assert "unchanged" in error["message"] and "different" in error["message"]
    models = server.get("/v1/models", headers=ADMIN).json()["data"]
    assert models[0]["weight_version"] == 0 and server.metric("nxd_weight_version") == 0


def test_answers_name_their_version_and_are_wholly_of_it(server, root, tokenizer):
    """100 requests in flight over real sockets while weights are swapped twice: each is right for its version."""
    prompts = [f"{chr(97 + number % 26)}{number}" for number in range(40)]

    def want(prompt, version):  # the toy's weights are the number of the version
        tokens = naive_generate(tokenizer.encode(prompt), max_tokens=6, ignore_eos=True, weights=version)
        return tokenizer.decode(tokens)

    def one(number):
        asked = [prompts[number % 40], prompts[(number + 7) % 40]][: 1 + (number % 4 == 3)]
        more = [{}, {"stream": True}, {"n": 3}, {}][number % 4]
        answer = ask(server, asked, **more)
        assert answer.status_code == 200, answer.text
        if "stream" in more:
            events = events_of(answer.text)[:-1]
            found = {event["weight_version"] for event in events}
            texts = ["".join(choice["text"] for event in events for choice in event["choices"])]
        else:
            found = {answer.json()["weight_version"]}
            texts = [choice["text"] for choice in answer.json()["choices"]]
        (version,) = found
        assert answer.headers[HEADER] == str(version)
        assert texts == [want(prompt, version) for prompt in asked for _ in range(len(texts) // len(asked))]
        return version

    with concurrent.futures.ThreadPoolExecutor(202) as pool:
        answers = [pool.submit(one, number) for number in range(100)]
        concurrent.futures.wait(answers, 120, concurrent.futures.FIRST_COMPLETED)
        first = swap(server, "link")
        assert first.status_code == 200, first.text
        assert first.json()["version"] == 1 and first.json()["path"] == "link"
        second = swap(server, root / "deep" / "two", tag=None)
        assert second.json()["version"] == 2
        answers += [pool.submit(one, number) for number in range(8)]
        seen = [answer.result(120) for answer in answers]
    assert set(seen) <= {0, 1, 2} and {0, 2} <= set(seen)
    assert server.metric("nxd_weight_version") == 2
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = server.post(CHAT, chat, headers={"x-api-key": "user"})
    assert answer.json()["weight_version"] == 2 and answer.headers[HEADER] == "2"
    refused = server.post(COMPLETIONS, {"prompt": ""}, headers=ADMIN)
    assert is_error(refused, 400) and HEADER not in refused.headers  # no weights answered it


def test_a_bound_on_waiting(server, root):
    """All prompts of a request are one: a swap waits for them together, or gives up."""
    before = server.get("/v1/models", headers=ADMIN).json()["data"][0]["weight_version"]
    hold = root.parent / "hold"
    hold.write_text("hold")  # nothing is over before it has been looked at
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        long = pool.submit(ask, server, ["a"] * 12)
        wait_for(lambda: server.inside == 12 and server.metric("nxd_num_requests_running"))
        error = is_error(swap(server, "one", timeout=0.05), 409, code="weights_busy")
        assert "0.05 s" in error["message"]
        hold.unlink()
        after = swap(server, "one")
        assert after.json()["version"] == before + 1
        assert long.result(60).json()["weight_version"] == before
    assert ask(server, "a").json()["weight_version"] == before + 1
