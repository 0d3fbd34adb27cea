"""Each argument of NxDPPModel, and of the configuration with stages, does what the documents say."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.options import PipelineOptions
from tests.integration.pipeline.test_model import SPEC, Residual, data, residual
from tests.integration.pipeline.test_tracing import (
    HEAD,
    MODULE,
    Gate,
    Model,
    Noting,
    by_child,
    by_method,
    by_module,
    by_name,
)
from tests.integration.pipeline.test_tracing import deciding as wrapped_by_name
from tests.support.pipeline.models import decoder, tokens
from tests.support.ranks import run_ranks

F64 = torch.float64


def parts() -> tuple[list[float], list[float], list[float]]:
    """Each microbatch's loss: of training, of evaluation, and of the whole model."""
    whole = residual()
    torch.manual_seed(5)
    alone = Residual()
    rows = zip(*(tensor.chunk(4) for tensor in data().values()), strict=True)
    wanted = [float(alone(*part)["the_loss"]) for part in rows]
    model = residual(return_mb_loss=True)
    assert float(whole.run_train(**data())) == pytest.approx(sum(wanted) / 4)
    return [float(one) for one in model.run_train(**data())], [float(one) for one in model.run_eval(**data())], wanted


def test_return_mb_loss():
    for trained, evaluated, wanted in run_ranks(parts, 2, pp=2):
        assert len(set(wanted)) == 4
        assert trained == pytest.approx(wanted) and evaluated == pytest.approx(wanted)
    with pytest.raises(ParallelConfigError, match="gives one number, so return_mb_loss must be False"):
        PipelineOptions({"return_mb_loss": True, "broadcast_and_average_loss": True})


def chunks() -> list[str]:
    torch.set_default_dtype(F64)
    torch.manual_seed(5)
    whole = Residual()
    loss = whole(**data())["the_loss"]
    loss.backward()
    model = residual(virtual_pipeline_size=2)
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    return [name for name, _ in model.local_named_modules() if name.count(".") == 1]


def test_virtual_pipeline_size():
    """A rank holds every other one of four stages."""
    assert run_ranks(chunks, 2, pp=2) == [["blocks.0", "blocks.2"], ["blocks.1", "blocks.3"]]


TRACED: dict[str, tuple[Any, dict[str, Any]]] = {
    "autowrap_functions": (by_name, {"autowrap_functions": (wrapped_by_name,)}),
    "autowrap_modules": (by_module, {"autowrap_modules": (MODULE,)}),
    "autowrap_obj_methods": (by_method, {"autowrap_obj_methods": {HEAD: ["apply"]}}),
    "leaf_module_cls": (by_child, {"leaf_module_cls": [Gate]}),
    "leaf_module_cls by name": (by_child, {"leaf_module_cls": ["Gate"]}),
    "tracer_cls torch": (None, {}),
    "tracer_cls hf": (None, {"tracer_cls": "hf"}),
    "tracer_cls of one's own": (None, {"tracer_cls": Noting}),
}


def traced(name: str) -> tuple[float, float, list[str], str]:
    """The loss over stages and in one process, what the tracer has seen, and what the argument left out is told."""
    between, options = TRACED[name]
    options = {"tracer_cls": "torch", "pipeline_cuts": ["layers.1"], "num_microbatches": 2, **options}
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    whole = Model(between)
    wanted = sum(float(whole(part).detach()) for part in x.chunk(2)) / 2
    Noting.seen.clear()
    found = float(NxDPPModel(Model(between), **options).run_train(x))
    seen, refused = sorted(set(Noting.seen)), ""
    if between is not None:
        try:
            NxDPPModel(Model(between), num_microbatches=2, pipeline_cuts=["layers.1"], tracer_cls="torch")
        except ParallelConfigError as error:
            refused = str(error)
    return found, wanted, seen, refused


@pytest.mark.parametrize("name", TRACED)
def test_what_tracing_is_told(name: str):
    for found, wanted, seen, refused in run_ranks(traced, 2, name, pp=2):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert bool(seen) == (name == "tracer_cls of one's own")
        assert ("cannot trace the code around the layers of Model" in refused) == (TRACED[name][0] is not None)


