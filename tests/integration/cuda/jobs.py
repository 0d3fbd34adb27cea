"""What the ranks of tests/cuda do. A comparison returns what differs from plain PyTorch in one process."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import comm, parallel_state
from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_infer.testing.compare import Reference, Training, compare_with, train_single
from nxd_infer.trainer import shutdown
from nxd_infer.util.devices import transport_device
from tests.integration.pipeline import test_equivalence as pipelines
from tests.integration.trainer import test_equivalence as trainer
from tests.support.pipeline.models import SPEC, Residual, data


def current_world() -> int:
    return int(os.environ["WORLD_SIZE"])


def here(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch on the device of the rank's model."""
    return {name: value.to(transport_device()) if isinstance(value, Tensor) else value for name, value in batch.items()}


def alone(model_fn: Any, batch: dict[str, Any], training: Training) -> Reference:
    """Trained in this process on the rank's GPU, where sines and cosines are rounded otherwise than on the CPU."""
    found = train_single(lambda: model_fn().to("cuda"), {name: value.cuda() for name, value in batch.items()}, training)
    host = {
        name: {key: value.cpu() for key, value in getattr(found, name).items()} for name in ("gradients", "weights")
    }
    return replace(found, **host)


def compared(model_fn: Any, batch: dict[str, Any], training: Training, name: str) -> list[str]:
    reference = alone(model_fn, batch, training)
    parallel_state.destroy_model_parallel()
    return [f"{name}: {line}" for line in compare_with(reference, model_fn, here(batch), training)]


def layers(degrees: list[tuple[int, int]]) -> list[str]:
    """Every case of tests/trainer at the degrees (tp, dp)."""
    parallel_state.initialize_model_parallel()
    found = []
    for case in trainer.cases(degrees):
        _, model, dtype, options = case
        built = trainer.builder(model, dtype)
        found += compared(built, trainer.batch_for(model, dtype), Training(**options), trainer.name_of(case))
    shutdown()
    return found


def stages(degrees: tuple[int, int, int]) -> list[str]:
    """Every case of tests/pipeline at the degrees (tp, pp, dp)."""
    parallel_state.initialize_model_parallel()
    tp, pp, dp = degrees
    found = []
    for case in pipelines.CASES[degrees]:
        model, dtype, options = case
        training = Training(tp=tp, pp=pp, dp=dp, **options)
        built = pipelines.builder(model, dtype)
        found += compared(built, pipelines.batch_for(case, dp), training, f"{model} {dtype} {options}")
    shutdown()
    return found


class Dropping(nn.Module):
    """Dropout of a split and of a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, gather_output=False)
        self.down = RowParallelLinear(32, 16, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        with get_xla_rng_tracker().fork():
            split = F.dropout(F.gelu(self.up(x)), 0.3)
        return F.dropout(self.down(split), 0.3)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def stages_drop(stages: int, chunks: int) -> list[float]:
    """Losses of two steps with dropout in the layers and between them, which no stage owns; and a number drawn then."""
    pipeline = {"auto_partition": True, "num_microbatches": 4, "virtual_pipeline_size": chunks}
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=stages, pipeline_config={**pipeline, "output_loss_value_spec": SPEC}
    )
    torch.manual_seed(5)
    model = nxd.initialize_parallel_model(config, Residual, rate=0.4)
    torch.manual_seed(11 + parallel_state.get_pipeline_model_parallel_rank())
    found = [float(model.run_train(**here(data()))) for _ in range(2)]
    found.append(float(torch.rand((), device=transport_device())))
    shutdown()
    return found


def dropout(checkpoint: bool) -> list[float]:
    """Losses of some steps with dropout, and a number from the stream that is this rank's own."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=2, activation_checkpoint_config=(Dropping,) if checkpoint else None
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, Dropped)
    model_parallel_xla_manual_seed(3)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(transport_device())
    found = []
    for _ in range(4):
        found.append(float(model.run_train(x)))
        optimizer.step()
        optimizer.zero_grad()
    with get_xla_rng_tracker().fork():
        found.append(float(torch.rand((), device=transport_device())))
    shutdown()
    return found


