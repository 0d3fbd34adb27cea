"""An artifact over the nodes of a Ray cluster: `make test-ray`, which `make test` leaves out.

The cluster is real: its nodes are processes of this machine, with loopback addresses of their own. A node is lost as a
machine is that loses power.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import application  # of deploy/ray
import httpx
import openai
import pytest
import yaml
from ray import serve

from nxd_server.errors import SettingsError
from tests.integration.ray.cluster import ROOT, URL, Cluster
from tests.support.processes import FORK_SERVER, gone, name_of, parent_of, wait_until
from tests.support.tiny_models import write_tiny

pytestmark = pytest.mark.timeout(600)

PROMPTS = [f"{letter}b" for letter in "abcdefgh"]
TOKENS = 96
ASKED: dict[str, Any] = {"model": "model", "max_tokens": TOKENS, "temperature": 0}
SLOTS = 4
ANSWER_SECONDS = 120


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `tp1` and `tp2`."""
    place = tmp_path_factory.mktemp("artifacts")
    write_tiny("llama", place / "model")
    options = f"--backend eager --dtype float32 --batch-sizes {SLOTS} --prompt-buckets 16 --max-len 256"
    for tp in (1, 2):
        command = [sys.executable, "-m", "nxd_infer.cli.main", "trace", place / "model", "--out", place / f"tp{tp}"]
        subprocess.run([*command, f"--tp={tp}", *options.split()], check=True, capture_output=True, timeout=300)
    return place


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        started.start_head("--num-cpus=1", '--resources={"neuron_cores": 4}')
        started.start_node("--num-cpus=1")
        yield started
    wait_until(lambda: not started.processes(), 20)


def config(artifact: Path, **arguments: Any) -> dict[str, Any]:
    """serve.yaml, for this machine; the proxy is on the head, which stays."""
    file = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    file["proxy_location"] = "HeadOnly"
    file["http_options"]["host"] = "127.0.0.1"
    (entry,) = file["applications"]
    entry["args"] = {**entry["args"], "artifact": str(artifact), **arguments}
    return file


@pytest.fixture(scope="session")
def two(cluster: Cluster, artifacts: Path) -> Cluster:
    """With one replica on each node, as each has one core."""
    cluster.deploy(config(artifacts / "tp1", autoscaling={"min_replicas": 2, "max_replicas": 2}))
    cluster.wait_running(2)
    return cluster


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {**ASKED, "prompt": prompt, "ignore_eos": True, **more}


def streamed(prompt: str, begun: threading.Event | None = None) -> str | None:
    """The text of a stream; None if it broke off or was refused, after which docs/deploying.md says to ask again."""
    text, done = "", False
    try:
        with httpx.stream("POST", f"{URL}/v1/completions", json=body(prompt, stream=True), timeout=60) as answer:
            if answer.status_code in (500, 503):
                return None
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return None
                    text += chunk["choices"][0]["text"]
                    if begun is not None:
                        begun.set()
    except httpx.TransportError:
        return None
    return text if done else None


def test_routes_streams_and_errors_are_the_servers(two: Cluster):
    listed = httpx.get(f"{URL}/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["model"]
    whole = httpx.post(f"{URL}/v1/completions", json=body("ab"), timeout=60).json()
    assert whole["usage"]["completion_tokens"] == TOKENS
    assert streamed("ab") == whole["choices"][0]["text"]
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=60)
    chat = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "ab"}], max_tokens=4, stream=True
    )
    assert list(chat)[-1].choices[0].finish_reason in ("length", "stop")
    wrong = httpx.post(f"{URL}/v1/completions", json=body("ab", max_token=1))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_token"
    assert httpx.get(f"{URL}/nowhere").json()["error"]["code"] == "not_found"
    named = httpx.get(f"{URL}/v1/models", headers={"X-Request-ID": "mine"})
    assert set(named.headers.get_list("x-request-id")) == {"mine"}  # Ray's proxy says it once more


def test_a_client_that_leaves_frees_its_slot(two: Cluster):
    with ThreadPoolExecutor(2 * SLOTS) as clients:

        def leave(prompt: str) -> None:
            with httpx.stream(
                "POST", f"{URL}/v1/completions", json=body(prompt, stream=True, max_tokens=240), timeout=60
            ) as answer:
                next(answer.iter_lines())

        list(clients.map(leave, PROMPTS))
    left = re.compile(r"^nxd_client_disconnects_total [1-9]", re.MULTILINE)
    wait_until(lambda: left.search(httpx.get(f"{URL}/metrics").text), 30)
    wait_until(lambda: (health := httpx.get(f"{URL}/health").json())["running"] == health["waiting"] == 0, 30)


