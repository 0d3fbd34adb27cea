"""Everything end to end: train -> trace -> save -> load -> serve -> query, then stop cleanly."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_infer import native
from nxd_infer.checkpoint.export import WEIGHTS, consolidate_checkpoint
from nxd_infer.cli import trace
from nxd_infer.cli.console import console, duration, spinner, table, verbatim
from nxd_infer.cli.demo import training
from nxd_infer.cli.demo.client import Answer, ServerError, stream_completion
from nxd_infer.cli.demo.training import CHECKPOINTS, MODEL, TOKENS
from nxd_infer.errors import ArtifactError
from nxd_infer.recipes.rank_processes import run_ranks
from nxd_infer.trace.check import tracing_backend
from nxd_infer.util.child_process import ChildProcess, end_all, end_of_log
from nxd_infer.util.ports import free_port
from nxd_infer.util.python_command import child_environment, python_module
from nxd_infer.util.units import size
from nxd_models.registry import weights

if TYPE_CHECKING:
    from nxd_infer.cli.demo.training import Trained

SAMPLED = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1}
GREEDY = {"max_tokens": 64, "temperature": 0}
QUESTIONS = (
    ('The "with" statement is used to', SAMPLED),
    ("A function definition is an executable statement. Its execution", SAMPLED),
    ("If the expression list", GREEDY),
)
WRITES_PHRASES = 4.0
"""A loss, in nats per token, above which answers are loose words and newlines."""
READY_TIMEOUT, STOP_TIMEOUT, LOAD_TIMEOUT, TRAIN_TIMEOUT = 120.0, 30.0, 180.0, 180.0


def ready(port: int) -> bool:
    """Return whether ``/readyz`` answers 200 now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def server(artifact: Path, port: int, log: Path) -> Iterator[ChildProcess]:
    """Run a server process inside the block; end it with SIGTERM, or SIGKILL if that does not work."""
    command = python_module("nxd_infer.cli.main", "serve", str(artifact), "--port", str(port))
    with log.open("wb") as output:
        process = ChildProcess(command, environment=child_environment(), stdout=output, stderr=output)
        try:
            yield process
        finally:
            end_all([process], patience=STOP_TIMEOUT)


def wait_ready(process: ChildProcess, port: int, log: Path) -> float:
    """Return the seconds until the server is ready. Raises ServerError with the end of its log on timeout."""
    start = time.monotonic()
    while not ready(port):
        if not process.running or time.monotonic() - start > READY_TIMEOUT:
            state = "ended" if not process.running else f"is not ready after {READY_TIMEOUT:.0f} s"
            raise ServerError(f"the server {state}; the end of its log:\n{end_of_log(log)}")
        time.sleep(0.05)
    return time.monotonic() - start


def ask(port: int) -> list[Answer]:
    """Send the prompts one after another and print each answer as it streams in."""
    answers = []
    for prompt, sampling in QUESTIONS:
        how = "greedy" if sampling is GREEDY else f"temperature {sampling['temperature']}, seed {sampling['seed']}"
        console.print(f"\n({how})", style="dim", markup=False)
        verbatim(prompt, bold=True)
        answers.append(stream_completion(port, prompt, sampling, verbatim))
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


def train(directory: Path, seconds: float, tp: int) -> Trained:
    """Train on ``tp`` rank processes, which save a checkpoint; write its full weights into the model directory."""
    with spinner("writing the text and its tokenizer"):
        training.prepare(directory)
    if native.availability().ok and not native.is_built():
        with spinner("building the native operators, only this once"):
            native.load()  # ranks communicate faster through its shared memory than over sockets
    command = python_module(training.__name__, str(directory), str(seconds), str(os.getpid()))
    try:
        run_ranks(command, tp, directory / "training.log", seconds + TRAIN_TIMEOUT)
    finally:
        console.show_cursor()  # a killed rank leaves it hidden
    (directory / training.MODEL / WEIGHTS).unlink(missing_ok=True)  # from an earlier demo in this directory
    consolidate_checkpoint(directory / training.CHECKPOINTS, directory / training.MODEL)
    return training.Trained(**json.loads((directory / training.FIGURES).read_text()))


def too_little(trained: Trained, seconds: float) -> str:
    """Return a note if the model has learnt too little to write phrases; else ""."""
    if trained.last_loss < WRITES_PHRASES:
        return ""
    return (
        f"note: {trained.steps} steps in {seconds:g} s leave a loss of {trained.last_loss:.2f}. Answers are "
        f"loose words and newlines above a loss of {WRITES_PHRASES:g}: --seconds {5 * seconds:g} trains a better model"
    )


def parameters(model_dir: Path) -> int:
    """Return the number of parameters in a model directory."""
    source = weights(model_dir)
    return sum(math.prod(source.shape(name)) for name in source.keys())  # noqa: SIM118  (a source is not a mapping)


def run(directory: Path | None, seconds: float, tp: int, backend: str) -> None:
    """Run the demo in ``directory`` (default: a temporary one) and print the results."""
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if directory is not None:
            check_directory(directory)
        tracing_backend(backend)  # before a minute of training
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nxd-infer-demo-")))
        run_in(directory, seconds, tp, backend, start)


def check_directory(directory: Path) -> None:
    """Reject a non-empty directory that is not from an earlier demo, before anything is written."""
    if directory.exists() and not directory.is_dir():
        raise ArtifactError(f"{directory} is not a directory: pass a new one as --dir")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / TOKENS).exists():
        raise ArtifactError(
            f"{directory} has files and is not the directory of an earlier demo (which would be replaced): it is left "
            "alone. Pass a new directory as --dir"
        )


def run_in(directory: Path, seconds: float, tp: int, backend: str, start: float) -> None:
    model_dir, artifact = directory / MODEL, directory / "artifact"
    console.rule(f"1. train a small Llama on the Python language reference, on {tp} rank{'s' * (tp > 1)}")
    trained = train(directory, seconds, tp)
    if note := too_little(trained, seconds):
        console.print(note, markup=False)

    console.rule(f"2. trace the checkpoint for tensor parallel degree {tp}, and save it")
    traced = trace.run(
        model_dir,
        artifact,
        tp_degree=tp,
        batch_sizes=[1, 4],
        prompt_buckets=[32, 128],
        max_len=256,
        dtype="float32",
        backend=backend,
        task="generate",
        checkpoint=str(directory / CHECKPOINTS),
    )

    console.rule("3. load it in a fresh process, without the model's code")
    with spinner("loading"):
        loaded = load_in_fresh_process(artifact)

    console.rule("4. serve it and query it")
    port, log = free_port(), directory / "server.log"
    with server(artifact, port, log) as process:
        with spinner("starting the server"):
            to_ready = wait_ready(process, port, log)
        answers = ask(port)
    if process.returncode != 0:
        raise ServerError(f"the server {process.explain()}; its log is {log}")

    console.print()
    speeds = sorted(answer.tokens_per_second for answer in answers)
    firsts = sorted(answer.first_token for answer in answers)
    table(
        "What happened",
        ("what", "figure"),
        [
            ("model", f"{parameters(model_dir) / 1e6:.1f} M parameters, {trained.steps} steps"),
            ("loss", f"{trained.first_loss:.2f} -> {trained.last_loss:.2f}"),
            ("loss on two held-out chapters", f"{trained.held_out_loss:.2f}"),
            (f"training, {tp} ranks", f"{trained.tokens_per_second:,.0f} tokens/s"),
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