class Half(nn.Module):
    """A whole and a split layer."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(4, 4)
        self.split = ColumnParallelLinear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.split(self.whole(x)).mean()


def on_the_gpu() -> Half:
    with torch.device("cuda"):
        return Half()


def built(seeded_apart: bool) -> dict[str, Any]:
    """The values of a model that ranks build in different ways, and a random number that each draws after that."""
    found = {}
    for name, model_fn, meta in (("host", Half, False), ("meta", Half, True), ("gpu", on_the_gpu, False)):
        parallel_state.destroy_model_parallel()
        config = nxd.neuronx_distributed_config(tensor_parallel_size=2, model_init_config={"meta_device_init": meta})
        torch.manual_seed(parallel_state.get_tensor_model_parallel_rank() if seeded_apart else 0)
        model = nxd.initialize_parallel_model(config, model_fn)
        weights = model.state_dict()
        split = comm.all_gather(weights["split.weight"], current_context(), "tp", 0)
        found[name] = [*weights["whole.weight"].flatten().tolist(), *split.flatten().tolist()]
        found[f"after {name}"] = float(torch.rand((), device="cuda"))
    shutdown()
    return found


def trained(folder: str, first: int, last: int, halves: bool) -> list[Any]:
    """Losses of the steps after checkpoint ``first`` of a model on two ranks, which then saves one; and its device."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=2,
        sequence_parallel=True,
        optimizer_config={"zero_one_enabled": True},
        mixed_precision_config={"use_master_weights": halves, "use_fp32_grad_acc": halves},
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if halves else torch.float32
    model = nxd.initialize_parallel_model(config, trainer.builder("llama", dtype))
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if first:
        assert nxd.load_checkpoint(folder, f"step_{first}", **job) == {"step": first}
    losses: list[Any] = []
    for _ in range(first, last):
        losses.append(float(model.run_train(**here(trainer.tokens()))))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    nxd.save_checkpoint(folder, f"step_{last}", **job, user_content={"step": last}, async_save=True)
    (device,) = {param.device.type for param in model.parameters()}
    shutdown()
    return [*losses, device]


def hugging_face() -> list[str]:
    """Every model of tests/distributed, split over the ranks."""
    from tests.integration.distributed.test_apply import differences
    from tests.support.distributed.models import CASES

    parallel_state.initialize_model_parallel(current_world())
    found = []
    for case, sequence_parallel in itertools.product(CASES, (False, True)):
        what = f"{case.name}{' with sequence parallelism' if sequence_parallel else ''}"
        found += [f"{what}: {line}" for line in differences(case, sequence_parallel=sequence_parallel)]
    shutdown()
    return found


def lightning(jobs: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, list[float]]:
    """The losses of jobs under a Trainer, on as many machines as there are ranks, with one GPU each."""
    from tests.support.lightning.jobs import fit

    machines = {"accelerator": "gpu", "num_nodes": current_world()}
    found = {}
    for name, (rows, job) in jobs.items():
        parallel_state.destroy_model_parallel()
        found[name] = fit(rows, {**job, "trainer": {**job.get("trainer", {}), **machines}})["losses"]
    shutdown()
    return found


def lose_a_peer(said: str) -> None:
    """Rank 1 ends without a word; rank 0 then waits for it in an all-reduce, and writes what it is told into a file."""
    parallel_state.initialize_model_parallel(2, timeout=20)
    context = current_context()
    x = torch.ones(4, device=transport_device())
    assert comm.all_reduce(x, context, "tp").tolist() == [2.0] * 4
    print("the ranks have met", flush=True)
    if context.rank == 1:
        os._exit(1)
    try:
        found: Any = comm.all_reduce(x, context, "tp").tolist()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    Path(said).write_text(json.dumps(found))
