"""One of the two ranks of the training benchmark: every participant's step on one model, batch and optimizer.

``python -m bench.train_ranks RANK FOLDER ROUNDS QUICK SECONDS``. All share the same two processes of one thread each
and take turns, so that a disturbance affects a whole round; rank 0 writes ``FOLDER/figures.json``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import nxd_infer as nxd
from bench.plain_llama import PlainLlama
from bench.stats import interleaved
from bench.stream import read_bandwidth
from nxd_infer.checkpoint.api import wait_for_save
from nxd_infer.context import ParallelContext, default_context, set_default_context
from nxd_infer.layout import shard_state_dict
from nxd_infer.parallel_state import initialize_model_parallel
from nxd_infer.trainer import NxDModel, NxDOptimizer
from nxd_models.llama.config import LlamaConfig
from nxd_models.llama.model import CausalLM

DEGREE = 2
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "vocab_size": 4096,
}
"""16.0 M parameters in float32."""
QUICK_SIZES = {**SIZES, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 512}
BATCH, LENGTH = 4, 256
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
NO_CLIPPING = {"grad_clipping": False}
WARMUP = 2
SAME = 1e-4
"""Relative tolerance of the first steps' losses."""

Step = Callable[[], float]


def decoder_config(sizes: dict[str, Any]) -> LlamaConfig:
    head_dim = sizes["hidden_size"] // sizes["num_heads"]
    return LlamaConfig(model_type="llama", head_dim=head_dim, max_position=LENGTH, **sizes)


@contextlib.contextmanager
def within(context: ParallelContext | None) -> Iterator[None]:
    """Use these degrees for this project's trainer: tensor and data parallelism run in the same processes."""
    set_default_context(context)
    try:
        yield
    finally:
        set_default_context(None)


def context_of(tp: int, shared_memory: bool = True) -> ParallelContext:
    initialize_model_parallel(tp, shared_memory=shared_memory)
    context = default_context()
    assert context is not None
    set_default_context(None)
    return context


class Benchmark:
    """The model, the batch and all participants."""

    def __init__(self, config: LlamaConfig, rank: int):
        self.config, self.rank = config, rank
        generator = torch.Generator().manual_seed(0)
        self.batch = torch.randint(0, config.vocab_size, (BATCH, LENGTH), generator=generator)
        self.part = self.batch.chunk(DEGREE)[rank]
        """The rows of a data-parallel rank."""
        torch.manual_seed(0)
        self.weights = {name: tensor.clone() for name, tensor in PlainLlama(config).state_dict().items()}
        self.mesh = init_device_mesh("cpu", (DEGREE,))

    def plain(self) -> PlainLlama:
        model = PlainLlama(self.config)
        model.load_state_dict(self.weights)
        return model

    # --- the peers ------------------------------------------------------------------------------------

    def one_process(self) -> Step:
        """Run rank 0 alone, on its one thread, while the other rank sleeps."""
        if self.rank:
            return lambda: 0.0
        return plain_step(self.plain(), self.batch)

    def dtensor(self) -> Step:
        """PyTorch's tensor parallelism, with the loss on split logits.

        Blocks get a DTensor, so that their first layers sum the gradient of their shared input once, like ours; without
        that the plan sums it once per layer.
        """
        column, row, whole = ColwiseParallel, RowwiseParallel, dtensor.Replicate()

        def shared(*inputs: Any) -> PrepareModuleInput:
            return PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)

        plan: dict[str, Any] = {
            "model.embed_tokens": row(input_layouts=whole, output_layouts=whole),
            "model.layers.*.self_attn": shared(whole, None, None),
            "model.layers.*.mlp": shared(whole),
            "lm_head": column(output_layouts=dtensor.Shard(-1), use_local_output=False),
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"model.layers.*.self_attn.{name}"] = column()
        for name in ("gate_proj", "up_proj"):
            plan[f"model.layers.*.mlp.{name}"] = column()
        plan |= {"model.layers.*.self_attn.o_proj": row(), "model.layers.*.mlp.down_proj": row()}
        model = parallelize_module(self.plain(), self.mesh, plan)
        optimizers = [torch.optim.AdamW(group, **ADAMW) for group in by_kind(model)]

        def step() -> float:
            with loss_parallel():
                loss = model(self.batch)
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return float(loss.full_tensor())

        return step

    def ddp(self) -> Step:
        return plain_step(DistributedDataParallel(self.plain(), gradient_as_bucket_view=True), self.part)

    def fsdp2(self) -> Step:
        """Keep parameters after the forward pass, like ZeRO-1; gradients and states are split."""
        model = self.plain()
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=False)
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False)
        return plain_step(model, self.part)

    # --- this project ---------------------------------------------------------------------------------

    def ours(self, context: ParallelContext, batch: Tensor, **options: Any) -> tuple[NxDModel, NxDOptimizer, Step]:
        with within(context):
            cfg = nxd.neuronx_distributed_config(tensor_parallel_size=context.tp.degree, **options)
            model = nxd.initialize_parallel_model(cfg, CausalLM, self.config)
            local = model.local_module()
            local.load_state_dict(shard_state_dict(local, self.weights, context.tp.rank, context.tp.degree))
            optimizer = nxd.initialize_parallel_optimizer(cfg, torch.optim.AdamW, model.parameters(), **ADAMW)

        def step() -> float:
            with within(context):
                loss = model.run_train(input_ids=batch, labels=batch)
                optimizer.step()
                optimizer.zero_grad()
                return float(loss)

        return model, optimizer, step


