"""Several shapes in one model: bucket kernels, shared states, arguments a bucket. Traced in this process (no ranks)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.errors import BucketError, TraceConfigError
from nxd_infer.trace import BucketModelConfig
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.ranks.traced import TracedRank
from nxd_infer.trace.request import checked_request
from tests.support import traced_models as models


def trace(func, examples, config, **more):
    """Degree 1, eager, no processes: a loader of nothing makes it loader mode."""
    arguments = {
        "backend": "eager",
        "inline_weights_to_neff": False,
        "checkpoint_loader_callable": lambda: {"weight": torch.ones(4)},
        **more,
    }
    return nxd.trace.parallel_model_trace(func, examples, bucket_config=config, **arguments)


EXAMPLES = [(torch.zeros(2, 4),), (torch.zeros(5, 4),)]


@pytest.mark.smoke
def test_without_a_kernel_the_smallest_bucket_that_fits_pads_what_is_declared():
    with trace(models.counter, EXAMPLES, BucketModelConfig(names=["small", "large"])) as model:
        assert [bucket.name for bucket in model.buckets] == ["small", "large"]
        for rows, calls in ((1, 1), (2, 2), (3, 3), (5, 4)):
            x = torch.randn(rows, 4)
            assert torch.equal(model(x)["y"], x + (3 + calls))  # one memory for both buckets, cut to the rows
        with pytest.raises(BucketError):
            model(torch.randn(6, 4))


def test_a_users_kernel_runs_as_given_with_its_constants():
    config = BucketModelConfig(
        models.padding_kernel, bucket_kernel_constant_args=[torch.tensor([2, 5])], func_kwargs={"value": 2.0}
    )
    with trace(models.plus, EXAMPLES, config) as model:
        assert "bucket-kernel" in model.manifest.requires
        x = torch.randn(3, 4)
        assert torch.equal(model(x), torch.cat([x, torch.zeros(2, 4)]) + 2)  # padded to 5, and not cut back


def test_a_state_that_one_bucket_writes_is_read_by_the_others():
    """Read only, it would be a weight of that bucket, and stay at its first value."""
    config = BucketModelConfig(func_kwargs=[{"writes": True}, {"writes": False}], names=["write", "read"])
    with trace(models.counter, EXAMPLES, config) as model:
        assert [state.name for state in model.manifest.states] == ["memory"]
        assert not model.manifest.weights
        x = torch.zeros(2, 4)
        for call in range(1, 3):
            model.run_bucket("write", {"x": x})
            assert torch.equal(model.run_bucket("read", {"x": torch.zeros(5, 4)})["y"], torch.full((5, 4), 3.0 + call))
        model.reset_states()
        assert torch.equal(model.run_bucket("read", {"x": torch.zeros(5, 4)})["y"], torch.full((5, 4), 3.0))


def test_arguments_a_bucket_and_constants_of_their_own(caplog):
    config = BucketModelConfig(func_kwargs=[{"offset": 1.0}, {"offset": 2.0}])
    with caplog.at_level(logging.WARNING), trace(_offset, EXAMPLES, config) as model:
        assert [spec.name for spec in model.manifest.weights] == ["offset", "offset@bucket_1"]
        for i, rows in enumerate((2, 5)):
            assert torch.equal(model(torch.zeros(rows, 4)), torch.full((rows, 4), 1.0 + i))
    assert "other values" in caplog.text and "offset" in caplog.text


class _Offset(nn.Module):
    def __init__(self, offset: float):
        super().__init__()
        self.register_buffer("offset", torch.tensor([offset]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def _offset(offset: float) -> nn.Module:
    return _Offset(offset)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), torch.nan))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b * self.weight


def buckets_of(func: Any, examples: Any, config: Any = None) -> TracedRank:
    options = TraceOptions(func, examples, bucket_config=config, inline_weights_to_neff=False)
    request = checked_request(options)
    (stage,) = one_rank.trace_buckets(request, one_rank.build(request, one_rank.require_values))
    return stage


def test_a_call_by_position_means_the_same_input_in_every_bucket_and_a_weight_is_stored_once():
    """Example inputs by name may come in any order, so that a larger bucket would take them exchanged."""
    by_name = [{"b": torch.ones(2), "a": torch.ones(2)}, {"a": torch.ones(4), "b": torch.ones(4)}]
    found = buckets_of(Weighted, by_name, BucketModelConfig())
    assert [[spec.name for spec in bucket.inputs] for bucket in found.buckets] == [["b", "a"], ["b", "a"]]
    assert list(found.weights) == ["weight"], "whatever its values are: NaN is no other value than NaN"
    by_position = [*by_name, (torch.ones(6), torch.ones(6))]  # as forward takes them
    found = buckets_of(Weighted, by_position, BucketModelConfig())
    assert [[spec.name for spec in bucket.inputs] for bucket in found.buckets] == [["a", "b"]] * 3


def test_func_is_told_the_bucket_where_it_asks():
    def each(bucket_rank: int):
        return models.Plus(float(bucket_rank))

    with trace(each, EXAMPLES, BucketModelConfig()) as model:
        assert torch.equal(model(torch.zeros(5, 4)), torch.ones(5, 4))


def test_shared_state_buffers_with_a_preprocessor():
    """Buckets see the last entries of one buffer; what one writes, the other reads."""
    config = BucketModelConfig(
        shared_state_buffer=[torch.arange(4.0).reshape(1, 4)],
        shared_state_buffer_preprocessor=models.window_preprocessor,
        func_kwargs=[{"length": 2}, {"length": 4}],
    )
    examples = [(torch.zeros(1, 2),), (torch.zeros(1, 4),)]
    with trace(models.window, examples, config) as model:
        (state,) = model.manifest.states
        assert state.shape == [1, 4]
        assert model(torch.tensor([[10.0, 20.0]]))[0] == 2 + 10 + 3 + 20
        assert model(torch.zeros(1, 4))[0] == 0 + 1 + 12 + 23
        model.reset_states()
        assert model(torch.zeros(1, 4))[0] == 0 + 1 + 2 + 3


def test_shared_state_buffers_without_a_preprocessor_have_the_states_shape():
    config = BucketModelConfig(shared_state_buffer=[torch.ones(1, 2)], func_kwargs={"length": 2})
    with trace(models.window, [(torch.zeros(1, 2),)], config) as model:
        assert model(torch.ones(1, 2))[0] == 4
    config = BucketModelConfig(shared_state_buffer=[torch.ones(1, 3)], func_kwargs={"length": 2})
    with pytest.raises(TraceConfigError, match="shared_state_buffer_preprocessor"):
        trace(models.window, [(torch.zeros(1, 2),)], config)
    config = BucketModelConfig(shared_state_buffer=[torch.ones(1, 2)] * 2, func_kwargs={"length": 2})
    with pytest.raises(TraceConfigError, match=r"holds 2 tensors, but bucket 'bucket_0' has 1 states \(window\)"):
        trace(models.window, [(torch.zeros(1, 2),)], config)


def test_states_of_other_shapes_without_a_shared_buffer_are_refused():
    config = BucketModelConfig(func_kwargs=[{"length": 2}, {"length": 4}])
    with pytest.raises(TraceConfigError, match=r"the state 'window'.*shared_state_buffer"):
        trace(models.window, [(torch.zeros(1, 2),), (torch.zeros(1, 4),)], config)


@pytest.mark.parametrize(
    ("arguments", "examples", "message"),
    [
        ({"names": ["one"]}, EXAMPLES, "names has 1 entries for 2 buckets"),
        ({"names": ["same", "same"]}, EXAMPLES, "names must differ"),
        ({"func_kwargs": [{}]}, EXAMPLES, "func_kwargs has 1 entries"),
        ({}, torch.zeros(2, 4), "a list with one entry"),
        ({"bucket_kernel": lambda: print}, EXAMPLES, "torch.jit.script"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(arguments, examples, message):
    with pytest.raises(TraceConfigError, match=message):
        trace(models.plus, examples, BucketModelConfig(**arguments))


def test_a_configuration_checks_its_own_arguments():
    with pytest.raises(TraceConfigError, match="bucket_kernel must be a callable"):
        BucketModelConfig(bucket_kernel=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TraceConfigError, match="without shared_state_buffer"):
        BucketModelConfig(shared_state_buffer_preprocessor=models.window_preprocessor)
    config = BucketModelConfig(func_kwargs=[{"a": 1}, {"a": 2}])
    config.store_example_inputs(EXAMPLES)
    assert config.bucket_degree == 2 and config.get_func_kwargs_for_bucket_rank(1) == {"a": 2}


def test_bucket_model_trace_is_for_one_device():
    config = BucketModelConfig(func_kwargs={"value": 4.0})
    with nxd.trace.bucket_model_trace(models.plus, EXAMPLES, config, backend="eager") as model:
        assert model.tp_degree == 1 and len(model.buckets) == 2
        assert torch.equal(model(torch.zeros(5, 4)), torch.full((5, 4), 4.0))
