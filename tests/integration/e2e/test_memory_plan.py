"""Plans of memory against what a server of a model of a quarter GB takes once its cache is full: within 10 %."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.model import prompts, write_llama
from bench.process_groups import memory_of
from nxd_infer.util.memory import available_memory
from tests.support.http.http_servers import ROOT, ServerProcess

SLOTS, LENGTH = 4, 1024
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def nxd_infer(*arguments):
    return [sys.executable, "-m", "nxd_infer.cli.main", *map(str, arguments)]


def told(words, text):
    """The bytes that follow ``words``."""
    found = re.search(rf"{words}\s+([\d.]+) (\w+)", text)
    assert found is not None, text
    number, unit = found.groups()
    return float(number) * UNITS[unit]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden": 1024, "heads": 16, "kv_heads": 16, "intermediate": 2816, "layers": 6}
    return write_llama(tmp_path_factory.mktemp("planned") / "model", vocab=8192, max_len=LENGTH, **sizes)


@pytest.fixture(scope="module", params=[(2, []), (1, ["--quantize", "int8"])], ids=["tp2", "int8"])
def traced(request, model, tmp_path_factory):
    """The artifact, and what the trace planned for serving it."""
    tp, more = request.param
    out = tmp_path_factory.mktemp("planned") / "artifact"
    command = nxd_infer("trace", model, "--out", out, "--tp", tp, "--batch-sizes", f"1,{SLOTS}", *more)
    command += ["--prompt-buckets", "128,512", "--max-len", str(LENGTH)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT).stdout
    yield out, told("memory, serving +about", text)


def serve(artifact, *more):
    return ServerProcess(nxd_infer("serve", artifact, "--port", "0", *more)).wait_ready()


def filled(server, model):
    """The answers to prompts that fill the cache, and the memory of all processes after them."""
    asked = [{"prompt": one, "max_tokens": 8, "temperature": 0} for one in prompts(model, SLOTS, LENGTH - 10, 0)]
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(lambda one: server.post("/v1/completions", one).json(), asked))
    texts = [(answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) for answer in answers]
    return texts, memory_of(server.process.pid)


def test_plans_are_close_to_what_a_server_takes(traced, model):
    artifact, foretold = traced
    server = serve(artifact)
    try:
        planned = told("memory: about", server.log)
        texts, held = filled(server, model)
        print(f"traced {foretold / 2**20:.0f}, served {planned / 2**20:.0f}, held {held / 2**20:.0f} MiB")
        assert foretold == pytest.approx(held, rel=0.1) and planned == pytest.approx(held, rel=0.1)
        assert server.stop() == 0
    finally:
        server.kill()

    # With room for two and a half slots; other processes change what is available until the server reads it.
    budget = planned - (SLOTS - 2.5) * told("a scratch slot of", server.log)
    for left in reversed(range(5)):
        try:
            server = serve(artifact, "--memory-fraction", budget / available_memory())
        except AssertionError:
            if not left:
                raise
            continue
        if server.metric("nxd_slots") < SLOTS:
            break
        server.kill()
    try:
        slots = int(server.metric("nxd_slots"))
        assert 0 < slots < SLOTS and f"({slots} slots" in server.log
        small, held = filled(server, model)
        print(
            f"with {slots} slots: planned {told('memory: about', server.log) / 2**20:.0f}, held {held / 2**20:.0f} MiB"
        )
        assert [count for _, count in small] == [count for _, count in texts] == [8] * SLOTS
        assert told("memory: about", server.log) == pytest.approx(held, rel=0.1)
        assert server.stop() == 0
    finally:
        server.kill()


def test_what_does_not_fit_is_refused_before_anything_is_loaded(traced):
    artifact, _ = traced
    command = nxd_infer("serve", artifact, "--port", "0", "--memory-fraction", "0.0001")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == 1 and "loading" not in ended.stderr
    for words in ("are needed at least", "= weights", "+ cache", "memory_fraction", "--max-len"):
        assert words in ended.stderr
