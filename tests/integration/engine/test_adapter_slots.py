"""Adapters of a running engine: requests with different ones in one batch, and slots that are freed and taken again."""

from __future__ import annotations

import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nxd_infer.cli.main import app
from nxd_infer.runtime.updates.adapters import AdapterUpdate
from nxd_infer.verify import verify_artifact
from nxd_server import LLM, SamplingParams
from nxd_server.engine.request import FinishEvent
from nxd_server.errors import AdapterConflictError, RequestError, UnknownModelError
from tests.support.adapter_files import merge, write_adapter
from tests.support.engine.real_artifacts import prompt_of, reference_generate, trace_llama

TOKENS = 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0)
PROMPTS = [prompt_of(length) for length in (3, 8, 9, 20)]


@pytest.fixture(scope="module")
def model_dir():
    return trace_llama(2)[0]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, model_dir):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, model_dir, rank=2 + i, seed=i) for i, name in enumerate(("x", "y", "z"))}


@pytest.fixture(scope="module")
def expected(model_dir, adapters):
    """By name of the adapter (None for the model itself): each prompt's tokens, and the smallest gap between two."""
    models = {name: merge(model_dir, path, path.with_name(f"merged-{name}")) for name, path in adapters.items()}
    return {name: reference_generate(path, PROMPTS, TOKENS) for name, path in {None: model_dir, **models}.items()}


@pytest.fixture(scope="module")
def llm():
    """Two slots of rank 4, at degree 2."""
    with LLM(trace_llama(2)[1]) as llm:
        yield llm


def check(llm, expected, *names):
    asked = [(prompt, name) for prompt in range(len(PROMPTS)) for name in names]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda one: llm.generate(PROMPTS[one[0]], GREEDY, adapter=one[1])[0].outputs[0], asked)
    for (prompt, name), answer in zip(asked, answers, strict=True):
        tokens, gap = expected[name][prompt]
        if gap > 1e-4:
            assert answer.token_ids == tokens, (prompt, name)


@pytest.mark.smoke
def test_requests_with_several_adapters_share_steps(llm, expected, adapters):
    check(llm, expected, None)
    llm.load_adapter("x", adapters["x"])
    llm.load_adapter("y", str(adapters["y"]))
    assert llm.adapters() == ["x", "y"]
    check(llm, expected, None, "x", "y")
    with pytest.raises(AdapterConflictError, match=r"all 2 slots .* x \(0 running\), y \(0 running\)"):
        llm.load_adapter("z", adapters["z"])
    with pytest.raises(AdapterConflictError, match="'x' already"):
        llm.load_adapter("x", adapters["z"])
    with pytest.raises(UnknownModelError, match="'z'; there are x, y"):
        llm.generate(PROMPTS[0], GREEDY, adapter="z")
    llm.remove_adapter("x")
    llm.load_adapter("z", adapters["z"])
    check(llm, expected, None, "z", "y")
    for name in ("z", "y"):
        llm.remove_adapter(name)
    check(llm, expected, None)


def test_a_slot_is_free_when_its_last_request_has_ended(llm, expected, adapters):
    llm.load_adapter("x", adapters["x"])
    llm.load_adapter("y", adapters["y"])
    seen, go = queue.SimpleQueue(), threading.Event()

    def on_event(event):
        seen.put(event)
        go.wait(60)  # on the engine's thread: the request is certainly not over

    try:
        ticket = llm.engine.submit(PROMPTS[0], GREEDY, on_event, adapter="x")
        seen.get(timeout=60)
        llm.remove_adapter("x")
        assert llm.adapters() == ["y"]
        with pytest.raises(UnknownModelError):
            llm.engine.submit(PROMPTS[0], GREEDY, seen.put, adapter="x")
        with pytest.raises(AdapterConflictError, match=r"x \(1 running\)"):
            llm.load_adapter("x", adapters["z"])
    finally:
        go.set()
    assert ticket.wait(60)
    wanted, gap = expected["x"][0]
    events = [seen.get(timeout=60) for _ in wanted]  # without the first, and with the end
    assert isinstance(events[-1], FinishEvent)
    assert gap < 1e-4 or [event.token for event in events[:-1]] == wanted[1:]
    llm.load_adapter("x", adapters["z"])
    check(llm, {**expected, "x": expected["z"]}, "x", "y")
    for name in ("x", "y"):
        llm.remove_adapter(name)


def test_an_adapter_that_ranks_refuse_is_the_requests_fault(llm, adapters, monkeypatch, caplog):
    """A file that is not what its header says; it is foreseen, and one line of the log."""
    write = AdapterUpdate.write

    def damaged(self, rank):
        file = write(self, rank)
        file.truncate(64)
        return file

    monkeypatch.setattr(AdapterUpdate, "write", damaged)
    for _ in range(3):  # more often than there are slots: each is free again
        with pytest.raises(RequestError, match=r"path: a rank refused .* safetensors") as caught:
            llm.load_adapter("x", adapters["x"])
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)
    assert "a rank refused new weights: rank 0 of 2" in caplog.text and "Traceback" not in caplog.text
    assert llm.adapters() == []


def test_the_example_of_the_document(adapters, tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs/lora.md").read_text()
    (example,) = [block for block in re.findall("```python\n(.*?)```", text, re.S) if "load_adapter" in block]
    (tmp_path / "artifact").symlink_to(trace_llama(2)[1])
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/french").symlink_to(adapters["x"])
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/lora.md", "exec"), names := {})
    assert [len(output.outputs) for output in names["outputs"]] == [1, 1]


def test_an_artifact_with_slots_passes_verify_and_the_command_line_names_what_is_wrong(model_dir, tmp_path):
    assert verify_artifact(trace_llama(2)[1], model_dir).failed == []
    refused = CliRunner().invoke(app, ["trace", str(model_dir), "--out", str(tmp_path / "none"), "--lora-rank", "4"])
    assert refused.exit_code == 2 and "--lora-slots" in refused.output
