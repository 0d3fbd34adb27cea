"""NxDPPModel on stages: its methods, the loss it returns, dropout, a timeline, its errors, and how it is built."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.context import current_context
from nxd_infer.errors import CollectiveError, InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.stage import StandIn
from tests.support.pipeline.models import SPEC, Backwards, Block, Residual, data, residual
from tests.support.ranks import run_ranks

F64 = torch.float64


# --- two stages: what run_train and run_eval give -----------------------------------------------------------


def facade() -> list[str]:
    """Every check on one rank of two; what failed."""
    torch.set_default_dtype(F64)
    torch.manual_seed(5)
    whole = Residual()
    loss = whole(**data())["the_loss"]
    loss.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    model = residual(transformer_layer_cls=Block, input_names=["x", "y", "factor"], tracer_cls="hf")
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    held = dict(model.local_named_parameters())
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.grad, gradients[name])
    rank = current_context().pp.rank
    assert set(held) == {
        name for name in gradients if (name == "bias" or int(name.split(".")[1]) < 2) == (rank == 0)
    }, sorted(held)
    assert list(map(id, model.local_parameters())) == list(map(id, held.values()))
    assert set(model.local_state_dict()) == {*held, "scale"}
    held_blocks = {n for n, m in model.local_named_modules() if isinstance(m, Block)}
    assert held_blocks == {f"blocks.{2 * rank}", f"blocks.{2 * rank + 1}"}
    interleaved = residual(virtual_pipeline_size=2)  # a rank holds every other one of four stages
    held_blocks = {n for n, m in interleaved.local_named_modules() if isinstance(m, Block)}
    assert held_blocks == {f"blocks.{rank}", f"blocks.{rank + 2}"}
    assert model.blocks[rank * 2] in model.local_modules()
    assert dict(model.named_modules()) == dict(model.local_named_modules())
    assert list(model.modules()) == model.local_modules()
    several = (model.modules(), model.children(), dict(model.named_modules()).values())
    assert not any(isinstance(module, StandIn) for modules in several for module in modules)
    # By position, with a value that is no tensor; a second step adds to the gradients.
    again = model.run_train(data()["x"], data()["y"], factor=1.0)
    torch.testing.assert_close(again, loss.detach())
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.grad, 2 * gradients[name])
    with torch.no_grad():
        torch.testing.assert_close(model.run_eval(**data()), whole.eval()(**data())["the_loss"])
    assert model.training and model.module.training
    for block in (model.blocks[1], model.blocks[3]):  # one of them is of the other stage
        block.dropout.eval()
    model.run_eval(**data())
    assert not (model.blocks[1].dropout.training or model.blocks[3].dropout.training)
    assert model.blocks[1].training and model.blocks[2].dropout.training and model.between.training
    parts = [whole(*(t.chunk(4)[i] for t in data().values()))["the_loss"].detach() for i in range(4)]
    one_by_one = residual(return_mb_loss=True)
    for step in (one_by_one.run_train, one_by_one.run_eval):
        torch.testing.assert_close(torch.stack(step(**data())), torch.stack(parts))
    with pytest.raises(ParallelConfigError, match="is on another pipeline stage: call run_train"):
        model(**data())
    gradients_of_backwards()
    return errors()


def gradients_of_backwards() -> None:
    torch.manual_seed(5)
    whole = Backwards()
    model = NxDPPModel(
        copy.deepcopy(whole), pipeline_cuts=["blocks.1"], num_microbatches=4, output_loss_value_spec=SPEC
    )
    loss = whole(**data())["the_loss"]
    loss.backward()
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


class Deciding(Residual):
    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks[: 2 if (y > 50).any() else 4]:
            x = block(x)
        return {"other": x, "the_loss": F.mse_loss(x, y)}


def errors() -> list[str]:
    """What each mistake is told, on one rank."""
    others = {**data(), "y": data()["y"] + current_context().pp.rank}
    fewer = {**data(), "y": torch.cat([torch.full((4, 6), 100.0), data()["y"][4:]])}  # calls, in the first microbatch
    inside = {"pipeline_cuts": ["blocks.1.linear"], "leaf_module_cls": ["Block"]}
    three = {"pipeline_cuts": ["blocks.0", "blocks.1", "blocks.2"], "virtual_pipeline_size": 2}
    mistakes: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = [
        (
            "needs 1 pipeline_cuts, one after each stage but the last, got 0",
            Residual(),
            data(),
            {"pipeline_cuts": None},
        ),
        ("nothing comes after 'blocks.3', so the last", Residual(), data(), {"pipeline_cuts": ["blocks.3"]}),
        ("'blocks.1.linear' lies inside 'blocks.1', a Block, which leaf_module_cls keeps", Residual(), data(), inside),
        ("'z' is not in input_names: x, y", Residual(), {**data(), "z": 1}, {"input_names": ["x", "y"]}),
        ("'blocks.1' was not called in this order; the model called blocks.3", Backwards(), data(), three),
        (
            "different inputs, of the same shapes, on this one train=True, training=True, x=(",
            Residual(),
            others,
            {},
        ),
        ("blocks.2' where it came to \"the model's end\"", Deciding(), fewer, {"pipeline_cuts": ["blocks.0"]}),
    ]
    found = []
    for message, module, batch, options in mistakes:
        given = {"output_loss_value_spec": SPEC, "num_microbatches": 2, "pipeline_cuts": ["blocks.1"], **options}
        with pytest.raises((ParallelConfigError, InputMismatchError, CollectiveError)) as caught:
            NxDPPModel(module, **given).run_train(**batch)
        if message not in str(caught.value):
            found.append(f"{message!r} is not in {str(caught.value)!r}")
    return found


@pytest.mark.smoke
def test_two_stages():
    assert run_ranks(facade, 2, pp=2) == [[], []]


# --- dropout, adapters, data parallelism, a timeline ---------------------------------------------------------


class OwnDropout(nn.Dropout):
    """Of a value that is split over the tensor-parallel ranks."""

    def forward(self, input: Tensor) -> Tensor:
        with get_xla_rng_tracker().fork():
            return super().forward(input)


def dropped(schedule: str | None, chunks: int, own: bool = False) -> tuple[list[float], list[float], float]:
    """Losses of two steps with dropout, twice from one seed, and a random number drawn afterwards."""
    found = []
    for _ in range(2):
        model = residual(0.4, schedule=schedule, virtual_pipeline_size=chunks)
        for module in model.modules() if own else ():
            if isinstance(module, nn.Dropout):
                module.__class__ = OwnDropout
        model_parallel_xla_manual_seed(7)
        torch.manual_seed(11 + current_context().rank)
        found.append([float(model.run_train(**data())) for _ in range(2)])
    return found[0], found[1], float(torch.rand(()))


def all_dropped(ways: list[tuple[str | None, int, bool]]) -> list[tuple[list[float], list[float], float]]:
    torch.set_default_dtype(F64)
    return [dropped(*way) for way in ways]


def test_dropout_is_the_same_at_any_number_of_stages_and_with_any_schedule():
    """Also in the stream of a rank's own, with any schedule."""
    ways = [(None, 1, False), ("gpipe", 1, False), (None, 2, False), (None, 1, True), (None, 2, True)]
    of_two = run_ranks(all_dropped, 2, ways, pp=2)
    of_four = run_ranks(all_dropped, 4, ways[:1], pp=4)
    first, own = of_two[0][0][0], of_two[0][3][0]
    assert len(set(first)) == 2, "two steps draw different numbers"
    assert len(set(own)) == 2 and own != first
    for found in (*of_two, *of_four):
        for (_, _, in_own), (once, again, _) in zip(ways, found, strict=False):
            assert once == again
            assert once == pytest.approx(own if in_own else first, rel=1e-12)
    assert len({rank[0][2] for rank in of_four}) == 4, "ranks keep generators of their own"


