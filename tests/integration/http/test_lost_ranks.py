"""Ranks lost while something else goes on: a recovery, a swap of all weights, a full disk, a shard cut short."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.http.http_artifacts import LLAMA, ONE_LAYER, PROMPTS, greedy_texts, real_server, trace_tiny
from tests.support.http.http_servers import is_error, wait_for
from tests.support.http.load import COMPLETIONS, TOKENS, Load, body_of, rank_pids
from tests.support.processes import gone
from tests.support.tiny_models import write_tiny

ADMIN = {"headers": {"authorization": "Bearer admin"}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def artifact(root):
    return trace_tiny("llama", "generate", root, **LLAMA)


@pytest.fixture(scope="module")
def texts(root, llama_texts):
    """What the two checkpoints answer: the one that was traced, and ``root / "other"``."""
    write_tiny("llama", root / "other", seed=1, **ONE_LAYER)
    return [llama_texts, greedy_texts(root / "other", PROMPTS, TOKENS)]


@pytest.fixture
def server(root, artifact):
    patient = ("--recovery-timeout", "300", "--max-restarts", "9")
    with real_server(artifact, "--admin-key", "admin", "--weights-root", str(root), *patient) as server:
        yield server


def swap(server, name):
    return server.post("/v1/weights", {"path": name, "timeout": 600}, **ADMIN)


def other_pids(server, pids):
    """The ranks that are there in place of ``pids``, once all of them are."""
    found: list[int] = []

    def there():
        found[:] = [pid for pid in rank_pids(server) if pid]
        return len(found) == len(pids) and not set(found) & set(pids)

    wait_for(there, message="no other ranks were started")
    return found


def errors_of(server):
    """Return the log's lines that are not one-line errors; there must be none."""
    assert "Traceback" not in server.log and "most recent call" not in server.log
    return [line for line in server.lines if " ERROR " in line or " CRITICAL " in line]


def written(pid):
    """Bytes that the process has written to a disk."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"])


def test_ranks_lost_again_while_they_recover_under_load(server, texts):
    """Every answer is right or a 503, and /health reports the progress. Ranks for which there are no descriptors start
    as soon as there are."""
    pid, pids = server.process.pid, rank_pids(server)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with Load(server, *texts) as load:
        wait_for(lambda: len(load.answers) > 20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda: server.log.count("the system does not let the ranks start") >= 2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        pids = other_pids(server, pids)
        health = server.get("/health")
        if health.status_code == 503:  # not ready again yet
            assert health.json()["recovery"]["limit"] == 300
        os.kill(pids[0], signal.SIGKILL)
        other_pids(server, pids)
        wait_for(lambda: server.get("/readyz").status_code == 200)
        seen = len(load.answers)
        wait_for(lambda: len(load.answers) > seen + 20)
    assert not load.wrong, load.wrong[:3]
    assert any("the ranks failed: rank 1 of 2 was ended by SIGKILL" in line for line in errors_of(server))
    assert server.stop() == 0


def test_a_full_disk_during_a_swap_and_during_a_recovery(server, artifact, texts):
    """As if the disk were full: the server and its ranks may write no file of more than 1000 bytes."""
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)

    def fill():
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))

    with Load(server, *texts) as load:
        fill()
        wait_for(lambda: len(load.answers) > 10)
        error = is_error(swap(server, "other"), 503, code="no_space")
        assert "nothing was changed" in error["message"] and "TMPDIR" in error["message"]
        seen = len(load.answers)
        wait_for(lambda: len(load.answers) > seen + 20)
        assert not load.refused and not load.cut
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
        assert swap(server, "other").json()["version"] == 1
        # A recovery needs no room: the weights that were swapped in have theirs already.
        before, pids = written(server.process.pid), rank_pids(server)
        os.kill(pids[1], signal.SIGKILL)
        pids = other_pids(server, pids)
        wait_for(lambda: server.get("/readyz").status_code == 200)
        # Of what is read for the first time in a day the system writes down the time: some pages.
        weights = min(path.stat().st_size for path in artifact.glob("weights/rank_*.safetensors"))
        assert all(written(pid) < weights for pid in pids) and written(server.process.pid) - before < weights
        assert server.post(COMPLETIONS, body_of(PROMPTS[0])).json()["choices"][0]["text"] == texts[1][PROMPTS[0]]
    assert not load.wrong, load.wrong[:3]
    fill()  # also what the ranks share in memory, which no disk has to hold: the recovery has no way
    os.kill(rank_pids(server)[0], signal.SIGKILL)
    assert server.wait() == 1
    (last,) = [line for line in errors_of(server) if "giving up" in line]
    assert "could not be started again: the system does not let the ranks start" in last and "too large" in last


def test_a_shard_that_is_cut_short_while_it_is_served_ends_a_recovery_with_one_line(artifact, tmp_path):
    """It takes its rank along when that reads on."""
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    (file,) = copy.glob("weights/rank_01.safetensors")
    with real_server(copy) as server:
        pids = rank_pids(server)
        os.truncate(file, 4096)
        with contextlib.suppress(httpx.TransportError):  # a probe of the ranks may have found it already
            is_error(server.post(COMPLETIONS, body_of(PROMPTS[0])), 503)
        assert server.wait() == 1
        errors = errors_of(server)
        how = "SIGBUS (a file that it has mapped was cut short"
        assert f"the ranks failed: rank 1 of 2 was ended by {how}" in errors[0]
        (last,) = [line for line in errors if "giving up" in line]
        assert "could not be started again: rank" in last and "rank_01.safetensors" in last
        assert server.log.count("starting the ranks again") == 1, "another start would not help"
        assert all(gone(pid) for pid in pids)
