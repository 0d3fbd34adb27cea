"""The mixture of experts on real ranks: training is training in one process, whatever the degrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import nxd_infer as nxd
from nxd_infer import comm, parallel_state
from nxd_infer.checkpoint.reshard import reshard_checkpoint
from nxd_infer.checkpoint.source import gather_weights, weight_source
from nxd_infer.context import current_context
from nxd_infer.layout import load_weights
from nxd_infer.modules.moe import ExpertMLPs, MoE, RouterTopK
from nxd_infer.parallel_layers import grads
from nxd_infer.testing.compare import Reference, Training, compare_with, train_single
from nxd_models.llama.config import Mixture
from nxd_models.llama.model import CausalLM
from tests.support.modules.moe import TinyMixtral, texts
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import mine
from tests.support.trainer.models import CONFIG, tokens

F64 = torch.float64

Case = tuple[dict[str, Any], dict[str, Any]]

ONE_BATCH: dict[str, Any] = {}
TWO_BATCHES = {"parts": 2}
CASES: dict[str, list[Case]] = {
    "tp 2": [
        (ONE_BATCH, {"tp": 2}),
        (ONE_BATCH, {"tp": 2, "sequence_parallel": True, "steps": 6}),
        ({"shared": True, "capacity_factor": 1.0}, {"tp": 2, "sequence_parallel": True}),
        ({"bias": True, "early_expert_affinity_modulation": True}, {"tp": 2}),
        ({"dtype": torch.float32}, {"tp": 2, "sequence_parallel": True, "steps": 6}),
    ],
    "ep 2": [
        (TWO_BATCHES, {"dp": 2, "ep": 2, "steps": 6}),
        (TWO_BATCHES, {"dp": 2, "ep": 2, "zero1": True, "steps": 6}),
        ({**TWO_BATCHES, "capacity_factor": 0.7, "bias": True}, {"dp": 2, "ep": 2, "meta": True}),
        ({**TWO_BATCHES, "dtype": torch.float32}, {"dp": 2, "ep": 2, "zero1": True}),
        ({"parts": 4}, {"dp": 2, "ep": 2, "accumulate": 2, "activation_checkpoint": "full", "zero1": True}),
    ],
    "tp 4": [(ONE_BATCH, {"tp": 4, "sequence_parallel": True, "steps": 6})],
    "tp 2, ep 2": [
        ({"family": True}, {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "zero1": True, "steps": 6}),
        ({"family": True}, {"dp": 4, "ep": 2}),
        ({**TWO_BATCHES, "shared": True}, {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "zero1": True}),
        ({**TWO_BATCHES, "bias": True}, {"tp": 2, "dp": 2, "ep": 2}),
    ],
    "pp 2, ep 2": [({"parts": 4}, {"pp": 2, "dp": 2, "ep": 2, "zero1": True})],
    "ep 2 of dp 4": [
        ({"parts": 4}, {"dp": 4, "ep": 2, "zero1": True}),
        ({"parts": 4}, {"dp": 4, "ep": 2}),
        ({"parts": 4}, {"dp": 4, "ep": 4, "zero1": True}),
    ],
}


def builder(family: bool = False, dtype: torch.dtype = F64, **options: Any) -> Callable[[], torch.nn.Module]:
    """A family's model, or one of modules.moe; and its batch."""
    if family:
        return partial(CausalLM, replace(CONFIG, mixture=Mixture(4, 2, 20, normalised=True)), dtype)
    return partial(TinyMixtral, dtype, **options)


def batch(family: bool = False, **_: Any) -> dict[str, torch.Tensor]:
    return tokens() if family else texts()


def differences(cases: list[tuple[Case, Reference]]) -> list[str]:
    found = []
    for (model, options), reference in cases:
        # A gradient may be as small as what float32 rounds off: in float32 it is compared less closely.
        limit = 1e-5 if model.get("dtype") == torch.float32 else 1e-10
        found += [
            f"{model} {options}: {line}"
            for line in compare_with(reference, builder(**model), batch(**model), Training(**options), limit)
        ]
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("name", CASES)
def test_training_is_training_in_one_process(name):
    cases = [
        (case, train_single(builder(**case[0]), batch(**case[0]), Training(steps=case[1].get("steps", 3))))
        for case in CASES[name]
    ]
    degrees = [options.get("tp", 1) * options.get("dp", 1) * options.get("pp", 1) for _, options in CASES[name]]
    for found in run_ranks(alone, degrees[0], cases):
        assert not found, "\n".join(found)


def alone(cases: list[tuple[Case, Reference]]) -> list[str]:
    parallel_state.destroy_model_parallel()
    return differences(cases)


