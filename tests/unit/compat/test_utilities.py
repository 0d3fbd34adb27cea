"""``neuronx_distributed.utils`` and ``torch_neuronx``: what scripts ask about their machine, and small tools."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace as Config

import numpy as np
import pytest
import torch
from torch import nn

from nxd_infer.compat import torch_neuronx, utilities
from nxd_infer.compat.sampling import Sampler
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import DeviceOnlyError, InputMismatchError, ModelConfigError, ParallelConfigError, ShardingError
from nxd_infer.optimizer.adamw_fp32 import AdamW_FP32OptimParams
from nxd_infer.parallel_layers import utils


def test_what_a_script_asks_about_its_machine(monkeypatch: pytest.MonkeyPatch):
    assert utilities.cpu_mode()
    hardware = utilities.hardware
    assert hardware("inf2") == hardware.TRN1 == hardware("trn1n") != hardware("trn2.48xlarge") == hardware.TRN2
    with pytest.raises(ParallelConfigError, match=r"'h100'.*inf2, trn1, trn2 or trn3"):
        hardware("h100")
    assert hardware(utilities.get_platform_target()) == hardware.TRN1 and utilities.get_platform_lnc() == 1
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert hardware(utilities.get_platform_target()) == hardware.TRN2 and utilities.get_platform_lnc() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (
        utils.get_local_world_size() == 8
        and not utilities.requires_init_pg_override()
        and not utilities.is_pjrt_device()
    )


def test_the_logger_speaks_on_the_first_rank_and_messages_say_where(caplog: pytest.LogCaptureFixture):
    logger = utilities.get_logger()
    with use_context(make_context(4, 3, tp=2)):
        logger.error("of rank 3")
        utilities.get_logger("every", rank0_only=False).error(utilities.rmsg("of every rank"))
    logger.error("of rank 0")
    assert [line.message for line in caplog.records] == [
        "[rank_3_pp0_tp1_dp1_cp0] of every rank",
        "of rank 0",
    ]
    assert isinstance(utilities.get_logger(False), logging.Logger)  # by place, as the reference's first


def test_one_seed_for_all_generators():
    def drawn() -> tuple[float, float]:
        utilities.set_random_seed(3)
        return float(np.random.rand()), float(torch.rand(()))

    assert drawn() == drawn()


def test_a_batch_is_split_along_its_sequences():
    batch = {"input_ids": torch.arange(16).view(2, 8), "attention_mask": torch.ones(2, 1, 8, 8), "name": "x", "n": None}
    for rank in range(2):
        with use_context(make_context(2, rank, cp=2)):
            mine = utilities.get_batch_on_this_context_parallel_rank(batch)
            assert torch.equal(mine["input_ids"], batch["input_ids"][:, 4 * rank : 4 * rank + 4])
            assert mine["attention_mask"].shape == (2, 1, 4, 8) and mine["name"] == "x" and mine["n"] is None
            with pytest.raises(ShardingError, match="'labels' of shape"):
                utilities.get_batch_on_this_context_parallel_rank({"labels": torch.ones(1, 3)})
    assert utilities.get_batch_on_this_context_parallel_rank(batch) == batch


def test_helpers_of_ported_layers():
    assert [utils.get_padding_length(n, 4) for n in (0, 1, 4, 7)] == [0, 3, 0, 1]
    assert utils.indices_split_along_dim(torch.zeros(2, 8, 4), 1, 1, 4).tolist() == [2, 3]
    assert utils.indices_split_along_dim(torch.zeros(8), 0, torch.tensor([3]), 4).tolist() == [6, 7]
    one = torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        cast, kept, number = utils.cast_if_autocast_enabled(one, torch.ones(2, dtype=torch.int64), 3)
        utils.verify_casted_dtype(cast)
        with pytest.raises(ShardingError, match="float32"):
            utils.verify_casted_dtype(one)
    assert cast.dtype == torch.bfloat16 and kept.dtype == torch.int64 and number == 3
    assert utils.cast_if_autocast_enabled(one)[0] is one
    moved = utils.move_all_tensor_to_cpu({"a": [one, (one, 3)]})
    assert torch.equal(moved["a"][1][0], one) and moved["a"][1][1] == 3
    with use_context(make_context(2, 1, tp=2)):
        assert not utils.param_is_not_tensor_parallel_duplicate(one)
        utils.set_tensor_model_parallel_attributes(one, True, 0)
        assert utils.param_is_not_tensor_parallel_duplicate(one)


def test_samplers():
    logits = torch.randn(5, 40)
    for config in (Config(do_sample=False, top_k=50), Config(do_sample=True, top_k=1), Config()):
        assert torch.equal(Sampler(config).sample(logits), logits.argmax(-1))
    drawn = torch.stack([Sampler(Config(do_sample=True, top_k=3)).sample(logits) for _ in range(200)])
    best = logits.topk(3).indices
    assert all(set(drawn[:, row].tolist()) == set(best[row].tolist()) for row in range(5))
    with pytest.raises(ModelConfigError, match="num_beams is 4"):
        Sampler(Config(num_beams=4))


@pytest.mark.parametrize("correct", [True, False])
def test_adamw_in_float32(correct: bool):
    """Against the paper's equations in float64; a bfloat16 weight has the float32 one's moments."""
    lr, (b1, b2), eps, decay = 0.1, (0.8, 0.9), 1e-6, 0.05
    start = torch.randn(7).bfloat16()
    weight, half = nn.Parameter(start.double()), nn.Parameter(start.clone())
    options = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay, "correct_bias": correct}
    optimizer = AdamW_FP32OptimParams([weight, half], **options)
    expected, m, v = start.double(), torch.zeros(7).double(), torch.zeros(7).double()
    for step in range(1, 5):
        grad = torch.randn(7).bfloat16()
        weight.grad, half.grad = grad.double(), grad.clone()
        optimizer.step()
        m, v = b1 * m + (1 - b1) * grad.double(), b2 * v + (1 - b2) * grad.double() ** 2
        first, second = (m / (1 - b1**step), v / (1 - b2**step)) if correct else (m, v)
        # eps is added before the correction of the second moment.
        scale = (1 - b2**step) ** 0.5 if correct else 1
        expected = (expected - lr * first / (second.sqrt() + eps / scale)) * (1 - lr * decay)
    assert torch.allclose(weight, expected, rtol=1e-12, atol=0)
    state = optimizer.state[half]
    assert state["exp_avg"].dtype == torch.float32 and torch.allclose(state["exp_avg"].double(), m, rtol=1e-5)
    other = AdamW_FP32OptimParams(
        [nn.Parameter(weight.detach().clone()), nn.Parameter(half.detach().clone())], **options
    )
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[other.param_groups[0]["params"][1]]["exp_avg"], state["exp_avg"])


def test_adamw_takes_a_tensor_as_its_learning_rate():
    number, tensor = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = [AdamW_FP32OptimParams([number], lr=0.5), AdamW_FP32OptimParams([tensor], lr=torch.tensor(0.5))]
    for _ in range(2):
        for param, optimizer in zip((number, tensor), optimizers, strict=True):
            param.grad = torch.ones(3)
            optimizer.step()
    assert torch.allclose(number, tensor, atol=1e-6) and optimizers[1].param_groups[0]["lr"] == 0.5


def test_torch_neuronx_without_a_device():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    batch = torch.randn(6, 4)
    traced, stored = torch_neuronx.trace(model, batch, compiler_args=["--lnc=1"]), io.BytesIO()
    torch.jit.save(traced, stored)
    stored.seek(0)
    loaded = torch.jit.load(stored)
    assert torch.equal(loaded(batch), model(batch))
    with pytest.raises(ParallelConfigError, match=r"input_output_aliases=.* is not supported"):
        torch_neuronx.trace(model, batch, input_output_aliases={1: 0})
    for parallel in (
        torch_neuronx.DataParallel(loaded, [0, 1, 2], 0),
        torch_neuronx.DataParallel(loaded, [0, 1], False),
    ):
        assert torch.allclose(parallel(batch), model(batch), atol=1e-6)
    with pytest.raises(InputMismatchError, match="5 does not divide over 2"):
        parallel(batch[:5])
    assert torch.allclose(torch_neuronx.DataParallel(model, [0, 1])(batch[:5]), model(batch[:5]), atol=1e-6)
    norm = nn.RMSNorm(4, eps=1e-5)
    assert torch.allclose(torch_neuronx.RmsNorm.apply(batch, norm.weight, 1e-5, 1), norm(batch))


def test_kernels_can_be_decorated_and_say_what_to_do_when_called():
    @torch_neuronx.nki_jit
    def kernel(x): ...

    for call in (lambda: kernel(1), lambda: kernel[2](1), lambda: torch_neuronx.nki_jit()(kernel)[1, 2](1)):
        with pytest.raises(DeviceOnlyError, match="kernel cannot be used here: write it in plain PyTorch"):
            call()
