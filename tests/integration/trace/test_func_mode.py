"""func mode: real rank processes, real weights, the eager backend."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.errors import TraceConfigError, TraceError
from nxd_infer.trace.ranks import from_function
from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.python_command import python_code
from tests.support import traced_models as models
from tests.support.forks import kept
from tests.support.processes import command_of, descendants, gone, wait_until

LIMIT = 600.0


def trace(func, example, **more):
    arguments = {"backend": "eager", "tp_degree": 2, "trace_timeout": LIMIT, **more}
    return nxd.trace.parallel_model_trace(func, example, **arguments)


def _environment() -> dict[str, str]:
    """The environment, without what pytest and the import of torch's compiler write."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHINDUCTOR"))}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The net at degree 2, its artifact and what progress said."""
    said: list[tuple] = []
    before = descendants(os.getpid())
    environment = _environment()
    with trace(models.net, models.inputs(), progress=lambda *a: said.append(a)) as model:
        nxd.trace.parallel_model_save(model, tmp_path_factory.mktemp("func") / "artifact")
        report = model.trace_report
        yield model, said, report
    assert _environment() == environment
    assert descendants(os.getpid()) <= before


def test_the_traced_model_equals_plain_pytorch_and_keeps_its_cache(traced):
    model, _, _ = traced
    steps = [(torch.tensor([i, i + 3]), torch.tensor([i, (2 * i) % models.LENGTH])) for i in range(4)]
    model.reset_states()
    for (tokens, position), want in zip(steps, models.expected(steps), strict=True):
        got = model(tokens, position)
        assert isinstance(got, tuple) and len(got) == 1  # the aliased output stays with the ranks
        assert (got[0] - want).abs().max() <= 1e-5 * want.abs().max()


def test_one_graph_for_both_ranks_and_every_fact_in_the_manifest(traced):
    model, said, report = traced
    manifest = model.manifest
    (bucket,) = manifest.buckets
    assert len(set(bucket.graphs)) == 1 and report["graphs"] == 1
    assert [state.name for state in manifest.states] == ["cache"]
    assert [spec.name for spec in bucket.inputs] == ["tokens", "position"]
    assert manifest.requires == ["inline-weights", "blake3"]
    assert len(manifest.graphs[bucket.graphs[0]].collectives) == 3
    assert {"embed.weight", "up.weight", "down.bias", "head.weight", "scale"} <= {w.name for w in manifest.weights}
    layout = manifest.layout["weights"]["up.weight"]
    assert layout["logical"] == {"up.weight": [models.INNER, models.WIDTH]} and len(layout["ranks"]) == 2
    assert said[0][:3] == ("trace ranks", 0, 2) and said[-1][1] == said[-1][2]
    for stage in {entry[0] for entry in said}:
        done = [entry[1] for entry in said if entry[0] == stage]
        assert done == sorted(done)


def test_no_weight_is_in_the_graph_and_the_artifact_runs_without_the_models_code(traced, tmp_path):
    """The artifact is read by a process that can import neither the model nor this test."""
    model, _, _ = traced
    path = model.artifact.path
    for file in (path / "graphs").rglob("*"):
        assert file.is_dir() or file.suffix == ".json"
    nxd.trace.parallel_model_save(model, tmp_path / "artifact")
    (tokens, position), (want,) = models.inputs(), models.expected([models.inputs()])
    code = f"""
        import sys, torch, nxd_infer as nxd
        if __name__ == "__main__":
            with nxd.trace.parallel_model_load({str(tmp_path / "artifact")!r}) as model:
                got = model(torch.tensor({tokens.tolist()}), torch.tensor({position.tolist()}))[0]
                assert not any(m.startswith("tests.trace") for m in sys.modules)
                print(got.double().tolist())
    """
    script = tmp_path / "load.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(Path(nxd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    assert (got - want.double()).abs().max() <= 1e-5 * want.abs().max()


def test_tracing_again_gives_the_same_artifact(traced, tmp_path):
    model, _, _ = traced
    with trace(models.net, models.inputs(), artifact_dir=tmp_path / "again", max_parallel_compilations=1):
        first = (model.artifact.path / MANIFEST_NAME).read_bytes()
        assert (tmp_path / "again" / MANIFEST_NAME).read_bytes() == first
    server = kept("nxd_infer.trace.ranks.imports")
    assert server is not None and server._forked, "its ranks have imported torch again"


