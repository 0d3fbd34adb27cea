"""Loader mode: func in this process, weights from a checkpoint; and what a model may declare of its inputs."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import TraceConfigError, WeightMismatchError, WeightSchemaError
from tests.support import traced_models as models

X = torch.zeros(4)


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


def test_tied_weights_are_stored_once_and_read_and_replaced_under_either_name():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.unread = torch.nn.Linear(2, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    unread, ids = {"unread.weight": torch.ones(2, 2), "unread.bias": torch.ones(2)}, torch.tensor([1, 5])
    for name in ("embed.weight", "head.weight"):
        first, second = torch.randn(2, 6, 4)
        with load(lambda name=name, first=first: {name: first, **unread}, Tied, ids, tp_degree=1) as model:
            assert [spec.name for spec in model.manifest.weights] == ["embed.weight"]
            assert model.manifest.layout["unread"] == ["unread.bias", "unread.weight"]
            assert torch.allclose(model(ids), first[ids] @ first.t(), atol=1e-5)
            model.update_weights({name: second, **unread})
            assert torch.allclose(model(ids), second[ids] @ second.t(), atol=1e-5)
            with pytest.raises(WeightSchemaError, match=r"missing: embed\.weight"):
                model.update_weights(unread)


def test_func_must_be_callable_and_return_a_module_and_aliases():
    for func, message in (
        (3, "func must be a callable"),
        (lambda: 3, "it returned int"),
        (lambda: (models.Plus(), [1]), "must be a dictionary"),
        (lambda: (models.Plus(), {"weight": "first"}), "the number of an output"),
        (lambda: (models.Plus(), {torch.zeros(1): 0}), "register it with register_buffer"),
    ):
        with pytest.raises(TraceConfigError, match=message):
            load(dict, func, X, tp_degree=1)


class Declares(torch.nn.Module):
    def __init__(self, **entry):
        super().__init__()
        self.nxd_inputs = {"x": entry}

    def forward(self, x):
        return x + 1


class Wide(torch.nn.Module):
    """The same for every row, and a sum over the rows."""

    def __init__(self, part: int = 2, **given):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.part = part
        vars(self).update(given)

    def forward(self, x, factor):
        if self.part == 3:
            self.calls.add_(1)
        return (x * factor, x.sum(0))[: self.part]


@pytest.mark.parametrize(
    ("func", "more", "message"),
    [
        (
            lambda: Wide(),
            {},
            r"batch_dim=0: bucket 'bucket_0': its output 'output_1' of shape \[3\] does not have the 4 ",
        ),
        (
            lambda: Wide(1),
            {"factor": torch.ones(1, 3)},
            r"its input 'factor' of shape \[1, 3\] does not have the 4 rows",
        ),
        (lambda: Wide(1), {"factor": torch.tensor(2.0)}, r"its input 'factor' of shape \[\] does not have the 4 rows"),
        (
            lambda: Wide(1, nxd_inputs={"x": {"pad": {0: 1}}}),
            {},
            "Wide declares nxd_inputs or nxd_outputs: leave one of",
        ),
        (lambda: Wide(3), {}, "changes the state 'calls', which rows of padding would change too"),
    ],
)
def test_a_batch_dim_that_does_not_fit_is_refused(func, more, message):
    example = {"x": torch.ones(4, 3), "factor": torch.ones(4, 3), **more}
    with pytest.raises(TraceConfigError, match=message):
        load(dict, func, example, tp_degree=1, batch_dim=0)


@pytest.mark.parametrize(
    ("dtype", "entry", "message"),
    [
        (torch.float32, {"pad": {0: -1}, "minimum": 0, "maximum": 9}, "fills 'x' with -1, which is outside .* 0 to 9"),
        (torch.float32, {"default": 10, "maximum": 9}, "fills 'x' with 10, which is outside its own range"),
        (torch.float32, {"pad": {-1: 0}}, "pad names dimension -1 of 'x', which has [0-9], counted from 0"),
        (torch.float32, {"pad": {0: "zero"}}, "nxd_inputs or nxd_outputs of Declares: pad.0: .* a valid number"),
        (torch.float32, {"maxmum": 9}, "says 'x': 'maxmum', which means nothing; it may say role, default, pad"),
        (torch.int64, {"default": 2**70}, "'x' is int64, which holds -9223372036854775808 .* filled with 1.18059"),
        (torch.uint8, {"pad": {0: -1}}, "holds 0 to 255, and is to be filled with -1.0: give a value in that range"),
        (torch.int32, {"default": float("nan")}, "filled with nan"),
        (torch.int64, {"minimum": 10**400}, "filled with 1000000"),
        (torch.float16, {"default": 65536}, "holds -65504.0 to 65504.0, and is to be filled with 65536"),
    ],
)
def test_what_a_model_declares_of_its_inputs_is_checked(dtype, entry, message):
    with pytest.raises(TraceConfigError, match=message):
        load(dict, lambda: Declares(**entry), X.to(dtype), tp_degree=1)
