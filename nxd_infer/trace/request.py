"""The request of a trace, and one rank's result: plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from nxd_infer.artifact.manifest import InputSpec, OutputSpec, StageSpec, TensorSpec, WeightSpec
from nxd_infer.context import ParallelContext, make_context
from nxd_infer.graph.stored import GraphFile
from nxd_infer.trace.buckets import Bucket


@dataclass
class TraceRequest:
    """Checked arguments of ``parallel_model_trace``, in the form that the ranks need."""

    func: Callable[..., Any]
    buckets: list[Bucket]
    tp_degree: int
    backend: str
    options: dict[str, Any]
    """Options of the backend, checked."""
    states: list[Any] = field(default_factory=list)
    shared_states: list[Tensor] | None = None
    state_preprocessor: Callable[..., Any] | None = None
    pp_degree: int = 1
    pipeline_cuts: list[str] | None = None
    """None: balanced ones."""


class TracedBucket(BaseModel):
    """One bucket as one rank traced it."""

    model_config = ConfigDict(extra="ignore")

    name: str
    graph: GraphFile
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    structure: Any = None
    stage: StageSpec | None = None
    """What its pipeline stage takes and gives; None without a pipeline."""
    handed: list[TensorSpec] = Field(default_factory=list)
    """What stages hand one another."""


class TracedRank(BaseModel):
    """The result of one rank: ``rank_NN/result.json``, beside its graphs and its weight file. Ranks are numbered stage
    by stage, as in the artifact."""

    model_config = ConfigDict(extra="ignore")

    rank: int
    buckets: list[TracedBucket]
    states: list[TensorSpec]
    weights: list[WeightSpec]
    layout: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0
    peak_bytes: int = 0
    warnings: list[str] = Field(default_factory=list)


def tracing_context(tp: int, pp: int, rank: int, collectives: str) -> ParallelContext:
    """Return the context in which tensor parallel rank ``rank`` is traced: as in the first of ``pp`` stages, because it
    builds the whole model, which is split into stages afterwards."""
    return make_context(tp * pp, rank, tp=tp, pp=pp, collectives=collectives)


def rank_directory(build: Path, rank: int) -> Path:
    return build / f"rank_{rank:02d}"


def distinct(items: Sequence[Any]) -> list[Any]:
    """Return the items without repeats, in order of first appearance."""
    return list(dict.fromkeys(items))
