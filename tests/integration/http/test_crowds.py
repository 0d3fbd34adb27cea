"""Crowds: hundreds at once are all answered, none keeps the others from it, and each key has its own limits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import signal

import pytest

from tests.support.http.http_servers import events_of, http_request, is_error, toy_server, wait_for

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def line(name, **more):
    return json.dumps({"name": name, "sha256": hashlib.sha256(f"{name}-secret".encode()).hexdigest(), **more}) + "\n"


LINES = (
    line("alice"),
    line("bob"),
    line("few", requests_per_minute=3),
    line("short", tokens_per_minute=10),
    line("single", concurrent_requests=1),
    line("grafana", scopes=["metrics"]),
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
    """One slot, and a key of each kind."""
    toy = {"slots": 1, "batch_sizes": [1]}
    hold = ("--fail-file", str(files / "hold"))
    with toy_server(wait=False, toy=toy, arguments=hold, api_keys_file=str(files / "keys")) as server:
        yield server.wait_ready()


def scraped(server, name, **labels):
    """A metric, which needs a key here."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(server.get("/metrics", headers=bearer("grafana-secret")).text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


async def crowd(server, requests):
    """Every request at once, each on a connection of its own."""

    async def ask(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer.decode()

    return await asyncio.gather(*map(ask, requests))


@pytest.mark.smoke
def test_three_hundred_at_once_are_all_answered(expect):
    prompts = [f"hello{number}" for number in range(300)]
    requests = [
        http_request(
            COMPLETIONS,
            json.dumps({**ASKED, "prompt": prompt, "stream": number % 2 == 0}).encode(),
            "Connection: close",
        )
        for number, prompt in enumerate(prompts)
    ]
    with toy_server(toy={"slots": 16, "batch_sizes": [1, 16]}, header_timeout=10, access_log=False) as server:
        answers = asyncio.run(crowd(server, requests))
        assert server.metric("nxd_admission_rejections_total") == 0
        assert server.metric("nxd_http_requests_total", status="200", route=COMPLETIONS) == 300
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        head, _, body = answer.partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200 ")
        if number % 2 == 0:
            text = "".join(event["choices"][0]["text"] for event in events_of(unchunked(body))[:-1])
        else:
            text = json.loads(body)["choices"][0]["text"]
        assert text == expect(prompt, max_tokens=3)[1]


def unchunked(body):
    """The text of a chunked body."""
    text = ""
    while body:
        size, _, body = body.partition("\r\n")
        text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return text


def test_one_keys_crowd_does_not_keep_another_waiting_and_the_urgent_go_first(keyed, files):
    """One slot, so that the log has the answers in the order in which they began."""
    with concurrent.futures.ThreadPoolExecutor(24) as pool:

        def ask(key, name, **more):
            headers = {**bearer(f"{key}-secret"), "x-request-id": name}
            return pool.submit(keyed.post, COMPLETIONS, {**ASKED, **more}, headers=headers)

        (files / "hold").write_text("hold")
        answers = [ask("alice", "first")]
        wait_for(lambda: scraped(keyed, "nxd_num_requests_running") == 1)
        answers += [ask("alice", f"alice-{number}") for number in range(20)]
        wait_for(lambda: scraped(keyed, "nxd_num_requests_waiting") == 20)
        answers += [ask("bob", "bob-only"), ask("alice", "alice-urgent", priority=-5)]
        wait_for(lambda: scraped(keyed, "nxd_num_requests_waiting") == 22)
        (files / "hold").unlink()
        assert {answer.result().status_code for answer in answers} == {200}
    wait_for(lambda: keyed.log.count(f"{COMPLETIONS} 200") == 23)
    order = [part.split()[0] for part in keyed.log.split(" ms ")[1:]]
    order = [name for name in order if name.startswith(("alice", "bob"))]
    assert order.index("bob-only") <= 2 and order.index("alice-urgent") <= 2
    assert scraped(keyed, "nxd_key_tokens_total", key="alice", of="prompts") == 22 * 5


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (COMPLETIONS, None, 401), (COMPLETIONS, "nobody", 401), (COMPLETIONS, "grafana", 403), ("/metrics", None, 401),
        ("/metrics", "alice", 403), ("/metrics", "grafana", 200), ("/metrics", "root", 200), ("/livez", None, 200),
        ("/v1/models", "plain", 200), ("/v1/models", "root", 200), ("/v1/adapters", "alice", 200),
    ],
)  # fmt: skip
def test_a_key_is_for_its_scopes(keyed, path, key, status):
    headers = bearer(f"{key}-secret") if key else {}
    answer = keyed.post(path, ASKED, headers=headers) if path == COMPLETIONS else keyed.get(path, headers=headers)
    assert answer.status_code == status
    if status == 403:
        needed = "metrics" if path == "/metrics" else "use"
        assert answer.json()["error"]["message"].endswith(f"{path} is for {needed}") and f"'{key}'" in answer.text


