"""ZeRO-1 in one process: torch-xla's interface, what is refused, and its files."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from nxd_infer import parallel_state
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import CheckpointError, NotInitializedError, ParallelConfigError
from nxd_infer.optimizer import NeuronZero1Optimizer
from tests.support.trainer.jobs import ZERO1, AdamW, training
from tests.support.trainer.models import llama


def test_the_arguments_of_torch_xla():
    """Those of ``torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer`` 2.9, by position too."""
    found = list(inspect.signature(NeuronZero1Optimizer).parameters.values())
    assert {p.name: p.default for p in found if p.kind is p.POSITIONAL_OR_KEYWORD} == {
        "params": inspect.Parameter.empty,
        "optimizer_class": inspect.Parameter.empty,
        "optimizer_dtype": None,
        "grad_clipping": True,
        "max_norm": None,
        "pin_layout": True,
        "sharding_groups": None,
        "grad_norm_groups": None,
        "lazy_init": False,
        "bucket_cap_mb_all_gather": 0,
        "bucket_cap_mb_reduce_scatter": 0,
        "use_grad_acc_hook": False,
        "save_master_weights": False,
        "higher_cc_precision": False,
    }
    groups = parallel_state.get_data_parallel_group(as_list=True)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = NeuronZero1Optimizer(
        [weight], AdamW, torch.float32, True, 0.5, False, groups, [[0]], False, 16, 8, False, True, True, lr=1e-3
    )
    assert isinstance(optimizer.base_optimizer, AdamW) and optimizer.base_optimizer is optimizer.optimizer
    assert optimizer.optimizer_class is AdamW and optimizer.optimizer_dtype == torch.float32
    assert optimizer.sharding_groups == groups == [[0]] and optimizer.grad_norm_groups == [[0]]
    assert (optimizer.bucket_cap_mb_all_gather, optimizer.bucket_cap_mb_reduce_scatter) == (16, 8)
    assert optimizer.max_norm == 0.5 and optimizer.inited and not optimizer.pin_layout
    assert optimizer.save_master_weights and optimizer.higher_cc_precision and not optimizer.use_grad_acc_hook
    assert optimizer.get_shape_info() == {0: weight.shape}
    assert (optimizer.global_rank, optimizer.global_world_size, optimizer.local_rank) == (0, 1, 0)
    assert optimizer.local_world_size == 1 and optimizer.coalesce_cc_all_gather and optimizer.coalesce_cc_reduce_scatter
    optimizer.max_norm = 0.25
    (weight * 4).sum().backward()
    optimizer.step()
    assert weight.grad is not None and weight.grad.norm() == pytest.approx(0.25)
    state = optimizer.state_dict()
    assert state["base_state"] is state["state"] and state["base_state"][0]["step"] == 1
    optimizer.load_state_dict(state)
    assert NeuronZero1Optimizer([weight], AdamW, coalesce_cc=True).coalesce_cc


@pytest.mark.parametrize(
    ("given", "param_dtype"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64), (torch.float64, torch.bfloat16)],
    ids=str,
)
def test_every_floating_type_to_step_in(given: torch.dtype, param_dtype: torch.dtype):
    """The weights are what the optimizer makes of copies in this type, rounded to their own."""
    values = torch.linspace(-1, 1, 9, dtype=param_dtype)
    weight, alone = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.to(given, copy=True))
    optimizer = NeuronZero1Optimizer([weight], AdamW, given, False, use_grad_acc_hook=True, lr=1e-2, eps=1e-3)
    plain = AdamW([alone], lr=1e-2, eps=1e-3)
    for _ in range(3):
        (weight * values).sum().backward()
        alone.grad = values.to(given)
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    stepped = optimizer.base_optimizer.param_groups[0]["params"][0]
    assert optimizer.state[weight]["exp_avg"].dtype == stepped.dtype == given
    assert torch.equal(weight, alone.to(param_dtype))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer_dtype": torch.int8}, "optimizer_dtype must be one of torch.float16"),
        ({"bucket_cap_mb_all_gather": -1}, "bucket_cap_mb_all_gather must be a number of megabytes"),
        ({"bucket_cap_mb_reduce_scatter": True}, "got True"),
        ({"max_norm": -5.0}, "max_norm must be a number above 0, got -5.0"),
        ({"max_norm": "1"}, "max_norm must be a number above 0, got '1'"),
    ],
)
def test_arguments_out_of_range(options: dict, said: str):
    """Given to the constructor, or set later where that is possible."""
    weight = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ParallelConfigError, match=said):
        NeuronZero1Optimizer([weight], AdamW, **options)
    if (norm := options.get("max_norm")) is not None:
        optimizer = NeuronZero1Optimizer([weight], AdamW, max_norm=0.5)
        with pytest.raises(ParallelConfigError, match=said):
            optimizer.max_norm = norm
        assert optimizer.max_norm == 0.5
        optimizer.max_norm = None
        assert optimizer.max_norm == 1.0


def test_an_axis_that_is_not_for_training_is_refused_by_its_name():
    """And not because of the groups that are right for it."""
    with (
        use_context(make_context(4, 0, cp=2)),
        pytest.raises(ParallelConfigError, match="training over the axis 'cp' is not supported yet"),
    ):
        groups = parallel_state.get_zero1_sharding_groups()
        NeuronZero1Optimizer([torch.nn.Parameter(torch.ones(1))], AdamW, sharding_groups=groups)


def test_what_waits_for_sharding_says_so(tmp_path: Path):
    optimizer = NeuronZero1Optimizer([torch.nn.Parameter(torch.ones(2))], AdamW, lazy_init=True)
    for action in (
        lambda: optimizer.load_sharded_state_dict(tmp_path),
        lambda: optimizer.save_sharded_state_dict(tmp_path),
        optimizer.step,
        optimizer.state_dict,
        optimizer.allgather_weights_and_update_full_parameter,
        optimizer.hand_on_hyperparameters,
        optimizer.named_gradients,
    ):
        with pytest.raises(NotInitializedError, match=r"^lazy_init=True: call init_zero\(\) before"):
            action()
    assert not hasattr(optimizer, "base_optimizer")
    for name in ("base_optimizer", "optimizer", "rate"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}' before init_zero\(\), which comes first"):
            getattr(optimizer, name)
    with pytest.raises(AttributeError, match="rate"):
        del optimizer.rate
    optimizer.init_zero()
    assert isinstance(optimizer.base_optimizer, AdamW)


def test_files_that_cannot_be_written_or_understood(tmp_path: Path):
    model, optimizer = training(llama, **ZERO1)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        optimizer.save_sharded_state_dict(blocked)
    optimizer.save_sharded_state_dict(tmp_path)
    described = tmp_path / "optim.dp_rank_00.tp_rank_00.pp_rank_00.json"
    text = described.read_text()
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW)
    for damaged in ("[]", "{", text.replace('"pieces"', '"peaces"')):
        assert damaged != text
        described.write_text(damaged)
        with pytest.raises(CheckpointError, match="does not describe an optimizer shard"):
            optimizer.load_sharded_state_dict(tmp_path)
    described.write_text(text)
    optimizer.load_sharded_state_dict(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".json") == [described.name]
    optimizer.save_sharded_state_dict(tmp_path)
    described.write_text(text)  # as if it had been killed between the two files
    with pytest.raises(CheckpointError, match="is of another save than"):
        optimizer.load_sharded_state_dict(tmp_path)
