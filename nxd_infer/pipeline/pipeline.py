"""A pipelined model's steps on one rank: the batch in microbatches, a plan for its shapes, a schedule, and the loss."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nxd_infer import comm
from nxd_infer.comm.distributed import DistributedCollectives
from nxd_infer.comm.texts import gather_texts
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import CollectiveError, InputMismatchError, ParallelConfigError
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.modules.transformer_layers import transformer_layers
from nxd_infer.pipeline.engine import Engine
from nxd_infer.pipeline.microbatches import (
    Count,
    count_of,
    digest_of,
    loss_weights,
    probes_of,
    sample_of,
    signature_of,
    split_batch,
)
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.partition import auto_partition, describe_partition, imbalance
from nxd_infer.pipeline.plan import Plan, make_plan
from nxd_infer.pipeline.schedule import Action, Span, bubble, forward_only, schedule
from nxd_infer.pipeline.stage import Stage
from nxd_infer.util.devices import keeping_generators, transport_device

log = logging.getLogger(__name__)

T = TypeVar("T")
SEEDS = 2**62


def cuts_of(model: nn.Module, options: PipelineOptions, ranks: int) -> list[str]:
    """Return the cuts for ``ranks`` pipeline ranks: those of ``options``, or balanced ones.

    Raises ParallelConfigError if there are neither, or if their number does not fit.
    """
    if ranks == 1:
        return []
    stages = ranks * options.virtual_pipeline_size
    if options.auto_partition:
        cuts = auto_partition(model, transformer_layers(model, options.transformer_layer_cls), stages)
        if current_context().rank == 0:
            worst = imbalance(describe_partition(model, cuts))
            log.info(
                "pipeline_cuts: %s; the most expensive stage works %.1f%% longer than an equal share", cuts, worst * 100
            )
        return cuts
    cuts = options.pipeline_cuts
    if cuts is None or len(cuts) != stages - 1:
        raise ParallelConfigError(
            f"pipeline_parallel_size={ranks} with virtual_pipeline_size={options.virtual_pipeline_size} needs "
            f"{stages - 1} pipeline_cuts, one after each stage but the last, got {0 if cuts is None else len(cuts)}: "
            'give them, or pass pipeline_config={"auto_partition": True}'
        )
    leaves = {leaf if isinstance(leaf, str) else leaf.__name__ for leaf in options.leaf_module_cls or []}
    for name, module in model.named_modules() if leaves else ():
        inside = [cut for cut in cuts if cut.startswith(f"{name}.")]
        if type(module).__name__ in leaves and inside:
            raise ParallelConfigError(
                f"pipeline_cuts: {inside[0]!r} lies inside {name!r}, a {type(module).__name__}, which leaf_module_cls "
                "keeps whole: cut after it"
            )
    return cuts


class Pipeline:
    """Runs steps of ``stage``. Every rank of the pipeline group calls ``run`` with the same batch.

    ``call(**inputs)`` is the forward of the stage's model, and ``loss_of`` finds the loss in what it returns.
    """

    def __init__(
        self,
        stage: Stage,
        options: PipelineOptions,
        context: ParallelContext,
        call: Callable[..., Any],
        loss_of: Callable[[Any], Tensor],
    ):
        self.stage, self.options, self.context = stage, options, context
        self._call, self._loss_of = call, loss_of
        self.bubble: float | None = None
        """The share of the last step in which this rank waited for other stages; None before the first one."""
        self._plans: dict[Any, tuple[Plan, Count | None]] = {}
        kind, chunks = (options.schedule_name, options.virtual_pipeline_size) if stage.ranks > 1 else ("1f1b", 1)
        self._actions = schedule(kind, stage.ranks, options.num_microbatches, chunks)

    def run(self, inputs: Mapping[str, Any], train: bool) -> tuple[Tensor, list[Tensor]]:
        """Run one step; return its loss and that of each microbatch, the same on all ranks of the pipeline.

        Raises InputMismatchError for a batch that does not fit. If another stage fails, CollectiveError has its
        traceback.
        """
        training = self.stage.module.training
        with torch.set_grad_enabled(train):
            drawn = self._meet(inputs, train)
            parts = split_batch(inputs, self.options.num_microbatches)
            plan, counter = self._plan_for(parts[0], training)
            weights = loss_weights(parts, counter)
            actions = self._actions if train else forward_only(self._actions)
            calls = [lambda part=part: self._call(**part) for part in parts]
            seed = drawn if training else None
            engine = Engine(self.stage, self.context, plan, actions, calls, self._loss_of, weights.tolist(), seed)
            with contextlib.nullcontext() if seed is None else keeping_generators():
                losses = self._losses_of(engine, len(parts))
        self.bubble = bubble([engine.spans])
        if self.options.trace_file_path is not None:
            write_timeline(self.options.trace_file_path, engine.spans, self.context)
        weights = weights.to(losses.device)
        # A mean over no target is NaN, and has no part in that of the batch.
        return losses.masked_fill(weights == 0, 0) @ weights, list(losses)

    def _losses_of(self, engine: Engine, count: int) -> Tensor:
        """Run the step; return the losses of its microbatches on all ranks, float64 [count]."""
        try:
            losses = torch.zeros(count, dtype=torch.float64, device=transport_device())
            for number, loss in engine.run().items():
                losses[number] = loss.reshape(())
            return comm.broadcast(losses, self.context, "pp", self.stage.rank_of(self.stage.units.stages - 1))
        except Exception as error:
            engine.drop()
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """End the waiting of the other ranks, and raise what made them wait if it was not this rank."""
        transport = comm.collectives_of(self.context) if self.context.world_size > 1 else None
        if not isinstance(transport, DistributedCollectives):
            return
        others = transport.why_given_up() if isinstance(error, CollectiveError) else {}
        transport.give_up(traceback.format_exc())
        for rank, reason in others.items():
            if rank != self.context.rank and "CollectiveTimeoutError" not in reason.strip().splitlines()[-1]:
                stage = self.context.layout.axis("pp", rank).rank
                raise CollectiveError(f"pipeline stage {stage} (rank {rank}) failed:\n{reason}") from error

    def _meet(self, inputs: Mapping[str, Any], train: bool) -> int:
        """Return the seed of a step, drawn from the first stage's generator, which a checkpoint holds.

        Raises InputMismatchError on every stage if one of them has other inputs.
        """
        training = self.stage.module.training
        what = f"train={train}, training={training}, {signature_of(inputs)}"
        drawn = torch.randint(SEEDS, (1,)) if training else torch.zeros(1, dtype=torch.int64)
        digests = [digest_of([what.encode()]), digest_of(map(sample_of, tree_leaves(dict(inputs))))]
        mine = torch.tensor([[int(drawn), *digests]], dtype=torch.int64, device=transport_device())
        drawn, *everyone = comm.all_gather(mine, self.context, "pp", 0).cpu().unbind(1)
        for found, digest, which in zip(everyone, digests, ("", ", of the same shapes"), strict=True):
            if (found != digest).any():
                raise InputMismatchError(
                    f"the stages of a pipeline got different inputs{which}, on this one {what}: every rank of the "
                    "pipeline group takes the same batch, so divide data over the data-parallel ranks alone "
                    "(parallel_state.get_data_parallel_rank())"
                )
        return int(drawn[0])

    def _plan_for(self, inputs: dict[str, Any], training: bool) -> tuple[Plan, Count | None]:
        key = (training, torch.is_autocast_enabled(transport_device().type), signature_of(inputs))
        if key not in self._plans:
            self._plans[key] = self._all_or_none(lambda: self._new_plan(inputs))
        return self._plans[key]

    def _new_plan(self, inputs: dict[str, Any]) -> tuple[Plan, Count | None]:
        plan = make_plan(self.stage, lambda: self._call(**inputs), self._loss_of)
        probes = probes_of(inputs) if self.options.num_microbatches > 1 else {}
        losses = {
            name: make_plan(self.stage, lambda probe=probe: self._call(**probe), self._loss_of).loss
            for name, probe in probes.items()
        }
        return plan, count_of(losses)

    def _all_or_none(self, action: Callable[[], T]) -> T:
        """Return what ``action`` gives, if it succeeds on every stage; else raise on all of them."""
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(action())
        except Exception as error:  # raised below, after the other stages have been told
            failure = error
        reasons = gather_texts("" if failure is None else f"{type(failure).__name__}: {failure}", self.context)
        if failure is not None:
            raise failure
        for stage, reason in enumerate(reasons):
            if reason:
                raise CollectiveError(f"pipeline stage {stage} failed: {reason}")
        return result[0]


def mean_over_data(loss: Tensor, context: ParallelContext) -> Tensor:
    """Return the mean of the data-parallel ranks' losses."""
    return comm.all_reduce(loss, context, "dp") / context.dp.degree


