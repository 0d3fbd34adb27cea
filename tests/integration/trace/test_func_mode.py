"""func mode: real rank processes, real weights, the eager backend."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.errors import TraceError
from tests.support import traced_models as models
from tests.support.processes import command_of, descendants, gone, wait_until

ROOT = str(Path(nxd.__file__).parents[1])


def trace(func, example, **more):
    arguments = {"backend": "eager", "tp_degree": 2, "trace_timeout": 600.0, **more}
    return nxd.trace.parallel_model_trace(func, example, **arguments)


def _environment() -> dict[str, str]:
    """The environment, without what pytest and the import of torch's compiler write."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHINDUCTOR"))}


@pytest.fixture(scope="module")
def model():
    """The net at degree 2."""
    before, environment = descendants(os.getpid()), _environment()
    with trace(models.net, models.inputs()) as model:
        yield model
    assert _environment() == environment
    assert descendants(os.getpid()) <= before


@pytest.mark.smoke
def test_the_traced_model_equals_plain_pytorch_and_keeps_its_cache(model):
    steps = [(torch.tensor([i, i + 3]), torch.tensor([i, (2 * i) % models.LENGTH])) for i in range(4)]
    model.reset_states()
    for (tokens, position), want in zip(steps, models.expected(steps), strict=True):
        got = model(tokens, position)
        assert isinstance(got, tuple) and len(got) == 1  # the aliased output stays with the ranks
        assert (got[0] - want).abs().max() <= 1e-5 * want.abs().max()


def run_script(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """A user's script, which finds the package and not the tests."""
    (tmp_path / "script.py").write_text("\n".join(["import sys, torch, nxd_infer as nxd", *lines]))
    command = [sys.executable, tmp_path / "script.py"]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)


def test_no_weight_is_in_the_graph_and_the_artifact_runs_without_the_models_code(model, tmp_path):
    """The artifact is read by a process that imports neither the model nor this test."""
    for file in (model.artifact.path / "graphs").rglob("*"):
        assert file.is_dir() or file.suffix == ".json"
    nxd.trace.parallel_model_save(model, tmp_path / "artifact")
    (tokens, position), (want,) = models.inputs(), models.expected([models.inputs()])
    done = run_script(
        tmp_path,
        "if __name__ == '__main__':",
        "    with nxd.trace.parallel_model_load('artifact') as model:",
        f"        got = model(torch.tensor({tokens.tolist()}), torch.tensor({position.tolist()}))[0]",
        "        assert not any(name.startswith('tests') for name in sys.modules)",
        "        print(got.double().tolist())",
    )
    assert done.returncode == 0, done.stderr
    got = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    assert (got - want.double()).abs().max() <= 1e-5 * want.abs().max()


def test_tracing_again_or_in_loader_mode_gives_the_same_artifact(model, tmp_path):
    with trace(models.net, models.inputs(), artifact_dir=tmp_path / "again", max_parallel_compilations=1):
        first = (model.artifact.path / MANIFEST_NAME).read_bytes()
        assert (tmp_path / "again" / MANIFEST_NAME).read_bytes() == first
    loaded = {"checkpoint_loader_callable": models.state_dict, "inline_weights_to_neff": False}
    other = trace(lambda: models.net(seed=5), models.inputs(), spmd_mode=True, **loaded)
    mine, theirs = model.manifest, other.manifest
    assert [bucket.graphs for bucket in mine.buckets] == [bucket.graphs for bucket in theirs.buckets]
    assert mine.weight_schema == theirs.weight_schema
    files = [
        {name: file for name, file in manifest.files.items() if name.startswith(("weights", "graphs"))}
        for manifest in (mine, theirs)
    ]
    assert files[0] == files[1]
    other.close()


def test_ranks_whose_graphs_differ_each_run_their_own():
    """The reference gives every rank the last rank's graphs. Weights and constants of one rank alone stay with it."""
    x = torch.zeros(4)
    with trace(models.bias_on_first, (x,)) as model:
        assert len(set(model.buckets[0].graphs)) == 2
        assert torch.equal(model(x), torch.tensor([1.0, 2.0, 3.0, 4.0]) * 3 + 5)


