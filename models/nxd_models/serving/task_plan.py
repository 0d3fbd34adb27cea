"""The arguments of ``parallel_model_trace`` for tracing a model directory, and the functions that it calls."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.hugging_face import weights as hf
from nxd_infer.layout.sources import Weights
from nxd_models import registry
from nxd_models.spec import ModelDirectory


@dataclass
class TaskPlan:
    """All arguments for tracing a model directory for one task, except degree and backend."""

    task: str
    func: Callable[..., nn.Module]
    """Defined at module level, so that a spawned process can import it."""
    func_kwargs: dict[str, Any]
    example_inputs: list[dict[str, Tensor]]
    """One dictionary per bucket: input name -> example."""
    bucket_names: list[str]
    checkpoint_loader_callable: Callable[[], Any]
    metadata: dict[str, Any]
    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Name in the artifact -> file, or its bytes."""

    def trace_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``parallel_model_trace``."""
        return {
            "func": self.func,
            "example_inputs": self.example_inputs,
            "bucket_config": {"func_kwargs": self.func_kwargs, "names": self.bucket_names},
            "checkpoint_loader_callable": self.checkpoint_loader_callable,
            "inline_weights_to_neff": False,
            "metadata": self.metadata,
            "extra_files": self.files,
        }


def directory_of(
    model_dir: Any, task: str | None = None, model_impl: str | None = None, head_of: Any = None, **_: Any
) -> ModelDirectory:
    """Read the directory that the arguments of :func:`traced_step` name."""
    if head_of is None:
        return registry.load_config(model_dir, model_impl, task)
    return importlib.import_module("nxd_models.eagle.family").load_head(model_dir, head_of)  # as a family: it is above


def traced_step(
    model_dir: str,
    task: str,
    dtype: torch.dtype,
    model_impl: str | None = None,
    reference: bool = False,
    head_of: str | None = None,
    **options: Any,
) -> nn.Module:
    """Return the step that is traced for ``task``, parallel over the current context; reads no weights.

    ``reference``: what the step's outputs should equal, called alike. ``head_of``: the directory of a head's model.
    """
    directory = directory_of(model_dir, task, model_impl, head_of)
    made = directory.make(task, dtype, step=True, reference=reference, **options)
    return made.eval()


def named_weights(kwargs: dict[str, Any], weights: Weights | None = None) -> hf.NamedSource:
    """Return ``weights``, or those of ``kwargs["model_dir"]``, under the names that ``traced_step(**kwargs)`` reads."""
    with torch.device("meta"):
        module = traced_step(**kwargs)
    if weights is None:
        directory = directory_of(**kwargs)
        weights = registry.weights(directory, kwargs["task"])
    return hf.named_weights(module, weights)


def make_plan(
    task: str,
    func_kwargs: dict[str, Any],
    buckets: dict[str, dict[str, Tensor]],
    metadata: dict[str, Any],
    weights: Weights | None,
) -> TaskPlan:
    """Return a plan for :func:`traced_step` with these arguments. ``buckets``: name -> example inputs."""
    return TaskPlan(
        task=task,
        func=traced_step,
        func_kwargs=func_kwargs,
        example_inputs=list(buckets.values()),
        bucket_names=list(buckets),
        checkpoint_loader_callable=functools.partial(named_weights, func_kwargs, weights),
        metadata=metadata,
    )