def write_timeline(path: str | os.PathLike[str], spans: Sequence[Span], context: ParallelContext) -> None:
    """Write the passes of all stages into one file, from the first rank of the pipeline. A collective.

    Clocks of several hosts are not compared: each host's times are its own. Only the first tensor- and data-parallel
    ranks write.
    """
    mine = [[s.action.stage, s.action.microbatch, s.action.backward, s.action.late, s.start, s.end] for s in spans]
    rows = [json.loads(text) for text in gather_texts(json.dumps(mine), context)]
    if context.rank:
        return
    tables = [[Span(Action(*action), start, end) for *action, start, end in row] for row in rows]
    text = json.dumps(chrome_trace(tables))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def chrome_trace(tables: Sequence[Sequence[Span]]) -> dict[str, object]:
    """Return the trace of a timetable in seconds: rows are ranks, passes are named F0, B0, W0, ... by microbatch."""
    first = min((span.start for table in tables for span in table), default=0.0)
    events: list[dict[str, object]] = []
    for rank, table in enumerate(tables):
        stages = sorted({span.action.stage for span in table})
        name = f"rank {rank}: stage {', '.join(map(str, stages))}"
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}})
        for span in table:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": action.name,
                    "cat": "weights" if action.late else "backward" if action.backward else "forward",
                    "pid": 0,
                    "tid": rank,
                    "ts": (span.start - first) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"bubble": round(bubble(tables), 4)}}
