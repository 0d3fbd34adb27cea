"""A parallelized model over pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nxd_infer.context import current_context
from nxd_infer.distributed.apply import stacks_of
from nxd_infer.distributed.model_plan import ModelPlan
from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.model import NxDPPModel
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.stage import take_stage


def pipelined(model: nn.Module, plan: ModelPlan, given: Mapping[str, Any]) -> NxDPPModel:
    """Reduce ``model`` to this rank's stage, with as many layers on each stage as on the others, and wrap it.

    Raises ParallelConfigError if the plan cannot be cut or has fewer layers than there are stages.
    """
    pp = current_context().pp
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not plan.pipeline_parallel:
        raise ParallelConfigError(f"{kind}: pipeline parallelism is not possible; use pipeline_parallel_size=1")
    layers = [f"{name}.{number}" for name, stack in stacks_of(model, plan) for number in range(len(stack))]
    if len(layers) < pp.degree:
        raise ParallelConfigError(
            f"{kind}: {len(layers)} layers cannot be on {pp.degree} pipeline stages; use at most {len(layers)}"
        )
    cuts = [layers[len(layers) * stage // pp.degree - 1] for stage in range(1, pp.degree)]
    options = PipelineOptions({**given, "pipeline_cuts": cuts})
    return NxDPPModel.of_stage(model, take_stage(model, cuts, pp.rank, pp.degree), {"pipeline_config": options})
