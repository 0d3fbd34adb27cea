"""Arguments that contradict each other are refused before anything runs; the plan says what would."""

from __future__ import annotations

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.errors import TraceConfigError, WeightMismatchError
from nxd_infer.trace import BucketModelConfig, trace_plan
from nxd_infer.trace.plan import human_bytes
from tests.trace import models

X = torch.zeros(4)


@pytest.mark.check
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
        ({"trace_timeout": -1}, "positive number of seconds"),
        ({"compiler_args": "--model-type=transformer -O1"}, "'-O1' is not key=value"),
        ({"compiler_args": {"cpp.thread": 2}}, "no option 'cpp.thread'; close matches: cpp.threads"),
        ({"compiler_args": {"cpp.threads": "two"}}, "cpp.threads='two' must be int"),
        ({"compiler_args": ["freezing=true"]}, "'freezing' is set to False by this package"),
        ({"compiler_args": "cpu_target=z80"}, "there is no cpu_target 'z80'"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    for call in (nxd.trace.parallel_model_trace, trace_plan):
        with pytest.raises(TraceConfigError, match=message):
            call(models.plus, X, **arguments)


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


@pytest.mark.check
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
    assert plan.largest_tensor_bytes == 4 * models.VOCAB * models.WIDTH
    assert plan.graphs == 0 and plan.trace_peak_bytes and plan.serve_bytes
    table = plan.table()
    for text in ("tokens int64[2]", human_bytes(plan.weight_bytes), "none (run as exported)"):
        assert text in table


def test_the_plan_without_a_loader_does_not_run_func():
    def never():
        raise AssertionError

    plan = trace_plan(never, [(torch.zeros(2, 4),), (torch.zeros(5, 4),)], None, None, False, BucketModelConfig())
    assert plan.weight_bytes is None and plan.graphs == 2
    assert "known once func has run" in plan.table() and "[5, 4]" in plan.table()


def test_human_bytes():
    assert [human_bytes(n) for n in (0, 1536, 5 << 20, 3 << 40)] == ["0 B", "1.5 KB", "5.0 MB", "3072.0 GB"]


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
