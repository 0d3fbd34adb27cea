"""neuronx-cc: its command line, what becomes of it, and the words in which a failure is told. It runs as a program."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends import registry
from nxd_infer.backends.base import arguments_of, check_quantize
from nxd_infer.backends.neuron import compiler, cores
from nxd_infer.errors import BackendUnavailableError, TraceConfigError, TraceError
from tests.support.neuron.machines import FAKE, described

BACKEND = registry.get("neuron")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without devices that has the stand-in for the compiler."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv(cores.ROOT, str(tmp_path))
    monkeypatch.setenv("PATH", os.pathsep.join([str(FAKE / "bin"), os.environ["PATH"]]))


def options(given: Any) -> dict[str, Any]:
    found, ignored = arguments_of(given, BACKEND)
    assert ignored == [], "nothing is ignored: they are this compiler's"
    return BACKEND.options(found)


@pytest.mark.parametrize(
    ("given", "target", "words"),
    [
        ("--target inf2", "inf2", []),
        ("--target=trn1 --model-type=transformer -O1", "trn1", ["--model-type=transformer", "-O1"]),
        (["--auto-cast", "matmult", "--target", "inf2"], "inf2", ["--auto-cast", "matmult"]),
        ({"target": "trn1"}, "trn1", []),
        ("target=inf2 --tensorizer-options='--one --two'", "inf2", ["--tensorizer-options='--one --two'"]),
    ],
)
def test_arguments_go_through_as_they_were_given(given: Any, target: str, words: list[str]) -> None:
    found = options(given)
    assert (found["target"], found["arguments"], found["compiler"]) == (target, words, "2.26.6360.0+fake")
    line = compiler.command(found["target"], found["arguments"])
    assert line[:7] == ["neuronx-cc", "compile", "neuron.hlo", "--framework", "XLA", "--target", target]
    assert line[-2:] == ["--output", "graph.neff"]
    pinned = [] if "--auto-cast" in words else ["--auto-cast=none"]
    assert line[7:-2] == [*pinned, *(word.replace("'", "") for word in words)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, r"neither an Inf2 nor a Trn1 instance: say for which one to compile, by --target inf2 or --target trn1"),
        ("--target trn2", r"there is no target 'trn2': give one of inf2, trn1"),
        ("--target inf2 --target=trn1", r"the targets inf2 and trn1 are both given: leave one out"),
        ("--target", r"there is no target '': give one of inf2, trn1"),
        ("--target inf2 --output x.neff", r"--output is set by this package \(the artifact keeps the NEFF\): leave it"),
        ("--target inf2 --framework XLA", r"--framework is set by this package \(it is XLA\)"),
        ({"target": "inf2", "speed": 1}, r"the neuron backend has the option target and takes arguments of neuronx-cc"),
    ],
)
def test_what_is_no_argument_is_refused(given: Any, text: str) -> None:
    with pytest.raises(TraceConfigError, match=text):
        options(given)


def test_the_machine_is_the_default_target(tmp_path: Path) -> None:
    described(tmp_path, "trn1.2xlarge", 1)
    assert options(None)["target"] == "trn1"


def test_degrees_and_eight_bits_are_refused_before_anything_is_traced() -> None:
    with pytest.raises(TraceConfigError, match="keeps weights as they are, got quantize='int8'"):
        check_quantize(BACKEND, "int8")
    with pytest.raises(TraceConfigError, match=r"tp_degree=3 is none that inf2 can run"):
        BACKEND.prepare_trace(3, options("--target inf2"))
    BACKEND.prepare_trace(12, options("--target inf2"))


def compiled(directory: Path) -> None:
    (directory / compiler.INPUT).write_bytes(b"some HLO")
    compiler.compile_here(directory, options("--target inf2 --model-type=transformer"))


def test_hlo_command_log_and_neff_are_kept_and_nothing_else(tmp_path: Path) -> None:
    """By its reference the compiler has a log of its own where it runs; other files follow from options."""
    graph = tmp_path / "graph"
    graph.mkdir()
    compiled(graph)
    assert {file.name for file in graph.iterdir()} == {*compiler.KEPT} == {*BACKEND.kept}
    assert (graph / compiler.NEFF).read_bytes().endswith(b"inf2\nsome HLO")
    assert "PASS" in (graph / compiler.LOG).read_text()
    command = "neuronx-cc compile neuron.hlo --framework XLA --target inf2 --auto-cast=none --model-type=transformer "
    assert (graph / compiler.COMMAND).read_text() == command + "--output graph.neff\n"
    (log,) = tmp_path.glob("tmp/neuronx-cc-graph-*/log-neuron-cc.txt")
    assert log.read_text() == "more than it prints"


def other_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "neuronx-cc"
    program.write_text(f"#!/bin/sh\nversion='2.26.1.0'\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))


SAYS = 'if [ "$1" = --version ]; then echo "NeuronX Compiler version $version"; exit 0; fi\n'


SEGV = r"SIGSEGV, which is a"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo walking; kill -SEGV $$", rf"neuronx-cc was ended by {SEGV} fault.*walking"),
        ("kill -KILL $$", r"was ended by SIGKILL, most likely for want of memory: compile on a machine"),
        ("echo walking; exit 139", rf"ended with status 139, as a program of its own was ended by {SEGV}.*walking"),
        ("echo NCC_EVRF013; exit 70", r"neuronx-cc ended with status 70: see what it said.*NCC_EVRF013"),
        ("exit 0", r"neuronx-cc ended with status 0 and wrote no NEFF"),
    ],
)
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, text: str) -> None:
    other_compiler(tmp_path, monkeypatch, SAYS + script)
    with pytest.raises(TraceError, match=f"(?s){text}"):
        compiled(tmp_path)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo 'NeuronX Compiler version 2.21.3.0'", r"2.21.3.0 is of an SDK for another torch: install that"),
        ("echo broken >&2; exit 3", r"--version ended with status 3: broken"),
        (None, r"neuronx-cc was not found: install that of the Neuron SDK"),
    ],
)
def test_a_compiler_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, text: str
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        other_compiler(tmp_path, monkeypatch, script)
    with pytest.raises(BackendUnavailableError, match=text):
        compiler.version()