def test_collectives_and_initialisation_in_func_work_when_all_ranks_run():
    with trace(models.communicates, (torch.zeros(4),)) as model:
        assert torch.equal(model(torch.zeros(4)), torch.full((4,), 3.0))
    with pytest.raises(TraceError, match="max_parallel_compilations is below tp_degree=2") as caught:
        trace(models.communicates, (torch.zeros(4),), max_parallel_compilations=1)
    assert caught.value.rank == 0 and "in communicates" in caught.value.remote_traceback


@pytest.mark.parametrize(
    ("func", "more", "message"),
    [
        (models.fails_on_rank_one, {}, "rank 1: ValueError: no weights for this rank"),  # before the other has slept
        (models.dies, {}, "ended with status 3 while tracing"),
        (models.uneven, {}, r"collective 1 is all_reduce\(.*\) on rank 0, none on rank 1"),  # they would wait for ever
        (models.sleeps, {"tp_degree": 1, "trace_timeout": 2.0}, r"rank 0 \(.*\); raise trace_timeout"),
    ],
    ids=["raises", "dies", "differs", "never returns"],
)
def test_a_func_that_fails_is_reported_with_its_rank_and_nothing_is_left(func, more, message):
    before = descendants(os.getpid())
    with pytest.raises(TraceError, match=message) as caught:
        trace(func, (torch.zeros(4),), **more)
    if func is models.fails_on_rank_one:
        assert caught.value.rank == 1 and "fails_on_rank_one" in caught.value.remote_traceback
    assert descendants(os.getpid()) <= before


# --- scripts ------------------------------------------------------------------------------------------


def test_a_script_without_a_main_guard_is_told_so_once(tmp_path):
    call = "nxd.trace.parallel_model_trace(build, torch.ones(1, 2), backend='eager', tp_degree=2)"
    done = run_script(tmp_path, "def build(): return torch.nn.Linear(2, 2)", call)
    assert done.returncode != 0 and "put the call under `if __name__ == '__main__':`" in done.stderr
    assert done.stderr.count("Traceback") == 1 and re.search(
        "TraceConfigError: rank [01]: the script calls", done.stderr
    )


STANDARD_INPUT = """
import torch, nxd_infer as nxd

def outer(scale):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * scale

    return lambda: (Scaled(), {})

with nxd.trace.parallel_model_trace(outer(3.0), torch.zeros(2), backend="eager") as model:
    print("RESULT", model(torch.ones(2)).tolist())
"""


def test_a_program_without_a_file_traces_what_it_defines(tmp_path):
    """From standard input there is no script that a rank could import; func travels by value."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-"], input=STANDARD_INPUT, env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert "RESULT [3.0, 3.0]" in done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_caller_ends_the_ranks(number: int, tmp_path: Path):
    """Also Ctrl-C, after which no file is left."""
    code = "from tests.support import traced_models as models\nimport nxd_infer as nxd, torch\n"
    code += "nxd.trace.parallel_model_trace(models.sleeps, torch.ones(4), backend='eager')\n"
    env = {**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=ROOT)
    try:
        ranks: set[int] = set()

        def started() -> set[int]:
            return {pid for pid in descendants(process.pid) if "nxd_infer.trace.ranks" in command_of(pid)}

        wait_until(lambda: ranks.update(started()) or ranks or process.poll() is not None, 600)
        assert ranks
        process.send_signal(number)
        assert process.wait(60) == -number
    finally:
        process.kill()
        process.wait()
    assert all(gone(pid, 60) for pid in ranks)
    assert number == signal.SIGKILL or not [path for path in tmp_path.iterdir() if "nxd" in path.name]


def test_two_traces_at_once_do_not_meet():
    """The reference fixes one port for every trace on a host."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        traces = [
            pool.submit(trace, models.plus, (torch.zeros(4),), func_kwargs={"value": value}) for value in (1.0, 2.0)
        ]
        traced = [future.result(timeout=600) for future in traces]
    texts = [next((model.artifact.path / "graphs").glob("*/ir.json")).read_text() for model in traced]
    assert ["1.0" in texts[0], "2.0" in texts[1], "2.0" in texts[0]] == [True, True, False]
    for model in traced:
        model.close()