def averaged() -> tuple[float, float]:
    """The loss of this rank's own batch, and the average over the two data-parallel ranks."""
    batch = {name: tensor + current_context().dp.rank for name, tensor in data().items()}
    own = float(residual().run_train(**batch))
    return own, float(residual(broadcast_and_average_loss=True).run_train(**batch))


def test_the_average_over_data_parallel_ranks():
    found = run_ranks(averaged, 4, pp=2, tp=1)
    own = [one for one, _ in found]
    assert own[0] == own[2] != own[1] == own[3]
    assert all(mean == pytest.approx((own[0] + own[1]) / 2) for _, mean in found)


def timeline(path: str) -> None:
    residual(trace_file_path=path).run_train(**data())


def test_a_timeline(tmp_path: Path):
    """In the trace event format: complete events of one process, in microseconds, that do not overlap in a row."""
    path = tmp_path / "a folder that is not there" / "trace.json"
    run_ranks(timeline, 2, str(path), pp=2)
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for row in (0, 1):
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == row)
        assert len(mine) == 8 and all(before[1] <= after[0] for before, after in itertools.pairwise(mine))
    assert {event["pid"] for event in trace["traceEvents"]} == {0} and min(event["ts"] for event in events) == 0
    began = {(e["name"], e["args"]["stage"]): e["ts"] for e in events}
    for event in events:
        stage, name = event["args"]["stage"], event["name"]
        before = (name, stage - 1) if name[0] == "F" else (name, stage + 1)
        # Not after its end: a pass sends what it has made before it ends.
        assert event["ts"] > began.get(before, -1.0), "nothing runs before what it waits for"
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert rows == {"rank 0: stage 0", "rank 1: stage 1"}
    assert 0 < trace["otherData"]["bubble"] < 1


# --- how it is built ---------------------------------------------------------------------------------------


def fill(module: nn.Module) -> None:
    """Fill the module's own parameters with random numbers, and the number that one of them holds beside them."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3)
    if isinstance(module, Residual):
        module.scale = torch.tensor(2.0)


def filled() -> list[str]:
    """What ``param_init_fn`` fills otherwise than in one process, from the meta device."""
    torch.set_default_dtype(F64)
    torch.manual_seed(9)
    whole = Residual()
    torch.manual_seed(9)
    for module in whole.modules():
        fill(module)
    options = {"auto_partition": True, "num_microbatches": 4, "output_loss_value_spec": SPEC}
    with torch.device("meta"):
        module = Residual()
    torch.manual_seed(9)
    models = [NxDPPModel(module, **options, param_init_fn=fill)]
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=2,
        pipeline_config=options,
        model_init_config={"meta_device_init": True, "param_init_fn": fill},
    )
    torch.manual_seed(9)
    models.append(nxd.initialize_parallel_model(config, Residual))
    return [
        name
        for model in models
        for name, held in model.local_named_parameters()
        if held.is_meta or not torch.equal(held, whole.get_parameter(name))
    ]


def test_param_init_fn_fills_the_stage():
    assert run_ranks(filled, 2, pp=2) == [[], []]
