"""Arguments that contradict each other are refused before anything runs; the plan says what would."""

from __future__ import annotations

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.backends import registry
from nxd_infer.backends.base import arguments_of
from nxd_infer.errors import ArtifactError, ParallelConfigError, TraceConfigError
from nxd_infer.trace import BucketModelConfig, trace_plan
from nxd_infer.util.units import size
from tests.support import toy_artifacts as toy
from tests.support import traced_models as models

X = torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_config": BucketModelConfig()}, "pass inline_weights_to_neff=False"),
        ({"spmd_mode": True, "checkpoint_loader_callable": dict}, "pass inline_weights_to_neff=False"),
        ({"spmd_mode": True, "inline_weights_to_neff": False}, "needs checkpoint_loader_callable"),
        ({"serialization_path": "x"}, "needs spmd_mode=True"),
        ({"checkpoint_loader_callable": {}}, "must be callable"),
        ({"tp_degree": 0}, "tp_degree must be a whole number of at least 1"),
        ({"max_parallel_compilations": 0}, "max_parallel_compilations must be"),
        ({"bucket_config": 3}, "must be a BucketModelConfig"),
        ({"batch_dim": -1}, "batch_dim must be a whole number of at least 0"),
        (
            {
                "batch_dim": 0,
                "bucket_config": {"bucket_kernel": models.padding_kernel},
                "inline_weights_to_neff": False,
            },
            "batch_dim=0 says what is padded, and a bucket_kernel pads itself",
        ),
        ({"backend": "tpu"}, "there is no backend 'tpu'; backends are"),
        ({"backend": "eager", "compiler_args": "cpp.threads=1"}, "takes no compiler_args"),
        ({"extra_files": {"config.json": "/no/such/file"}}, "there is no file"),
        ({"trace_timeout": -1}, "trace_timeout must be a number of seconds above 0"),
        ({"extra_files": {"../config.json": __file__}}, "not a path inside an artifact"),
        ({"extra_files": {"manifest.json": __file__}}, "a name of the artifact's own"),
        ({"metadata": {"dtype": torch.float32}}, "stored as JSON"),
        ({"compiler_args": "--model-type transformer fast"}, "'fast' is neither key=value, .* nor an argument of neur"),
        (
            {"compiler_args": "-O1 --model-type=transformr"},
            "takes generic, .*; got 'transformr'; did you mean transformer?",
        ),
        ({"compiler_args": "-O9"}, "compiler_args: -O of neuronx-cc takes 1, 2, 3; got '9'"),
        ({"compiler_args": "--tensorizer-options='--one"}, "the quotation mark ' is not closed"),
        ({"compiler_args": 1}, "must be a dictionary, a list of words or a text"),
        ({"compiler_workdir": f"{__file__}/work", "backend": "eager"}, "cannot be made: Not a directory; choose"),
        ({"compiler_args": {"cpp.threads": 2}}, "takes no compiler_args but 'nxd_packed', got {'cpp.threads': 2}"),
        ({"compiler_args": {"nxd_packed": "much"}}, "nxd_packed='much' must be True, False, or the number of bytes"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    # The plan makes no directory.
    for call in (nxd.trace.parallel_model_trace, trace_plan)[: 1 if "compiler_workdir" in arguments else 2]:
        with pytest.raises(TraceConfigError, match=message):
            call(models.plus, X, **arguments)


def test_a_misspelled_option_of_the_compiler_is_told_where_nothing_reads_it():
    with pytest.warns(UserWarning, match="--auto-cst is not in the reference of neuronx-cc; did you mean --auto-cast"):
        trace_plan(models.plus, X, compiler_args="--auto-cst=none --tensorizer-options=x --lnc=1 --verbose info")


@pytest.mark.parametrize(
    ("given", "options", "neuron"),
    [
        (None, {}, []),
        ({"nxd_packed": 2}, {"nxd_packed": 2}, []),
        ("--nxd_packed=2", {"nxd_packed": 2}, []),
        ("--model-type=transformer -O1", {}, ["--model-type=transformer", "-O1"]),
        (["--auto-cast", "none", "-O", "2"], {}, ["--auto-cast", "none", "-O", "2"]),
        (
            "--enable-saturate-infinity nxd_packed=False --target trn1",
            {"nxd_packed": False},
            ["--enable-saturate-infinity", "--target", "trn1"],
        ),
        ("--tensorizer-options='--one --two=3' -O1", {}, ["--tensorizer-options='--one --two=3'", "-O1"]),
        ("nxd_packed=[1]", {"nxd_packed": [1]}, []),
        ("-lnc 1 -lnc=2", {}, ["-lnc", "1", "-lnc=2"]),
        ("--model-type generic --target", {}, ["--model-type", "generic", "--target"]),
    ],
)
def test_words_of_the_neuron_compiler_are_told_from_options_of_the_backend(given, options, neuron):
    assert arguments_of(given, registry.get("cpu")) == (options, neuron)


def test_the_plan_names_once_what_is_ignored():
    table = trace_plan(models.plus, X, compiler_args="--model-type=transformer -O1").table()
    assert table.count("the cpu backend ignores what is for the Neuron compiler: --model-type=transformer -O1") == 1


def test_more_ranks_than_a_machine_can_be_meant_to_hold_are_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("NXD_INFER_MAX_RANKS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(2)))
    for call in (nxd.trace.parallel_model_trace, trace_plan):
        with pytest.raises(TraceConfigError, match=r"tp_degree: .* 1000 .* 2 cores; at most 64 .*MAX_RANKS=1000"):
            call(models.plus, X, backend="eager", tp_degree=1000)
    assert trace_plan(models.plus, X, backend="eager", tp_degree=64).tp_degree == 64
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(100)))
    assert trace_plan(models.plus, X, backend="eager", tp_degree=800).tp_degree == 800
    monkeypatch.setenv("NXD_INFER_MAX_RANKS", "3")
    with pytest.raises(TraceConfigError, match="at most 3 are started"):
        trace_plan(models.plus, X, backend="eager", tp_degree=4)
    path = toy.build(tmp_path / "artifact", degree=4)
    with pytest.raises(ParallelConfigError, match=r"a degree of 4 .* at most 3 "):
        nxd.trace.parallel_model_load(path)