def test_loader_mode_gives_the_same_graphs_and_weights(traced):
    model, _, _ = traced
    for more in ({}, {"spmd_mode": True}):
        other = trace(
            lambda: models.net(seed=5),
            models.inputs(),
            checkpoint_loader_callable=models.state_dict,
            inline_weights_to_neff=False,
            **more,
        )
        mine, theirs = model.manifest, other.manifest
        assert [bucket.graphs for bucket in mine.buckets] == [bucket.graphs for bucket in theirs.buckets]
        assert mine.weight_schema == theirs.weight_schema
        assert {n: f for n, f in mine.files.items() if n.startswith(("weights", "graphs"))} == {
            n: f for n, f in theirs.files.items() if n.startswith(("weights", "graphs"))
        }
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


def test_a_collective_in_a_throttled_func_is_an_error_that_says_why():
    with pytest.raises(TraceError, match="max_parallel_compilations is below tp_degree=2") as caught:
        trace(models.communicates, (torch.zeros(4),), max_parallel_compilations=1)
    assert caught.value.rank == 0 and "in communicates" in caught.value.remote_traceback


def test_decision_12_ranks_that_would_wait_for_ever_are_refused():
    with pytest.raises(TraceError, match=r"collective 1 is all_reduce\(.*\) on rank 0, none on rank 1"):
        trace(models.uneven, (torch.zeros(4),))


@pytest.mark.parametrize(
    ("func", "message", "rank"),
    [
        (models.fails_on_rank_one, "rank 1: ValueError: no weights for this rank", 1),
        (models.dies, "ended with status 3 while tracing", None),
    ],
)
def test_a_func_that_fails_is_reported_with_its_rank_and_nothing_is_left(func, message, rank):
    before = descendants(os.getpid())
    with pytest.raises(TraceError, match=message) as caught:
        trace(func, (torch.zeros(4),))  # before the other one has slept
    if rank is not None:
        assert caught.value.rank == rank and "fails_on_rank_one" in caught.value.remote_traceback
    assert descendants(os.getpid()) <= before


def test_how_far_a_rank_was_is_known_though_another_failed_first():
    """What it had said of it was dropped: of two that ended while tracing, one ended "before func ran"."""
    mine, theirs = multiprocessing.Pipe()
    first, other = (from_function._Rank(ChildProcess(python_code("sys.exit(3)")), mine, rank) for rank in (1, 0))
    theirs.send(["place", "func"])
    theirs.close()
    ((rank, (_, _, message, _)),) = from_function._other_failures([other, first], first)
    assert (rank, message) == (0, "the process of rank 0 ended with status 3 while tracing (func)")
    first.process.end(patience=60)


def test_of_several_failures_the_cause_is_raised():
    """A collective fails because of another rank, which raised, or ended without a word."""
    from nxd_infer.trace.ranks import from_function

    consequence = (0, ["error", "CollectiveError", "a peer is gone", ""])
    died = (2, ["error", from_function._DIED, "the process of rank 2 was ended by SIGKILL", ""])
    for cause, rank in ((died, 2), ((1, ["error", "ValueError", "its own", ""]), 1)):
        with pytest.raises(TraceError, match=cause[1][2]) as caught:
            from_function._raise_failure([consequence, cause])
        assert caught.value.rank == rank
    with pytest.raises(TraceError, match="its own"):  # the other's end may be a consequence, or the other way round
        from_function._raise_failure([died, (3, ["error", "ValueError", "its own", ""])])


def test_a_func_that_never_returns_ends_at_the_timeout():
    before = descendants(os.getpid())
    with pytest.raises(TraceError, match=r"rank 0 \(.*\); raise trace_timeout"):
        trace(models.sleeps, (torch.zeros(4),), tp_degree=1, trace_timeout=5.0)
    assert descendants(os.getpid()) <= before


def test_decision_18_meta_tensors_that_lost_their_weights_are_refused(tmp_path):
    """``load_state_dict`` says that all keys matched, and the module has no weights."""
    from nxd_infer.trace.ranks import one_rank

    with torch.device("meta"):
        module = models.Plus()
    assert str(module.load_state_dict({"weight": torch.ones(4)})) == "<All keys matched successfully>"
    with pytest.raises(TraceError, match=r"'weight' of Plus is on the meta device.*checkpoint_loader_callable"):
        one_rank.require_values(module)


def test_decision_19_weights_are_stored_contiguously_whatever_their_strides():
    from nxd_infer.trace.ranks import one_rank

    module = torch.nn.Linear(3, 4)
    module.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    module.register_buffer("row", torch.ones(1).expand(5))
    one_rank.require_values(module)
    assert module.weight.stride() == (3, 1) and module.row.stride() == (1,)
    assert torch.equal(module.weight, torch.arange(12.0).reshape(3, 4).t())


