"""Faults of two copies of two ranks each, while sixteen streams are in flight: every stream ends with the text that is
expected of it or with a clear error within its deadline, and afterwards nothing is left over."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from nxd_server.errors import DEADLINE_GRACE
from tests.support.http.http_artifacts import ONE_LAYER, PROMPTS, greedy_texts, real_server
from tests.support.http.http_servers import http_request, is_error, raw, wait_for
from tests.support.http.load import COMPLETIONS, Load, body_of, rank_pids
from tests.support.processes import gone, stopped
from tests.support.tiny_models import write_tiny

RANKS, SLOTS, STREAMS, TOKENS = 4, 4, 16, 24
DEADLINE, STUCK = 60, 6
"""Seconds: of a request, and of a step after which its ranks are given up."""
ADMIN = {"headers": {"authorization": "Bearer admin"}}


def copies(server):
    (model,) = server.get("/health").json()["models"].values()
    return model["copies"]


def is_whole(server):
    """Both copies are ready, and all of their ranks run."""
    return [copy["status"] for copy in copies(server)] == ["ready"] * 2 and all(rank_pids(server))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    write_tiny("llama", root / "other", seed=1, **ONE_LAYER)
    return root


@pytest.fixture(scope="module")
def texts(llama, root):
    """By checkpoint."""
    return [greedy_texts(path, PROMPTS, TOKENS) for path in (llama.parent / "model", root / "other")]


@contextlib.contextmanager
def two_copies(artifact, root):
    options = {"replicas": 2, "call-timeout": STUCK, "request-timeout": DEADLINE, "max-restarts": 99}
    options |= {"admin-key": "admin", "weights-root": root}
    with real_server(artifact, *(f"--{name}={value}" for name, value in options.items())) as server:
        wait_for(lambda: is_whole(server))
        yield server


@pytest.fixture(scope="module")
def server(llama, root):
    with two_copies(llama, root) as server:
        yield server


@pytest.fixture(scope="module")
def versions(texts):
    """What is expected of the weights so far, by version."""
    return texts[:1]


def leftovers(server):
    """What a server holds for requests and for ranks."""
    process = psutil.Process(server.process.pid)
    names = ("num_requests_running", "num_requests_waiting", "queue_tokens", "slots_free", "kv_cache_usage_perc")
    held = {name: server.metric(f"nxd_{name}") for name in names}
    files = process.num_fds() - len(process.net_connections("inet"))  # those of clients stay for the next request
    return {**held, "files": files, "processes": len(process.children(recursive=True))}


@contextlib.contextmanager
def sixteen_streams(server, versions, files=0):
    """In flight all the time. Afterwards both copies are whole, and hold no more than before, but for so many
    ``files``."""
    before, late = leftovers(server), DEADLINE + DEADLINE_GRACE + 30
    with Load(server, *versions, clients=STREAMS, max_tokens=TOKENS, stream=True, timeout=late) as load:
        go_on(load)
        yield load
        wait_for(lambda: is_whole(server), message="a copy is not ready again")
        go_on(load)
    assert not (load.wrong or load.refused or load.lost), (load.wrong[:2], load.refused[:2], load.lost[:2])
    before["files"] += files
    wait_for(lambda: leftovers(server) == before, 60, f"{before} before, {leftovers(server)} now")


def go_on(load):
    """Wait for an answer for each client."""
    seen = len(load.answers)
    wait_for(lambda: len(load.answers) >= seen + STREAMS, message="no more answers come")


def lost(number, rank):
    smoke = [pytest.mark.smoke] if (number, rank) == (signal.SIGKILL, 3) else []
    return pytest.param(number, rank, id=f"{number.name}-{rank}", marks=smoke)


LOST = [lost(number, rank) for number in (signal.SIGKILL, signal.SIGSTOP) for rank in range(RANKS)]


@pytest.mark.parametrize("number, rank", LOST)
def test_a_rank_that_is_killed_or_stopped_costs_what_its_copy_had_begun(server, versions, number, rank):
    pids, restarts = rank_pids(server), server.metric("nxd_engine_restarts_total")
    with sixteen_streams(server, versions) as load:
        os.kill(pids[rank], number)
        server.wait_metric("nxd_engine_restarts_total", restarts + 1)
    assert len(load.cut) <= SLOTS and {error["code"] for error in load.cut} <= {"engine_failed"}, load.cut
    own = {*pids[:2]} if rank < 2 else {*pids[2:]}
    assert {*pids} & {*rank_pids(server)} == {*pids} - own, "only this copy has new ranks"
    assert all(gone(pid, 60) for pid in own)


def test_a_rank_ten_times_slower_costs_time_only(server, versions):
    pids, over = rank_pids(server), threading.Event()

    def slow():
        while not over.is_set():
            with stopped(pids[1]):
                time.sleep(0.045)
            time.sleep(0.005)

    with sixteen_streams(server, versions) as load, ThreadPoolExecutor() as pool:
        pool.submit(slow)
        try:
            go_on(load)
            go_on(load)
        finally:
            over.set()
    assert not load.cut and rank_pids(server) == pids


def test_clients_that_vanish_leave_nothing(server, versions):
    """Half of them with the answer's beginning, some by a reset."""
    body = json.dumps({**body_of("the"), "max_tokens": 200, "stream": True}).encode()
    before = server.metric("nxd_client_disconnects_total")
    with sixteen_streams(server, versions) as load:
        for number in range(STREAMS):
            with raw(server, http_request(COMPLETIONS, body)) as connection:
                if number % 2:
                    assert connection.recv(1000)
                if number % 3:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: server.metric("nxd_client_disconnects_total") > before)
    assert not load.cut


def test_a_full_disk_refuses_new_weights_and_a_rank_lost_between_two_swaps_does_not_mix_them(server, versions, texts):
    """As if the disk were full: the server may write no file of more than 1000 bytes."""
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)

    def swap():
        return server.post("/v1/weights", {"path": "other", "timeout": 300}, **ADMIN)

    versions += [texts[1], texts[1]]
    with sixteen_streams(server, versions, files=RANKS) as load, ThreadPoolExecutor() as pool:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))
        is_error(swap(), 503, code="no_space")
        go_on(load)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
        assert [copy["weight_version"] for copy in copies(server)] == [0, 0] and not load.cut
        answer = pool.submit(swap)
        wait_for(lambda: copies(server)[0]["weight_version"] == 1)
        os.kill(rank_pids(server)[3], signal.SIGKILL)
        answer = answer.result(300)
        assert answer.status_code == 200 or "1 of 2 copies" in is_error(answer, 409)["message"], answer.text
        wait_for(lambda: is_whole(server))
        assert swap().json()["version"] == 2
    assert [copy["weight_version"] for copy in copies(server)] == [2, 2] and len(load.cut) <= SLOTS


def test_a_signal_to_end_cuts_no_stream(server, versions):
    """It is the last test: the server ends."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    with Load(server, *versions, clients=STREAMS, max_tokens=TOKENS, stream=True) as load:
        go_on(load)
        assert server.stop(signal.SIGTERM) == 0
    assert not (load.cut or load.wrong), (load.cut, load.wrong[:2])
    assert not [error for error in load.lost if "incomplete" in error], load.lost
    assert all(gone(process.pid, 60) for process in processes)
