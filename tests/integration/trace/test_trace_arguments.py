"""Arguments that contradict each other are refused before anything runs; the plan says what would."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.artifact.manifest import InputSpec
from nxd_infer.backends.compiler_args import arguments_of
from nxd_infer.errors import ArtifactError, ParallelConfigError, TraceConfigError, WeightMismatchError
from nxd_infer.runtime.router import fill
from nxd_infer.trace import BucketModelConfig, trace_plan
from nxd_infer.trace.check import tracing_backend
from nxd_infer.util.units import size
from tests.support import toy_artifacts as toy
from tests.support import traced_models as models
from tests.support.needs import needs_inductor

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
        ({"tp_degree": True}, "tp_degree must be"),
        ({"max_parallel_compilations": 0}, "max_parallel_compilations must be"),
        ({"bucket_config": 3}, "must be a BucketModelConfig"),
        ({"backend": "tpu"}, "there is no backend 'tpu'; backends are"),
        ({"backend": "eager", "compiler_args": "cpp.threads=1"}, "takes no compiler_args"),
        ({"extra_files": {"config.json": "/no/such/file"}}, "there is no file"),
        ({"trace_timeout": -1}, "trace_timeout must be a number of seconds above 0"),
        ({"trace_timeout": float("nan")}, "trace_timeout must be a number of seconds above 0"),
        ({"trace_timeout": float("inf")}, "trace_timeout must be a number of seconds above 0"),
        ({"extra_files": {"../config.json": __file__}}, "not a path inside an artifact"),
        ({"extra_files": {"manifest.json": __file__}}, "a name of the artifact's own"),
        ({"extra_files": {"weights/rank_00.safetensors": __file__}}, "a name of the artifact's own"),
        ({"metadata": {"dtype": torch.float32}}, "stored as JSON"),
        ({"metadata": {"limit": float("inf")}}, "stored as JSON"),
        ({"compiler_args": "--model-type transformer fast"}, "'fast' is neither key=value, .* nor an argument of neur"),
        ({"compiler_args": ["--auto-cast none"]}, "'--auto-cast none' is neither"),
        ({"compiler_args": "--model-type="}, "'--model-type=' is neither"),
        ({"compiler_args": "-model-type=unet"}, "'-model-type=unet' is neither"),
        (
            {"compiler_args": "-O1 --model-type=transformr"},
            "takes generic, .*; got 'transformr'; did you mean transformer?",
        ),
        ({"compiler_args": ["--model-type", "unet_inference"]}, "did you mean unet-inference?"),
        (
            {"compiler_args": "--auto-cast matmul --lnc=2"},
            "takes none, matmult, all; got 'matmul'; did you mean matmult?",
        ),
        ({"compiler_args": "-O9"}, "compiler_args: -O of neuronx-cc takes 1, 2, 3; got '9'"),
        ({"compiler_args": "--verbose debug -O 0"}, "-O of neuronx-cc takes 1, 2, 3; got '0'"),
        ({"compiler_args": "--optlevel=high"}, "takes 1, 2, 3; got 'high'"),
        ({"compiler_args": "--auto-cast-type=fp8_e5m2"}, "takes bf16, .*; got 'fp8_e5m2'; did you mean fp8_e4m3?"),
        ({"compiler_args": "-lnc 4"}, "-lnc of neuronx-cc takes 1, 2; got '4'"),
        (
            {"compiler_args": "--target=inf1", "backend": "eager"},
            "--target of neuronx-cc takes inf2, trn1, .* got 'inf1'",
        ),
        ({"compiler_args": "--tensorizer-options='--one"}, "the quotation mark ' is not closed"),
        ({"compiler_args": 1}, "must be a dictionary, a list of words or a text"),
        ({"compiler_args": "--cpu-target=z80"}, "there is no cpu_target 'z80'"),
        ({"compiler_args": {"--model-type": "transformer"}}, "no option '--model-type'"),
        ({"compiler_args": "-O1 max_autotune"}, "'max_autotune' is neither key=value"),
        ({"compiler_args": "--enable-saturate-infinity trn1"}, "'trn1' is neither"),
        ({"compiler_args": "--freezing=True"}, "'freezing' is set to False by this package"),
        ({"compiler_args": "--dce=1"}, "dce=1 must be bool"),
        ({"compiler_args": {"-O1": None}, "backend": "eager"}, "takes no compiler_args"),
        ({"compiler_workdir": f"{__file__}/work", "backend": "eager"}, "cannot be made: Not a directory; choose"),
        ({"compiler_args": {"cpp.thread": 2}}, "no option 'cpp.thread'; did you mean cpp.threads"),
        ({"compiler_args": {"cpp.threads": "two"}}, "cpp.threads='two' must be int"),
        ({"compiler_args": ["freezing=true"]}, "'freezing' is set to False by this package"),
        ({"compiler_args": "cpu_target=z80"}, "there is no cpu_target 'z80'"),
    ],
)
@needs_inductor
def test_contradictions_are_refused(arguments, message):
    # The plan makes no directory.
    for call in (nxd.trace.parallel_model_trace, trace_plan)[: 1 if "compiler_workdir" in arguments else 2]:
        with pytest.raises(TraceConfigError, match=message):
            call(models.plus, X, **arguments)


@pytest.mark.parametrize(
    ("given", "options", "neuron"),
    [
        (None, {}, []),
        ({"cpp.threads": 2}, {"cpp.threads": 2}, []),
        ("--cpp.threads=2 max_autotune=True", {"cpp.threads": 2, "max_autotune": True}, []),
        ("-O1", {}, ["-O1"]),
        ("--model-type=transformer -O1", {}, ["--model-type=transformer", "-O1"]),
        (["--auto-cast", "none", "-O", "2"], {}, ["--auto-cast", "none", "-O", "2"]),
        (
            "--enable-saturate-infinity cpu_target=native --target trn1",
            {"cpu_target": "native"},
            ["--enable-saturate-infinity", "--target", "trn1"],
        ),
        ("--tensorizer-options='--one --two=3' -O1", {}, ["--tensorizer-options='--one --two=3'", "-O1"]),
        (["--tensorizer-options=--one --two=3"], {}, ["--tensorizer-options=--one --two=3"]),
        ('cpp.cxx=["g++"]', {"cpp.cxx": ["g++"]}, []),
        ("--dce=True --max-autotune=true", {"dce": True, "max_autotune": True}, []),
        ("--internal-levels two --jobs 8 -O1", {}, ["--internal-levels", "two", "--jobs", "8", "-O1"]),
        ("--debug --lnc 2 --other-typo=3", {}, ["--debug", "--lnc", "2", "--other-typo=3"]),
        ("-lnc 1 -lnc=2", {}, ["-lnc", "1", "-lnc=2"]),
        *(
            (words, {}, words.split())
            for words in (
                "--model-type=unet-inference --auto-cast-type fp8_e4m3 --optlevel=3",
                "--verbose=35 --distribution-strategy=llm-training --modle-type=x",
                "--auto-cast --model-type generic --target",
            )
        ),
    ],
)
@needs_inductor
def test_words_of_the_neuron_compiler_are_told_from_options_of_the_backend(given, options, neuron):
    assert arguments_of(given, tracing_backend("inductor")) == (options, neuron)


@needs_inductor
def test_the_plan_names_once_what_is_ignored():
    table = trace_plan(models.plus, X, compiler_args="--model-type=transformer -O1").table()
    assert (
        table.count("the inductor backend ignores what is for the Neuron compiler: --model-type=transformer -O1") == 1
    )


@needs_inductor
def test_more_ranks_than_a_machine_can_be_meant_to_hold_are_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("NXD_INFER_MAX_RANKS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(2)))
    for call in (nxd.trace.parallel_model_trace, trace_plan):
        with pytest.raises(TraceConfigError, match=r"tp_degree: .* 1000 .* 2 cores; at most 64 .*MAX_RANKS=1000"):
            call(models.plus, X, tp_degree=1000)
    assert trace_plan(models.plus, X, tp_degree=64).tp_degree == 64
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(100)))
    assert trace_plan(models.plus, X, tp_degree=800).tp_degree == 800
    monkeypatch.setenv("NXD_INFER_MAX_RANKS", "3")
    with pytest.raises(TraceConfigError, match="at most 3 are started"):
        trace_plan(models.plus, X, tp_degree=4)
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


def test_func_must_be_callable_and_return_a_module_and_aliases():
    def trace(func):
        nxd.trace.parallel_model_trace(func, X, backend="eager", checkpoint_loader_callable=dict)

    for func, message in (
        (3, "func must be a callable"),
        (lambda: 3, "it returned int"),
        (lambda: (models.Plus(), [1]), "must be a dictionary"),
        (lambda: (models.Plus(), {"weight": "first"}), "the number of an output"),
        (lambda: (models.Plus(), {torch.zeros(1): 0}), "register it with register_buffer"),
    ):
        with pytest.raises(TraceConfigError, match=message):
            trace(func)


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
    for text in ("tokens int64[2]", size(plan.weight_bytes), "none (run as exported)"):
        assert text in table


@needs_inductor
def test_the_plan_without_a_loader_does_not_run_func():
    def never():
        raise AssertionError

    plan = trace_plan(never, [(torch.zeros(2, 4),), (torch.zeros(5, 4),)], None, None, False, BucketModelConfig())
    assert plan.weight_bytes is None and plan.graphs == 2
    assert "known once func has run" in plan.table() and "[5, 4]" in plan.table()


def test_bytes_as_text():
    assert [size(n) for n in (0, 1536, 5 << 20, 3 << 40)] == ["0 B", "1.5 KiB", "5.0 MiB", "3072.00 GiB"]


# --- loader mode --------------------------------------------------------------------------------------


def load(loader, func=models.net, example=None, **more):
    arguments = {"backend": "eager", "tp_degree": 2, "inline_weights_to_neff": False, **more}
    example = models.inputs() if example is None else example
    return nxd.trace.parallel_model_trace(func, example, checkpoint_loader_callable=loader, **arguments)


def test_decision_18_computed_buffers_are_real_and_parameters_need_no_memory(tmp_path):
    """A meta buffer that silently lost its value is what loader mode must not have; the loader's weights count."""
    seen = {}

    def func():
        module, aliases = models.net(seed=9)
        seen.update({name: parameter.is_meta for name, parameter in module.named_parameters()})
        assert module.scale.tolist() == [0.5, 2.0]
        return module, aliases

    with load(models.state_dict, func, serialization_path=tmp_path / "cut", spmd_mode=True) as model:
        assert all(seen.values())
        steps = [models.inputs(), models.inputs()]
        for (tokens, position), want in zip(steps, models.expected(steps), strict=True):
            assert (model(tokens, position)[0] - want).abs().max() <= 1e-5 * want.abs().max()
    from safetensors.torch import load_file

    whole = models.state_dict()["head.weight"]
    parts = [load_file(tmp_path / "cut" / f"tp{r}_sharded_checkpoint.safetensors")["head.weight"] for r in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name():
    incomplete = {name: tensor for name, tensor in models.state_dict().items() if name != "up.weight"}
    with pytest.raises(WeightMismatchError, match=r"missing: up\.weight"):
        load(lambda: incomplete)
    other = {**models.state_dict(), "up.weight": torch.zeros(3, 3)}
    with pytest.raises(WeightMismatchError, match="of another shape"):
        load(lambda: other)


def test_spmd_mode_shows_the_first_difference_between_ranks():
    with pytest.raises(nxd.errors.TraceError, match=r"(?s)rank 1 than on rank 0.*\+.*10.*axis_rank"):
        load(lambda: {"weight": torch.ones(4)}, models.baked_rank, X, spmd_mode=True)
    with load(lambda: {"weight": torch.ones(4)}, models.baked_rank, X) as model:  # allowed without it
        assert len(set(model.buckets[0].graphs)) == 2


def test_collectives_and_meta_buffers_are_refused_in_loader_mode():
    with pytest.raises(nxd.errors.NxdError, match="traced in one process, so func cannot communicate"):
        load(lambda: {"weight": torch.ones(4)}, _communicates, X)
    with pytest.raises(nxd.errors.TraceError, match="'offset' was built on the meta device"):
        load(lambda: {}, _meta_buffer, X)


def _communicates():
    from nxd_infer import comm
    from nxd_infer.context import current_context

    comm.all_reduce(torch.ones(1), current_context())
    return models.Plus()


def _meta_buffer():
    module = models.Plus()
    module.register_buffer("offset", torch.zeros(4, device="meta"))
    return module


class Starts(nn.Module):
    """States that a checkpoint holds: a buffer, which has another value here, and a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.learned = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.full((4,), 100.0), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * self.scale + self.learned + self.mean + self.count
        return y, self.learned + 1, self.mean + 1, self.count + 1


def starts() -> tuple[nn.Module, dict]:
    return Starts(), {"learned": 1, "mean": 2, "count": 3}


def test_states_start_as_the_checkpoint_says_in_loader_mode():
    stored = {name: torch.arange(4.0) + i for i, name in enumerate(("scale", "learned", "mean"))}

    def trace(weights):
        loader = functools.partial(dict, weights)
        return nxd.trace.parallel_model_trace(starts, torch.ones(4), backend="eager", checkpoint_loader_callable=loader)

    with trace(stored) as model:
        for call in range(2):
            want = sum(stored.values()) + 100 + 3 * call
            assert torch.equal(model(torch.ones(4))[0], want)
        model.reset_states()
        assert torch.equal(model(torch.ones(4))[0], sum(stored.values()) + 100)
    del stored["mean"]  # a buffer may be absent and starts as it was built
    with trace(stored) as model:
        assert torch.equal(model(torch.ones(4))[0], sum(stored.values()) + 101)
    del stored["learned"]  # a parameter has no value but the checkpoint's
    with pytest.raises(WeightMismatchError, match="learned"):
        trace(stored)


def test_tied_weights_are_stored_once_and_read_under_either_name():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    weight, ids = torch.randn(6, 4), torch.tensor([1, 5])
    for name in ("embed.weight", "head.weight"):
        with load(lambda name=name: {name: weight}, Tied, ids, tp_degree=1) as model:
            assert [spec.name for spec in model.manifest.weights] == ["embed.weight"]
            assert torch.allclose(model(ids), weight[ids] @ weight.t(), atol=1e-5)


def test_every_degree_has_as_many_graphs_as_buckets():
    config = {"bucket_config": BucketModelConfig(names=["one", "two"])}
    for degree in (1, 2, 4):
        model = load(models.state_dict, example=[models.inputs(1), models.inputs(2)], tp_degree=degree, **config)
        assert model.trace_report["graphs"] == 2  # its ranks are not started
        assert all(len(set(bucket.graphs)) == 1 for bucket in model.buckets)
        model.close()


class Declares(torch.nn.Module):
    def __init__(self, **entry):
        super().__init__()
        self.nxd_inputs = {"x": entry}

    def forward(self, x):
        return x + 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"pad": {0: -1}, "minimum": 0, "maximum": 9}, "fills 'x' with -1, which is outside its own range of 0 to 9"),
        ({"default": 10, "maximum": 9}, "fills 'x' with 10, which is outside its own range"),
        ({"pad": {-1: 0}}, "pad names dimension -1 of 'x', which has [0-9], counted from 0"),
        ({"pad": {0: "zero"}}, "nxd_inputs or nxd_outputs of Declares: pad.0: Input should be a valid number"),
        ({"maxmum": 9}, "says 'x': 'maxmum', which means nothing; it may say role, default, pad, minimum, maximum"),
    ],
)
def test_what_a_model_declares_of_its_inputs_is_checked(entry, message):
    with pytest.raises(TraceConfigError, match=message):
        nxd.trace.parallel_model_trace(lambda: Declares(**entry), X, backend="eager", checkpoint_loader_callable=dict)


@pytest.mark.parametrize(
    ("dtype", "entry", "message"),
    [
        (torch.int64, {"default": 2**70}, "holds -9223372036854775808 to 9223372036854775807, .*filled with 1.18059"),
        (torch.uint8, {"pad": {0: -1}}, "holds 0 to 255, and is to be filled with -1.0: give a value in that range"),
        (torch.int32, {"default": float("nan")}, "filled with nan"),
        (torch.int64, {"minimum": 10**400}, "filled with 1000000"),
        (torch.uint8, {"maximum": -1}, "holds 0 to 255, and is to be filled with -1"),
        (torch.float16, {"default": 65536}, "holds -65504.0 to 65504.0, and is to be filled with 65536"),
    ],
)
def test_what_fills_an_input_fits_its_type(dtype, entry, message):
    with pytest.raises(TraceConfigError, match=f"'x' is {str(dtype)[6:]}, which .*{message}"):
        nxd.trace.parallel_model_trace(
            lambda: Declares(**entry), X.to(dtype), backend="eager", checkpoint_loader_callable=dict
        )


def test_what_fits_a_type_fills_an_input():
    """Its limits do, as far as a float holds them; infinities fill floating-point inputs (a mask, say)."""
    for dtype, value in ((torch.float32, -math.inf), (torch.int32, 2**31 - 1), (torch.uint8, 255), (torch.bool, 7)):
        spec = InputSpec.of("x", torch.zeros(2, dtype=dtype), default=value)
        fill(view := torch.zeros(2, dtype=dtype), spec, None)
        assert view.tolist() == [bool(value) if dtype == torch.bool else value] * 2