def by_hand(tp: int, ep: int) -> list[float]:
    """Train without an optimizer of ours; the norms of the gradients, and the losses."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
    torch.manual_seed(0)
    model, found, dp = TinyMixtral(F64, 4, bias=True), [], current_context().dp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**mine(texts()))
        loss.backward()
        named = [(param.grad, getattr(param, "expert_model_parallel", False)) for param in model.parameters()]
        grads.bucket_allreduce_gradients([grad for grad, _ in named])
        grads.bucket_allreduce_gradients([grad for grad, expert in named if not expert], reduce_over_ep_group=True)
        found.append(float(grads.clip_grad_norm(model.parameters(), 1.0)))
        optimizer.step()
        found.append(float(comm.all_reduce(loss.detach(), current_context(), "dp")) / dp.degree)
    return found


@pytest.mark.parametrize(("world", "tp", "ep"), [(2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2)])
def test_a_loop_that_reduces_gradients_itself_trains_as_one_process(world: int, tp: int, ep: int):
    (expected,) = run_ranks(by_hand, 1, 1, 1)
    for found in run_ranks(by_hand, world, tp, ep):
        assert found == pytest.approx(expected, abs=1e-6)


def blocks_of_transformers() -> list[tuple[Any, bool]]:
    """Mixtral's and Qwen3's blocks with the same weights everywhere, and whether affinities sum to 1."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_experts_per_tok": 2}
    mixtral = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=24, num_local_experts=8, **sizes))
    qwen = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(moe_intermediate_size=24, num_experts=8, **sizes))
    for block in (mixtral, qwen):
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return [(mixtral, True), (qwen, bool(qwen.gate.norm_topk_prob))]


def gaps_to_transformers() -> list[float]:
    """At every degree, the largest difference of the outputs, of the gradients, and of
    those for a piece of the sequence."""
    gaps = []
    for tp, ep in ((4, 1), (2, 1), (2, 2), (1, 2), (1, 4)):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
        context = current_context()
        for block, normalize in blocks_of_transformers():
            router, experts = (
                RouterTopK(8, 2, 16),
                ExpertMLPs(8, 2, 16, 24, "silu", normalize_top_k_affinities=normalize),
            )
            ours = MoE(router, experts)
            weights = {
                "router.linear_router.weight": block.gate.weight,
                "expert_mlps.mlp_op.gate_up_proj.weight": block.experts.gate_up_proj.transpose(1, 2).contiguous(),
                "expert_mlps.mlp_op.down_proj.weight": block.experts.down_proj.transpose(1, 2).contiguous(),
            }
            load_weights(
                ours, {name: weight.detach() for name, weight in weights.items()}, rank=context.tp.rank, degree=tp
            )
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(context.dp.rank), requires_grad=True)
            same = x.detach().clone().requires_grad_(True)
            (y,), expected = ours(x), block(same)
            y.square().sum().backward()
            expected.square().sum().backward()
            gaps += [float((a - b).abs().max()) for a, b in ((y, expected), (x.grad, same.grad))]
            pieces = MoE(router, experts, sequence_parallel_enabled=True, sequence_dimension=1)
            (piece,), own = pieces(x.chunk(tp, 1)[context.tp.rank]), y.chunk(tp, 1)[context.tp.rank]
            gaps.append(float((piece - own).abs().max()))
    return gaps


def test_outputs_are_those_of_transformers_at_every_degree():
    for gaps in run_ranks(gaps_to_transformers, 4):
        assert len(gaps) == 30 and max(gaps) < 1e-5


def trained(folder: str, action: str, tp: int, ep: int, zero1: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Save after two steps or load what was saved, and make two steps more; their losses and the weights after them."""
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        tp, expert_parallel_size=ep, optimizer_config={"zero_one_enabled": zero1}, sequence_parallel=tp > 1
    )
    torch.manual_seed(0 if action == "save" else 1)
    model = nxd.initialize_parallel_model(config, partial(TinyMixtral, F64, 4, bias=True))
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    if action == "save":
        steps(model, optimizer)
        nxd.save_checkpoint(folder, "two", model, optimizer)
    else:
        nxd.load_checkpoint(folder, "two", model, optimizer)
    return steps(model, optimizer), gather_weights(model)


def steps(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model.run_train(**mine(texts()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(comm.all_reduce(loss, current_context(), "dp")) / current_context().dp.degree)
    return losses


def test_a_checkpoint_goes_on_at_other_expert_degrees(tmp_path):
    """Of four ranks: experts on 2, on 4 (with ZeRO-1), on one (tensor parallel), and of each on the others."""
    degrees = [(1, 2, False), (1, 4, True), (2, 2, True), (2, 1, False)]
    expected: Any = None
    for number, save in enumerate(degrees[:3]):
        folder = str(tmp_path / str(number))
        results = [run_ranks(trained, 4, folder, "save", *save)[0]]
        # Each folder goes on where it was saved, bit for bit, and at the next degrees.
        results += [run_ranks(trained, 4, folder, "load", *load)[0] for load in (save, degrees[number + 1])]
        assert results[0][0] == results[1][0], save
        for losses, weights in results:
            expected = expected or (losses, weights)
            assert losses == pytest.approx(expected[0], abs=1e-12), save
            assert weights.keys() == expected[1].keys() and len(weights) > 10
            assert all(torch.allclose(one, expected[1][name], rtol=0, atol=1e-11) for name, one in weights.items())
    found = reshard_checkpoint(tmp_path / "1", tmp_path / "resharded", tp=2)
    assert found.degrees == {"tp": 2, "pp": 1, "dp": 4}
    source, whole = weight_source(tmp_path / "resharded"), weight_source(tmp_path / "0")
    assert set(source.keys()) == set(whole.keys()) == expected[1].keys()
    assert all(torch.allclose(source.read(name), whole.read(name), rtol=0, atol=1e-11) for name in source.keys())  # noqa: SIM118