def test_every_request_is_answered_though_a_node_is_lost(two: Cluster):
    expected = {prompt: streamed(prompt) for prompt in PROMPTS}
    assert None not in expected.values()
    again, lost = threading.Event(), threading.Event()
    begun = [threading.Event() for _ in PROMPTS]

    def stream(number: int) -> int:
        """Ask for one prompt until the node is lost, and once more; how often an answer had to be asked for again."""
        prompt, repeated = PROMPTS[number], 0
        last = False
        while not last:
            last = lost.is_set()
            end = time.monotonic() + ANSWER_SECONDS
            while (text := streamed(prompt, begun[number])) is None:
                assert time.monotonic() < end
                repeated += 1
                again.set()
                time.sleep(0.2)
            assert text == expected[prompt]
        return repeated

    def ask(number: int) -> None:
        """The same without streaming, by OpenAI's client, which repeats what is answered with 500 or 503."""
        client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=60, max_retries=20)
        last = False
        while not last:
            last = lost.is_set()
            answer = client.completions.create(**ASKED, prompt=PROMPTS[number], extra_body={"ignore_eos": True})
            assert answer.choices[0].text == expected[PROMPTS[number]]

    with ThreadPoolExecutor(2 * len(PROMPTS)) as clients:
        streams = [clients.submit(stream, number) for number in range(len(PROMPTS))]
        asked = [clients.submit(ask, number) for number in range(0, len(PROMPTS), 2)]
        try:
            assert all(event.wait(60) for event in begun)
            two.lose(two.nodes[-1])
            assert again.wait(60)  # it held some of the streams
        finally:
            lost.set()
        repeated = [answer.result(ANSWER_SECONDS) for answer in streams]
        for answer in asked:
            answer.result(ANSWER_SECONDS)
    assert sum(repeated) > 0, repeated

    two.start_node("--num-cpus=1")  # and a new node takes the replica that has no place
    two.wait_running(2)
    assert streamed("ab") == expected["ab"]


def test_replicas_come_with_the_queue_and_take_their_own_neuron_cores(cluster: Cluster, artifacts: Path):
    """Two ranks each; the cores are only counted here, as this machine has none."""
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "look_back_period_s": 2}
    serve.delete("nxd-infer")  # else the new version begins with as many replicas as the former one had
    cluster.deploy(config(artifacts / "tp2", resource="neuron_cores", autoscaling=autoscaling))
    cluster.wait_running(1)
    expected = streamed("ab")
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            assert streamed("ab") == expected

    with ThreadPoolExecutor(3 * SLOTS) as clients:
        running = [clients.submit(load) for _ in range(3 * SLOTS)]
        try:
            cluster.wait_running(2)
            cores = set()
            end = time.monotonic() + 60
            while len(cores) < 2:
                assert time.monotonic() < end, cores
                ranks = httpx.get(f"{URL}/health", timeout=60).json()["ranks"]
                assert len(ranks) == 2
                for rank in ranks:
                    variables = Path(f"/proc/{rank['pid']}/environ").read_text().split("\0")
                    cores.update(name for name in variables if name.startswith("NEURON_RT_VISIBLE_CORES="))
        finally:
            stop.set()
        for client in running:
            client.result(ANSWER_SECONDS)
    assert cores == {"NEURON_RT_VISIBLE_CORES=0,1", "NEURON_RT_VISIBLE_CORES=2,3"}


def test_requests_wait_for_a_replica_while_there_is_none(cluster: Cluster):
    """And ranks end with their replica, whichever way that ends."""
    wait_until(lambda: len(cluster.ranks()) == 4)  # those of the deployment before have ended
    ranks = cluster.ranks()
    replicas = {parent_of(rank) or 0 for rank in ranks}
    replicas = {parent_of(pid) if name_of(pid) == FORK_SERVER else pid for pid in replicas}
    expected = streamed("ab")
    for replica in replicas:
        os.kill(replica, signal.SIGKILL)
    assert all(gone(rank, 120) for rank in ranks)
    while (text := streamed("ab")) is None:  # until Ray Serve knows
        time.sleep(0.2)
    assert text == expected


def test_what_does_not_go_with_replicas_is_refused(artifacts: Path):
    arguments = application.Arguments(artifact=str(artifacts / "tp1"), settings={"admin_key": "secret"})
    with pytest.raises(SettingsError, match=r"admin_key opens routes that change one replica.*unset it"):
        application.build(arguments)
    with pytest.raises(ValueError, match="autoscale"):
        application.Arguments(artifact="x", autoscale={})