def test_admin_is_a_scope_too(keyed):
    body = {"path": "/nowhere"}
    is_error(keyed.post("/v1/weights", body, headers=bearer("alice-secret")), 403)
    answer = keyed.post("/v1/weights", body, headers=bearer("root-secret"))
    is_error(answer, 403, "path")  # there is no weights_root: the key opened the route


def test_limits_are_named_with_when_to_come_back(keyed):
    for left in (2, 1, 0):
        answer = keyed.post(COMPLETIONS, ASKED, headers=bearer("few-secret"))
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-limit-requests"] == "3" and "x-ratelimit-limit-tokens" not in answer.headers
    answer = keyed.post(COMPLETIONS, ASKED, headers=bearer("few-secret"))
    error = is_error(answer, 429, code="rate_limit_exceeded")
    assert "'few' has 3 requests a minute (requests_per_minute)" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 20 and answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert keyed.get("/v1/models", headers=bearer("few-secret")).status_code == 200, "nothing is computed for it"

    answers = [keyed.post(COMPLETIONS, ASKED, headers=bearer("short-secret")) for _ in range(3)]  # 8 tokens each
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "'short' has 10 tokens a minute (tokens_per_minute)" in is_error(answers[2], 429)["message"]
    assert answers[1].headers["x-ratelimit-remaining-tokens"] <= answers[0].headers["x-ratelimit-limit-tokens"] == "10"
    assert scraped(keyed, "nxd_key_refusals_total", key="short", limit="tokens_per_minute") == 1


def test_a_key_has_so_many_answers_at_a_time(keyed, files):
    key = bearer("single-secret")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        (files / "hold").write_text("hold")
        first = pool.submit(keyed.post, COMPLETIONS, {**ASKED, "stream": True}, headers=key)
        wait_for(lambda: scraped(keyed, "nxd_key_requests_running", key="single") == 1)
        error = is_error(keyed.post(COMPLETIONS, ASKED, headers=key), 429, code="rate_limit_exceeded")
        assert "1 requests at a time (concurrent_requests)" in error["message"]
        (files / "hold").unlink()
        assert first.result().status_code == 200
    wait_for(lambda: scraped(keyed, "nxd_key_requests_running", key="single") == 0)
    assert keyed.post(COMPLETIONS, ASKED, headers=key).status_code == 200


def test_the_file_is_read_again_on_a_signal_and_a_broken_one_changes_nothing(keyed, files):
    """Last: it changes the keys. What a key has used stays used."""
    keys = files / "keys"

    def hang_up(said):
        before = keyed.log.count(said)
        keyed.process.send_signal(signal.SIGHUP)
        wait_for(lambda: keyed.log.count(said) > before)

    keys.write_text("".join(LINES) + '{"name": "broken", "sha256": "secret"}')
    hang_up("sha256 must be a SHA-256 in 64 hexadecimal digits, in lower case; the keys that were read before go on")
    assert keyed.get("/v1/models", headers=bearer("plain-secret")).status_code == 200
    keys.write_text("".join(LINES[1:]) + line("new"))
    hang_up("7 keys are in use")
    for key, status in (("new", 200), ("bob", 200), ("alice", 401), ("plain", 401), ("few", 200)):
        assert keyed.get("/v1/models", headers=bearer(f"{key}-secret")).status_code == status, key
    is_error(keyed.post(COMPLETIONS, ASKED, headers=bearer("few-secret")), 429)
    text = keyed.log + keyed.get("/metrics", headers=bearer("grafana-secret")).text
    assert "-secret" not in text and not any(json.loads(one)["sha256"] in text for one in LINES)