FILLED: list[int] = []


def fill(module: nn.Module) -> None:
    """Fill the module's own parameters with random numbers."""
    FILLED.extend(parameter.numel() for parameter in module.parameters(recurse=False))
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3)


def filled() -> list[str]:
    """What is not as in one process, by each of the ways to give the function."""
    torch.set_default_dtype(F64)
    whole = Residual()
    torch.manual_seed(9)
    for module in whole.modules():
        fill(module)
    options = {"auto_partition": True, "num_microbatches": 4, "output_loss_value_spec": SPEC}

    def configured(**more: Any) -> Any:
        config = nxd.neuronx_distributed_config(pipeline_parallel_size=2, **more)
        return nxd.initialize_parallel_model(config, Residual)

    def direct() -> Any:
        with torch.device("meta"):
            module = Residual()
        module.scale = torch.tensor(2.0)
        return NxDPPModel(module, **options, param_init_fn=fill)

    ways = {
        "NxDPPModel": direct,
        "pipeline_config": lambda: configured(
            pipeline_config={**options, "param_init_fn": fill}, model_init_config={"meta_device_init": True}
        ),
        "model_init_config": lambda: configured(
            pipeline_config=options, model_init_config={"meta_device_init": True, "param_init_fn": fill}
        ),
    }
    found = []
    for name, make in ways.items():
        torch.manual_seed(9)
        FILLED.clear()
        model = make()
        held = dict(model.local_named_parameters())
        found += [f"{name}: {n}" for n, p in held.items() if p.is_meta or not torch.equal(p, whole.get_parameter(n))]
        if not FILLED or len(held) == len(list(whole.parameters())):
            found.append(f"{name}: {len(FILLED)} filled, {len(held)} held")
    return found


def test_param_init_fn():
    assert run_ranks(filled, 2, pp=2) == [[], []]


def built_at_once(folder: str, factor: int) -> int:
    """The most ranks that were building their model while this one did."""
    most = 0

    def get_model() -> nn.Module:
        nonlocal most
        mine = Path(folder, f"{factor} building {current_context().rank}")
        mine.touch()
        end = time.monotonic() + (120 if factor > 1 else 0.3)
        while most < factor + 1 and time.monotonic() < end:
            most = max(most, len(list(Path(folder).glob(f"{factor} building *"))))
            if factor > 1 and most == factor:
                time.sleep(0.1)
                break
            time.sleep(0.005)
        mine.unlink()
        return Residual()

    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2,
        pipeline_config={"auto_partition": True, "output_loss_value_spec": SPEC},
        model_init_config={"sequential_move_factor": factor},
    )
    nxd.initialize_parallel_model(config, get_model)
    return most


@pytest.mark.parametrize("factor", [1, 2])
def test_sequential_move_factor(factor: int, tmp_path: Path):
    found = run_ranks(built_at_once, 2, str(tmp_path), factor, pp=2)
    assert max(found) == factor


def mixed(microbatches: int) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Losses of bfloat16 weights with float32 masters, at the degree of the job."""
    stages = current_context().world_size
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=stages,
        pipeline_config={"auto_partition": True, "num_microbatches": microbatches},
        mixed_precision_config={"use_master_weights": True, "use_fp32_grad_acc": True},
    )
    torch.manual_seed(3)
    model = nxd.initialize_parallel_model(config, partial(decoder, "tied", torch.bfloat16))
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        losses.append(float(model.run_train(**tokens(seed=step))))
        optimizer.step()
        optimizer.zero_grad()
    masters = {piece.tensor.dtype for piece in optimizer.pieces}
    return losses, {parameter.dtype for parameter in model.parameters()}, masters


def test_mixed_precision():
    """The whole batch at once computes what one process does; microbatches round their own losses."""
    (wanted, _, _), *_ = run_ranks(mixed, 1, 1)
    for microbatches, tolerance in ((1, 1e-3), (4, 2e-2)):
        for losses, weights, masters in run_ranks(mixed, 2, microbatches, pp=2):
            assert (weights, masters) == ({torch.bfloat16}, {torch.float32})
            assert losses == pytest.approx(wanted, rel=tolerance) and len(set(losses)) == 5