def test_a_directory_of_somebody_elses_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    with pytest.raises(ArtifactError, match="left alone"):
        nxd.trace.parallel_model_trace(models.dies, X, backend="eager", artifact_dir=tmp_path / "letters")


def test_a_reserved_variable_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("NXD_SKIP_RENDEZVOUS", "1")
    with pytest.raises(TraceConfigError, match="unset it"):
        nxd.trace.parallel_model_trace(models.plus, X)


def test_the_plan_counts_bytes_without_memory_for_weights():
    plan = trace_plan(
        models.net,
        models.inputs(),
        tp_degree=2,
        backend="eager",
        checkpoint_loader_callable=models.state_dict,
        states=["cache"],
    )
    count = models.VOCAB // 2 * models.WIDTH * 2 + models.INNER // 2 * (2 * models.WIDTH + 1) + models.WIDTH
    assert plan.weight_bytes == 4 * (count + 2)  # and the two scales
    assert plan.state_bytes == 4 * models.SLOTS * models.LENGTH * models.WIDTH
    assert plan.largest_tensor_bytes == 4 * models.VOCAB // 2 * models.WIDTH
    assert plan.graphs == 0 and plan.serve_bytes and plan.phases
    assert plan.trace_peak_bytes == max(plan.phases.values()) > plan.program_bytes > 0
    table = plan.table()
    assert size(1536) == "1.5 KiB"
    for text in ("tokens int64[2]", size(plan.weight_bytes), "none (run as exported)"):
        assert text in table


def test_the_plan_without_a_loader_does_not_run_func():
    def never():
        raise AssertionError

    plan = trace_plan(never, [(torch.zeros(2, 4),), (torch.zeros(5, 4),)], None, None, False, BucketModelConfig())
    assert plan.weight_bytes is None
    assert "known once func has run" in plan.table() and "[5, 4]" in plan.table()
