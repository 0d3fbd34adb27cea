"""Ranks lost beside a full disk, with weights that were swapped in, and to a shard that is cut short."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import httpx

from tests.support.http.http_artifacts import ONE_LAYER, PROMPTS, greedy_texts, real_server
from tests.support.http.http_servers import is_error, wait_for
from tests.support.http.load import COMPLETIONS, TOKENS, Load, body_of, rank_pids
from tests.support.processes import gone
from tests.support.tiny_models import write_tiny


def errors_of(server):
    """Return the log's lines that are not one-line errors; there must be none."""
    assert "Traceback" not in server.log and "most recent call" not in server.log
    return [line for line in server.lines if " ERROR " in line or " CRITICAL " in line]


def written(pid):
    """Bytes that the process has written to a disk."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"])


def test_a_full_disk_during_a_swap_and_during_a_recovery(llama, llama_texts, tmp_path):
    """As if the disk were full: the server and its ranks may write no file of more than 1000 bytes."""
    write_tiny("llama", tmp_path / "other", seed=1, **ONE_LAYER)
    texts = [llama_texts, greedy_texts(tmp_path / "other", PROMPTS, TOKENS)]
    options = ("--admin-key", "admin", "--weights-root", str(tmp_path), "--recovery-timeout", "300")
    with real_server(llama, *options, "--max-restarts", "9") as server:
        limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)

        def fill():
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))

        def swap():
            swapped = {"path": "other", "timeout": 600}
            return server.post("/v1/weights", swapped, headers={"authorization": "Bearer admin"})

        with Load(server, *texts) as load:
            fill()
            wait_for(lambda: len(load.answers) > 10)
            error = is_error(swap(), 503, code="no_space")
            assert "nothing was changed" in error["message"] and "TMPDIR" in error["message"]
            seen = len(load.answers)
            wait_for(lambda: len(load.answers) > seen + 20)
            assert not load.refused and not load.cut
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
            assert swap().json()["version"] == 1
            # A recovery needs no room: the weights that were swapped in have theirs already.
            before = written(server.process.pid)
            os.kill(rank_pids(server)[1], signal.SIGKILL)
            wait_for(lambda: "ready again" in server.log)
            pids = rank_pids(server)
            # Of what is read for the first time in a day the system writes down the time: some pages.
            weights = min(path.stat().st_size for path in llama.glob("weights/rank_*.safetensors"))
            assert all(written(pid) < weights for pid in pids) and written(server.process.pid) - before < weights
            assert server.post(COMPLETIONS, body_of(PROMPTS[0])).json()["choices"][0]["text"] == texts[1][PROMPTS[0]]
        assert not load.wrong, load.wrong[:3]
        fill()  # also what the ranks share in memory, which no disk has to hold: the recovery has no way
        os.kill(pids[0], signal.SIGKILL)
        assert server.wait() == 1
        (last,) = [line for line in errors_of(server) if "giving up" in line]
        assert "could not be started again: the system does not let the ranks start" in last and "too large" in last


def test_a_shard_that_is_cut_short_while_it_is_served_ends_a_recovery_with_one_line(llama, tmp_path):
    """It takes its rank along when that reads on."""
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
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
