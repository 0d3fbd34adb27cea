"""A plan applied to every supported model: logits, loss and gradients are the whole model's, and what is saved."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.checkpoint import consolidate_checkpoint
from nxd_infer.context import current_context, make_context, use_context
from nxd_infer.distributed import ParallelizersManager, apply_plan, plan_for
from nxd_infer.errors import ParallelConfigError, WeightMismatchError
from nxd_infer.layout import shard_tensor, weight_layout
from nxd_infer.parallel_state import move_model_to_device
from nxd_infer.util.devices import transport_device
from tests.support.distributed.models import CASES, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
NEAR = {"rtol": 1e-5, "atol": 1e-5}
QWEN3 = next(case for case in CASES if case.kind == "qwen3")
"""Every rank uses the weights of its head norms for its own heads."""


def wrong_gradients(model: nn.Module, whole: nn.Module) -> list[str]:
    """The parameters whose gradient is not this rank's part of the whole model's."""
    tp = current_context().tp
    wanted = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    layouts, found = weight_layout(model), []
    for name, weight in model.named_parameters():
        layout = layouts[name].rank_layout(tp.degree, tp.rank)
        whole_ones = {n: wanted[n] for n in layouts[name].logical_names}
        expected = shard_tensor(whole_ones, layout, device=weight.device)
        if weight.grad is None or not torch.allclose(weight.grad, expected, **NEAR):
            worst = "none" if weight.grad is None else f"{float((weight.grad - expected).abs().max()):.1e}"
            found.append(f"gradient of {name}: {worst}")
    return found


def run(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach()


def differences(case: Case, **options: object) -> list[str]:
    device = transport_device()
    whole, batch = case.build().to(device), {name: value.to(device) for name, value in case.batch().items()}
    model = move_model_to_device(apply_plan(case.build(), plan_for(whole.config), **options), device)
    return compared(model, whole, batch)


def compared(model: nn.Module, whole: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """What differs between this rank's part of a model and the whole one, after a step forward and back."""
    held = sum(p.numel() for p in model.parameters())
    if held >= sum(p.numel() for p in whole.parameters()):
        return ["nothing is split"]
    logits, loss = run(whole, batch)
    own_logits, own_loss = run(model, batch)
    found = wrong_gradients(model, whole)
    if not torch.allclose(own_logits, logits, **NEAR):
        found.append(f"logits: {float((own_logits - logits).abs().max()):.1e}")
    if not torch.allclose(own_loss, loss, **NEAR):
        found.append(f"loss: {float(own_loss)}, wanted {float(loss)}")
    return found


def assigned(model: nn.Module) -> nn.Module:
    """Other parameters in the place of the model's own."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def differences_of_copies(case: Case, sequence_parallel: bool) -> list[str]:
    """New parameters have the whole gradient too, also those that every rank has a part of the gradient of."""
    whole, found = case.build(), []
    run(whole, case.batch())
    parallelizer = ParallelizersManager.parallelizer_for_model(whole)
    ways: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, pickled, assigned]
    for way in ways:
        model = parallelizer.parallelize(case.build(), sequence_parallel_enabled=sequence_parallel)
        model = way(model)
        run(model, case.batch())
        found += [f"{way.__name__}: {one}" for one in wrong_gradients(model, whole)]
    return found


def whole_way(folder: Path, case: Case) -> list[str]:
    """Loaded lazily, with sequence parallelism, trained for a step, saved in shards. The rank 0 keeps its logits."""
    import transformers

    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=4):
        model = getattr(transformers, case.head).from_pretrained(folder / case.kind, attn_implementation="eager")
    assert all(weight.is_meta for weight in model.parameters())
    optimizer = nxd.distributed.make_optimizer_constructor_lazy(torch.optim.SGD)(model.parameters(), lr=0.01)
    parallelizer = ParallelizersManager.parallelizer_for_model(model)
    model = parallelizer.parallelize(model, sequence_parallel_enabled=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    optimizer = parallelizer.optimizer_for_mp(optimizer, nxd.distributed.parameter_mapping(model))
    before = next(iter(model.parameters())).detach().clone()
    found = compared(model.train(), case.build(), case.batch())
    optimizer.step()
    if torch.equal(before, next(iter(model.parameters()))):
        found.append("a step changes nothing")
    parallelizer.save_model_sharded_checkpoint(model, folder / f"{case.kind}-shards", optimizer=optimizer)
    with torch.no_grad():
        logits = model.eval()(**case.batch()).logits
    if current_context().rank == 0:
        torch.save(logits, folder / f"{case.kind}.pt")
    return found


ONCE = list({case.kind: case for case in CASES}.values())
"""The last case of each type."""


def compare(folder: Path) -> list[str]:
    """The first case of each type without sequence parallelism, and the last one all the way."""
    found = []
    for case, sequence_parallel in ((CASES[0], True), (QWEN3, False)):
        found += [f"{case.name}, {problem}" for problem in differences_of_copies(case, sequence_parallel)]
    for case in {case.kind: case for case in reversed(CASES)}.values():
        found += [f"{case.name}: {problem}" for problem in differences(case)]
    for case in ONCE:
        found += [f"{case.name}, lazily: {problem}" for problem in whole_way(folder, case)]
    return found


def test_models_equal_the_whole_ones_and_come_back_as_they_were_trained(tmp_path: Path):
    import transformers

    for case in ONCE:
        case.build().save_pretrained(tmp_path / case.kind)
    for rank, found in enumerate(run_ranks(compare, 4, tmp_path, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])
    for case in ONCE:
        out = tmp_path / f"{case.kind}-whole"
        consolidate_checkpoint(tmp_path / f"{case.kind}-shards", out)
        load = getattr(transformers, case.head).from_pretrained
        with torch.no_grad():
            logits = load(out, attn_implementation="eager", dtype=torch.float32).eval()(**case.batch()).logits
        wanted = torch.load(tmp_path / f"{case.kind}.pt")
        assert float((logits - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max())), case.kind


def test_whole_weights_of_a_split_model_are_written(tmp_path: Path):
    import transformers

    whole = QWEN3.build()
    weights = whole.state_dict()
    with use_context(make_context(2, tp=2)):
        model = apply_plan(copy.deepcopy(whole), plan_for(whole.config), weights=weights)
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert other.save_pretrained.args == (other,)
        with pytest.raises(ParallelConfigError, match="only this rank's part"):
            other.save_pretrained(tmp_path)
        for partial in (model.state_dict(), {}):
            with pytest.raises(WeightMismatchError, match="do not belong to this model"):
                other.save_pretrained(tmp_path, state_dict=partial)
        assert not list(tmp_path.iterdir())
        other.save_pretrained(tmp_path, state_dict=weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