# --- what a spawned process can import ----------------------------------------------------------------


def test_decision_20_a_lambda_travels_with_cloudpickle_and_is_refused_without(monkeypatch):
    import importlib.util

    from nxd_infer.trace.ranks import from_function
    from nxd_infer.trace.request import TraceRequest

    value = 3.0
    request = TraceRequest(lambda: models.plus(value), [], 1, "eager", {})
    import pickle

    assert pickle.loads(from_function.pack(request)).func()[0].value == 3.0
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cloudpickle" else found(name))
    with pytest.raises(TraceConfigError, match="it is a lambda"):
        from_function.pack(request)

    def local():
        return models.plus()

    request.func = local
    with pytest.raises(TraceConfigError, match=r"local is defined inside another function.*top level of a module"):
        from_function.pack(request)


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, nxd_infer as nxd\n"
        "def build():\n    return torch.nn.Linear(2, 2)\n"
        "nxd.trace.parallel_model_trace(build, torch.ones(1, 2), backend='eager')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(nxd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode != 0 and "put the call under `if __name__ == '__main__':`" in done.stderr
    assert done.stderr.count("Traceback") == 1 and "TraceConfigError: rank 0: the script calls" in done.stderr


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


@pytest.mark.parametrize("how", ["-", "-c"])
def test_a_program_without_a_file_traces_what_it_defines(how, tmp_path):
    """From standard input there is no script that a rank could import; func travels by value."""
    command = [sys.executable, how, *([STANDARD_INPUT] if how == "-c" else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(nxd.__file__).parents[1])}
    done = subprocess.run(command, input=STANDARD_INPUT, env=environment, cwd=tmp_path, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert "RESULT [3.0, 3.0]" in done.stdout, done.stderr


def test_a_script_that_fails_in_a_rank_is_told_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, nxd_infer as nxd\n"
        "def build():\n    return torch.nn.Linear(2, 2)\n"
        "if __name__ == '__main__':\n    nxd.trace.parallel_model_trace(build, torch.ones(1, 2), backend='eager', "
        "tp_degree=2)\n"
        "else:\n    raise KeyError('only the caller has it')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(nxd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert re.search(r"nxd_infer\.errors\.TraceError: rank [01]: KeyError: 'only the caller has it'", done.stderr)
    assert done.stderr.count("Traceback") == 2


def test_a_rank_that_never_reads_a_large_request_ends_at_the_timeout(tmp_path):
    """A megabyte does not fit into a pipe; the script hangs where a rank imports it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import time
            if __name__ != "__main__":
                time.sleep(600)
            import torch
            import nxd_infer as nxd
            from tests.support import traced_models as models
            if __name__ == "__main__":
                nxd.trace.parallel_model_trace(models.plus, torch.ones(1 << 18, 4), backend="eager", trace_timeout=5)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600, env=environment)
    assert "did not end within trace_timeout" in done.stderr


def test_killing_the_caller_ends_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, nxd_infer as nxd\nfrom tests import traced_models as models\n"
        "if __name__ == '__main__':\n"
        "    nxd.trace.parallel_model_trace(models.sleeps, torch.ones(4), backend='eager')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(nxd.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, script], env=environment, start_new_session=True)
    try:
        ranks: set[int] = set()

        def started() -> set[int]:
            return {pid for pid in descendants(process.pid) if "nxd_infer.trace.ranks" in command_of(pid)}

        wait_until(lambda: ranks.update(started()) or ranks)
        time.sleep(3)
    finally:
        process.kill()
        process.wait()
    assert all(gone(pid, 60) for pid in ranks)


def test_a_signal_as_its_directory_is_made_leaves_nothing(tmp_path, monkeypatch):
    make = Path.mkdir

    def interrupted(self, *args, **options):
        make(self, *args, **options)
        if self.name.startswith(".nxd-trace-"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trace(models.plus, (torch.zeros(4),), func_kwargs={"value": 1.0}, artifact_dir=tmp_path / "artifact")
    assert list(tmp_path.iterdir()) == []


def test_two_traces_at_once_do_not_meet():
    """The reference fixes one port for every trace on a host."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        traces = [
            pool.submit(trace, models.plus, (torch.zeros(4),), func_kwargs={"value": value}) for value in (1.0, 2.0)
        ]
        found = [future.result(timeout=600) for future in traces]
    texts = [next((model.artifact.path / "graphs").glob("*/ir.json")).read_text() for model in found]
    assert ["1.0" in texts[0], "2.0" in texts[1], "2.0" in texts[0]] == [True, True, False]
    for model in found:
        model.close()
