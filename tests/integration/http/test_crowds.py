"""Crowds: hundreds at once are all answered, none keeps the others from it, and each key has its own limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import signal

import pytest

from tests.support.http.http_servers import http_request, is_error, toy_server, wait_for

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


def bearer(key):
    return {"Authorization": f"Bearer {key}-secret"}


def line(name, **more):
    return json.dumps({"name": name, "sha256": hashlib.sha256(f"{name}-secret".encode()).hexdigest(), **more}) + "\n"


LINES = (
    line("alice"),
    line("bob"),
    line("few", requests_per_minute=3),
    line("short", tokens_per_minute=10),
    line("single", concurrent_requests=1),
    line("idle", scopes=["metrics"]),
    line("root", scopes=["admin"]),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """``keys``, and ``hold``: while it says "hold", no step of ``keyed`` ends."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("plain-secret\n" + "".join(LINES))
    return folder


@pytest.fixture(scope="module")
def keyed(files):
    """One slot, and a key of each kind; where a test names no key, the one for metrics is sent."""
    toy = {"slots": 1, "batch_sizes": [1]}
    with toy_server(
        toy=toy, arguments=("--fail-file", str(files / "hold")), api_keys_file=str(files / "keys")
    ) as server:
        server.headers.update(bearer("idle"))
        yield server


@pytest.mark.smoke
def test_three_hundred_at_once_are_all_answered(expect):
    """Each on a connection of its own, every second one a stream."""
    prompts = [f"hello{number}" for number in range(300)]

    async def ask(port, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {**ASKED, "prompt": prompts[number], "stream": number % 2 == 0}
        writer.write(http_request(COMPLETIONS, json.dumps(body).encode(), "Connection: close"))
        head, _, answer = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return head.partition("\r\n")[0], answer

    async def crowd(port):
        return await asyncio.gather(*(ask(port, number) for number in range(300)))

    with toy_server(toy={"slots": 16, "batch_sizes": [1, 16]}, header_timeout=10, access_log=False) as server:
        answers = asyncio.run(crowd(server.port))
        assert server.metric("nxd_admission_rejections_total") == 0
    assert {status for status, _ in answers} == {"HTTP/1.1 200 OK"}
    for number, (_, answer) in enumerate(answers):
        if number % 2 == 0:
            assert answer.count("data: [DONE]") == answer.count('"finish_reason":"') == 1
        else:
            assert json.loads(answer)["choices"][0]["text"] == expect(prompts[number], max_tokens=3)[1]


def test_one_keys_crowd_does_not_keep_another_waiting_and_the_urgent_go_first(keyed, files):
    """One slot, so that the log has the answers in the order in which they began."""
    with concurrent.futures.ThreadPoolExecutor(24) as pool:

        def ask(key, name, **more):
            headers = {**bearer(key), "x-request-id": name}
            return pool.submit(keyed.post, COMPLETIONS, {**ASKED, **more}, headers=headers)

        (files / "hold").write_text("hold")
        answers = [ask("alice", "alice-first")]
        keyed.wait_metric("nxd_num_requests_running", 1)
        answers += [ask("alice", f"alice-{number}") for number in range(20)]
        keyed.wait_metric("nxd_num_requests_waiting", 20)
        answers += [ask("bob", "bob-only"), ask("alice", "alice-urgent", priority=-5)]
        keyed.wait_metric("nxd_num_requests_waiting", 22)
        (files / "hold").unlink()
        assert {answer.result().status_code for answer in answers} == {200}
    wait_for(lambda: keyed.log.count(f"{COMPLETIONS} 200") == 23)
    order = [part.split()[0] for part in keyed.log.split(" ms ")[1:]]
    assert {"bob-only", "alice-urgent"} <= {*order[:4]}
    assert keyed.metric("nxd_key_tokens_total", key="alice", of="prompts") == 22 * 5


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", COMPLETIONS, None, 401), ("POST", COMPLETIONS, "nobody", 401), ("POST", COMPLETIONS, "idle", 403),
        ("GET", "/v1/models", "plain", 200), ("GET", "/v1/models", "root", 200), ("GET", "/livez", None, 200),
        ("DELETE", "/v1/adapters/x", "alice", 403), ("DELETE", "/v1/adapters/x", "root", 404),
    ],
)  # fmt: skip
def test_a_key_is_for_its_scopes(keyed, method, path, key, status):
    answer = keyed._client.request(
        method, keyed.url + path, json=ASKED, headers=bearer(key) if key else {"Authorization": ""}
    )
    is_error(answer, status) if status != 200 else answer.raise_for_status()


def test_limits_are_named_with_when_to_come_back(keyed, files):
    def ask(key):
        return keyed.post(COMPLETIONS, ASKED, headers=bearer(key))

    def refused(key, words):
        answer = ask(key)
        assert words in is_error(answer, 429, code="rate_limit_exceeded")["message"]
        return answer

    left = [ask("few").headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    answer = refused("few", "'few' has 3 requests a minute (requests_per_minute)")
    assert left == ["2", "1", "0"] and 1 <= int(answer.headers["retry-after"]) <= 20
    assert keyed.get("/v1/models", headers=bearer("few")).status_code == 200, "nothing is computed for it"
    assert [ask("short").status_code for _ in range(2)] == [200, 200], "8 tokens each"
    answer = refused("short", "'short' has 10 tokens a minute (tokens_per_minute)")
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0" and answer.headers["x-ratelimit-limit-tokens"] == "10"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        (files / "hold").write_text("hold")
        first = pool.submit(ask, "single")
        keyed.wait_metric("nxd_key_requests_running", 1, key="single")
        refused("single", "1 requests at a time (concurrent_requests)")
        (files / "hold").unlink()
        assert first.result().status_code == 200
    keyed.wait_metric("nxd_key_requests_running", 0, key="single")
    assert ask("single").status_code == 200
    assert keyed.metric("nxd_key_refusals_total") == 3


def test_the_file_is_read_again_on_a_signal_and_a_broken_one_changes_nothing(keyed, files):
    """Last: it changes the keys. What a key has used stays used."""

    def read_again(text, said):
        (files / "keys").write_text(text)
        keyed.process.send_signal(signal.SIGHUP)
        wait_for(lambda: said in keyed.log)

    def status(key, path="/v1/models"):
        return keyed.get(path, headers=bearer(key)).status_code

    read_again('{"name": "broken", "sha256": "secret"}', "in lower case; the keys that were read before go on")
    assert status("plain") == 200
    read_again("".join(LINES[1:]) + line("new"), "7 keys are in use")
    assert [status(key) for key in ("new", "bob", "alice", "plain", "few")] == [200, 200, 401, 401, 200]
    assert [status(key, "/metrics") for key in ("nobody", "bob", "idle", "root")] == [401, 403, 200, 200]
    is_error(keyed.post(COMPLETIONS, ASKED, headers=bearer("few")), 429)
    text = keyed.log + keyed.get("/metrics", headers=bearer("idle")).text
    assert "-secret" not in text and not any(json.loads(one)["sha256"] in text for one in LINES)