def plain_step(model: nn.Module, batch: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> float:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def by_kind(model: nn.Module) -> list[list[nn.Parameter]]:
    """Separate DTensors and plain tensors: a fused optimizer does not take both."""
    split = [p for p in model.parameters() if isinstance(p, dtensor.DTensor)]
    return [split, [p for p in model.parameters() if not isinstance(p, dtensor.DTensor)]]


# --- measuring --------------------------------------------------------------------------------------------


def timed(step: Callable[[], object]) -> float:
    """Return the seconds from a barrier until all ranks have finished the step."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / DEGREE


def warm_up(steps: dict[str, Step], rank: int) -> dict[str, list[float]]:
    """Return every participant's first losses; they must agree, because all must do the same work."""
    losses: dict[str, list[float]] = {}
    for name, step in steps.items():
        found = [step() for _ in range(WARMUP)]
        alone = DEGREE if name == "one process" else 1
        losses[name] = [mean_over_ranks(loss) * alone for loss in found]
    for name, found in losses.items():
        for ours, other in zip(found, losses["one process"], strict=True):
            if abs(ours - other) > SAME * abs(other):
                raise SystemExit(f"{name} has the losses {found}, one process {losses['one process']}")
    return losses


def blocked(context: ParallelContext, folder: Path, model: NxDModel, optimizer: NxDOptimizer, wait: bool) -> float:
    """Return the seconds for which a save blocks training, on the slowest rank."""
    dist.barrier()
    with within(context):
        begin = time.perf_counter()
        nxd.save_checkpoint(folder, "sync" if wait else "async", model, optimizer, async_save=not wait)
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        wait_for_save()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def state_share(optimizer: NxDOptimizer) -> dict[str, int]:
    """Return the largest optimizer state of a rank, that of the whole model, and the allowed padding, in elements."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    most = torch.tensor(sum(tensor.numel() for tensor in states))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    kinds = 2  # both moments of AdamW
    whole = kinds * sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    return {"most": int(most), "whole": whole, "padding": kinds * len(optimizer._reducer.buckets)}


def measure(rank: int, folder: Path, rounds: int, quick: bool) -> dict[str, Any]:
    bench = Benchmark(decoder_config(QUICK_SIZES if quick else SIZES), rank)
    tensor, data = context_of(DEGREE), context_of(1)
    tensor_gloo, data_gloo = context_of(DEGREE, shared_memory=False), context_of(1, shared_memory=False)
    plain_tp, plain_optimizer, tp_step = bench.ours(tensor, bench.batch, optimizer_config=NO_CLIPPING)
    _, _, sp_step = bench.ours(tensor, bench.batch, optimizer_config=NO_CLIPPING, sequence_parallel=True)
    zero = {**NO_CLIPPING, "zero_one_enabled": True}
    _, zero1, zero1_step = bench.ours(data, bench.part, optimizer_config=zero)
    steps: dict[str, Step] = {
        "one process": bench.one_process(),
        "tp 2": tp_step,
        "tp 2, sequence parallel": sp_step,
        "tp 2 over gloo": bench.ours(tensor_gloo, bench.batch, optimizer_config=NO_CLIPPING)[2],
        "DTensor": bench.dtensor(),
        "ZeRO-1": zero1_step,
        "ZeRO-1 over gloo": bench.ours(data_gloo, bench.part, optimizer_config=zero)[2],
        "FSDP2": bench.fsdp2(),
        "DDP": bench.ddp(),
    }
    losses = warm_up(steps, rank)
    bandwidth: list[float] = []

    def reading(_: int) -> float:
        if rank == 0:
            bandwidth.append(read_bandwidth())
        dist.barrier()
        return 0.0

    work = {"bandwidth": reading, **{name: (lambda _, step=step: timed(step)) for name, step in steps.items()}}
    seconds = interleaved(work, rounds)
    del seconds["bandwidth"]
    saves = interleaved(
        {
            "sync": lambda _: blocked(tensor, folder / "saved", plain_tp, plain_optimizer, wait=True),
            "async": lambda _: blocked(tensor, folder / "saved", plain_tp, plain_optimizer, wait=False),
        },
        rounds + 1,  # the first of each creates the folders, and is dropped
    )
    return {
        "seconds": seconds,
        "bandwidth": bandwidth,
        "save": {name: found[1:] for name, found in saves.items()},
        "state": state_share(zero1),
        "losses": losses,
    }


def main(rank: int, folder: Path, rounds: int, quick: bool, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store"
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=DEGREE, timeout=limit)
    figures = measure(rank, folder, rounds, quick)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True", float(sys.argv[5]))
