"""NxDPPModel: its arguments and methods, the loss it returns, dropout, adapters, timelines, and its errors."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import CollectiveError, InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.stage import StandIn
from nxd_infer.trainer import initialize_parallel_model, neuronx_distributed_config
from tests.support.pipeline.models import decoder, tokens
from tests.support.ranks import run_ranks

F64 = torch.float64


class Block(nn.Module):
    def __init__(self, size: int, rate: float):
        super().__init__()
        self.linear, self.dropout = nn.Linear(size, size), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Residual(nn.Module):
    """Blocks, a dropout between them that no stage owns, and a root parameter that the last one uses."""

    def __init__(self, blocks: int = 4, size: int = 6, rate: float = 0.0):
        super().__init__()
        self.bias = nn.Parameter(torch.full((size,), 0.1))
        self.blocks = nn.ModuleList(Block(size, rate) for _ in range(blocks))
        self.between = nn.Dropout(rate)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = self.between(block(x))
        x = (x + self.bias) * self.scale * factor
        return {"other": x, "the_loss": F.mse_loss(x, y)}


class Backwards(Residual):
    """Its blocks are called in another order than they are defined, so weights are needed where they are not held."""

    def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        for block in reversed(self.blocks):
            x = block(x)
        return {"other": x, "the_loss": F.mse_loss(x, y)}


SPEC = {"other": False, "the_loss": True}


def data(rows: int = 8) -> dict[str, Tensor]:
    x, y = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(2), dtype=torch.get_default_dtype())
    return {"x": x, "y": y}


def residual(rate: float = 0.0, **options: Any) -> NxDPPModel:
    torch.manual_seed(5)
    given = {"auto_partition": True, "num_microbatches": 4, "output_loss_value_spec": SPEC, **options}
    return NxDPPModel(Residual(rate=rate), **given)


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
    assert {n for n, m in model.local_named_modules() if isinstance(m, Block)} == {
        f"blocks.{2 * rank}",
        f"blocks.{2 * rank + 1}",
    }
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
    several = residual(return_mb_loss=True).run_train(**data())
    torch.testing.assert_close(torch.stack(several), torch.stack(parts))
    with pytest.raises(ParallelConfigError, match="is on another pipeline stage: call run_train"):
        model(**data())
    gradients_of_backwards()
    return errors(model)


def gradients_of_backwards() -> None:
    torch.manual_seed(5)
    whole = Backwards()
    torch.manual_seed(5)
    model = NxDPPModel(Backwards(), pipeline_cuts=["blocks.1"], num_microbatches=4, output_loss_value_spec=SPEC)
    loss = whole(**data())["the_loss"]
    loss.backward()
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


def errors(model: NxDPPModel) -> list[str]:
    """What each mistake is told, on one rank."""

    class Keeping(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.kept = super().forward(input)
            return self.kept

    class Leaking(nn.Module):
        """A layer that keeps a value, which the model uses by and by."""

        def __init__(self):
            super().__init__()
            self.first, self.second = Keeping(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.first(x)
            return F.mse_loss(self.second(self.first.kept * 2), y)

    class Deciding(Residual):
        def forward(self, x: Tensor, y: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
            for block in self.blocks[: 2 if (y > 50).any() else 4]:
                x = block(x)
            return {"other": x, "the_loss": F.mse_loss(x, y)}

    def train(module: nn.Module, batch: dict[str, Any] | None = None, **options: Any) -> None:
        options = {"output_loss_value_spec": SPEC, "num_microbatches": 2, **options}
        NxDPPModel(module, **options).run_train(**(batch or data()))

    def other_calls() -> None:
        """The first microbatch has fewer calls than the second."""
        batch = data()
        batch["y"][:4] = 100
        train(Deciding(), batch, pipeline_cuts=["blocks.0"])

    def told(action: Any) -> str:
        try:
            action()
        except (ParallelConfigError, InputMismatchError, CollectiveError) as error:
            return str(error)
        return "no error"

    wanted = {
        "the model has no module 'blocks.9'; did you mean blocks.": lambda: train(
            Residual(), pipeline_cuts=["blocks.9"]
        ),
        "needs 1 pipeline_cuts, one after each stage but the last, got 0": lambda: train(Residual()),
        "needs 1 pipeline_cuts, one after each stage but the last, got 2": lambda: train(
            Residual(), pipeline_cuts=["blocks.0", "blocks.1"]
        ),
        "2 pipeline stages, but the model has 1 transformer layers: use at most 1": lambda: train(
            Residual(1), auto_partition=True
        ),
        "nothing comes after 'blocks.3', so the last stage would be empty": lambda: train(
            Residual(), pipeline_cuts=["blocks.3"]
        ),
        "'blocks.1.linear' lies inside 'blocks.1', a Block, which leaf_module_cls keeps whole": lambda: train(
            Residual(), pipeline_cuts=["blocks.1.linear"], leaf_module_cls=["Block"]
        ),
        "the interleaved schedule needs 2 or more": lambda: train(
            Residual(), pipeline_cuts=["blocks.1"], schedule="interleaved"
        ),
        "'z' is not in input_names: x, y": lambda: train(
            Residual(), {**data(), "z": 1}, pipeline_cuts=["blocks.1"], input_names=["x", "y"]
        ),
        "'yy' is not in the parameters of the model's forward: x, y, factor": lambda: train(
            Residual(), {"x": data()["x"], "yy": data()["y"]}, pipeline_cuts=["blocks.1"]
        ),
        "'x' has 7 rows, which num_microbatches=2 does not divide: use one of [1, 7]": lambda: train(
            Residual(), data(7), pipeline_cuts=["blocks.1"]
        ),
        "a value leaves the layer 'first' by another way than its result, and is used outside of it (mul)": lambda: (
            train(Leaking(), pipeline_cuts=["first"], output_loss_value_spec=None)
        ),
        "'blocks.1' was not called in this order; the model called blocks.3, blocks.2": lambda: train(
            Backwards(), pipeline_cuts=["blocks.0", "blocks.1", "blocks.2"], virtual_pipeline_size=2
        ),
        "the stages of a pipeline got different inputs": lambda: train(
            Residual(), data(4 + 4 * current_context().pp.rank), pipeline_cuts=["blocks.1"]
        ),
        "different inputs, of the same shapes, on this one train=True, training=True, x=((8, 6), ": lambda: train(
            Residual(),
            {**data(), "y": data()["y"] + current_context().pp.rank},
            pipeline_cuts=["blocks.1"],
        ),
        "blocks.2' where it came to \"the model's end\"": lambda: other_calls(),
    }
    return [
        f"{message!r} is not in {found!r}"
        for message, action in wanted.items()
        if message not in (found := told(action))
    ]


def test_without_other_stages():
    """At pp 1 it runs the same microbatches in this process, and is called like the module."""
    torch.manual_seed(5)
    whole = Residual()
    torch.manual_seed(5)
    model = NxDPPModel(Residual(), num_microbatches=4, output_loss_value_spec=SPEC)
    loss = whole(**data())["the_loss"]
    loss.backward()
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    torch.testing.assert_close(model.run_eval(**data()), loss.detach())
    torch.testing.assert_close(model(**data())["the_loss"], loss)
    assert model.bubble is not None and 0 <= model.bubble < 1


def test_two_stages():
    assert run_ranks(facade, 2, pp=2) == [[], []]


# --- dropout, adapters, data parallelism, a timeline ---------------------------------------------------------


class OwnDropout(nn.Dropout):
    """Of a value that is split over the tensor-parallel ranks."""

    def forward(self, input: Tensor) -> Tensor:
        with get_xla_rng_tracker().fork():
            return super().forward(input)


def dropped(
    stages: int, schedule: str | None, chunks: int, own: bool = False
) -> tuple[list[float], list[float], float]:
    """Losses of two steps with dropout, twice from one seed, and a random number drawn afterwards."""
    torch.set_default_dtype(F64)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, stages)
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


def test_dropout_is_the_same_at_any_number_of_stages_and_with_any_schedule():
    of_two = [run_ranks(dropped, 2, 2, *how) for how in ((None, 1), ("gpipe", 1), (None, 2))]
    of_four = run_ranks(dropped, 4, 4, None, 1)
    first = of_two[0][0][0]
    assert len(set(first)) == 2, "two steps draw different numbers"
    for ranks in (*of_two, of_four):
        for once, again, _ in ranks:
            assert once == again
            assert once == pytest.approx(first, rel=1e-12)
    assert len({number for _, _, number in of_four}) == 4, "ranks keep generators of their own"


def test_dropout_of_a_ranks_own_stream_is_the_same_with_any_schedule():
    (one, again), (other, _) = (run_ranks(dropped, 2, 2, None, chunks, True) for chunks in (1, 2))
    assert one[0] == one[1] == again[0] and len(set(one[0])) == 2
    assert other[0] == pytest.approx(one[0], rel=1e-12)


def adapted() -> list[str]:
    """LoRA on two stages: every adapter's gradient is that of the model in one process."""
    from nxd_infer.modules.lora import LoRAModel

    lora = {"enable_lora": True, "lora_rank": 2, "target_modules": ["q_proj", "embed_tokens", "down_proj"]}
    config = neuronx_distributed_config(
        pipeline_parallel_size=2,
        pipeline_config={"auto_partition": True, "num_microbatches": 4},
        lora_config=lora,
    )
    torch.manual_seed(3)
    model = initialize_parallel_model(config, decoder, "tied", F64)
    torch.manual_seed(3)
    whole = LoRAModel(decoder("tied", F64), lora)
    given = torch.Generator().manual_seed(1)
    values = {n: torch.randn(p.shape, generator=given, dtype=F64) * 0.1 for n, p in whole.named_parameters()}
    for several in (whole.named_parameters(), model.local_named_parameters()):
        for name, parameter in several:
            if parameter.requires_grad:
                parameter.data.copy_(values[name])
    loss = whole(**tokens())[0]
    loss.backward()
    torch.testing.assert_close(model.run_train(**tokens()), loss.detach(), rtol=1e-10, atol=0)
    trained = [name for name, p in model.local_named_parameters() if p.requires_grad]
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-8, atol=1e-12)
    return trained


def test_adapters():
    first, second = run_ranks(adapted, 2, pp=2)
    assert first and second and not set(first) & set(second)


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
    path = tmp_path / "a folder that is not there" / "trace.json"
    run_ranks(timeline, 2, str(path), pp=2)
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 4 * 2 and all(event["dur"] > 0 for event in events)
    # Of the trace event format: complete events of one process, in microseconds, that do not overlap in a row.
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
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"} == {
        "rank 0: stage 0",
        "rank 1: stage 1",
    }
    assert 0 < trace["otherData"]["bubble"] < 1 and math.isfinite(trace["otherData"]["bubble"])


def test_a_module_of_another_rank_is_moved_by_name_only():
    """It stays without memory, and takes the dtype."""
    hidden = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(StandIn(hidden), nn.Linear(2, 2)).to("cpu", torch.bfloat16)
    assert hidden.weight.is_meta and hidden.weight.dtype == model[1].weight.dtype == torch.bfloat16
    assert model.float().to("cpu")[1].weight.device.type == "cpu" and hidden.weight.dtype == torch.float32
