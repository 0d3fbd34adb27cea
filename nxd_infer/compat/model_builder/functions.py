"""The second generation: ``ModelBuilder(model).trace(...).compile()``, and its parts as functions.

What is traced is a copy of the model of that moment, which shares its tensors. Nothing is exported before ``compile()``
(or the first use of an NxDModel), because all shapes of a model share weights and states.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nxd_infer.compat.model_builder.build import Shape, Words
from nxd_infer.compat.model_builder.nxd_model import NxDModel
from nxd_infer.compat.model_builder.parallel_context import context_of, layers_of
from nxd_infer.compat.model_builder.shards import shard_checkpoint
from nxd_infer.context import current_context
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph.export import named_inputs
from nxd_infer.layout.sources import named_tensors

__all__ = [
    "ModelBuilder", "TraceArtifacts", "compile", "compile_layout_transformer", "compile_wlo", "shard_checkpoint",
    "trace",
]  # fmt: skip


TraceArtifacts = Shape


def trace(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    spmd: bool = True,
    preserve_parameters: bool = True,
) -> TraceArtifacts:
    """Check the inputs of one shape of ``model``, which was built as any rank, and return both.

    Raises TraceConfigError for inputs that the model does not take, for both or neither of ``args`` and ``kwargs``, and
    for another value of ``spmd`` (all ranks have one graph) and ``preserve_parameters``.
    """
    if not isinstance(model, nn.Module):
        raise TraceConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}: give it a forward()")
    if (args is None) == (kwargs is None):
        raise TraceConfigError("give the inputs of one shape: args=(tensor, ...) or kwargs={name: tensor}")
    if spmd is not True or preserve_parameters is not True:
        raise TraceConfigError(
            f"spmd={spmd!r}, preserve_parameters={preserve_parameters!r}: leave them out, or pass True"
        )
    if context_of(model).ep.degree > 1:
        raise TraceConfigError(
            "a traced model has no expert parallel ranks: build it with expert_model_parallel_size=1"
        )
    example = kwargs if args is None else args
    named_inputs(model, example, "args" if kwargs is None else "kwargs")
    copied = copy.deepcopy(model, {id(one): one for one in named_tensors(model).values()})
    return TraceArtifacts("", example, functools.partial(_as_this_rank, copied), context_of(model))


def _as_this_rank(model: nn.Module) -> tuple[nn.Module, dict[Any, int]]:
    """Return ``model``, built as any rank, as the current context's rank has it; its parameters use no memory."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        light: Any = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        vars(light).update(vars(parameter))
        memo[id(parameter)] = light
    copied = copy.deepcopy(model, memo)
    for layer, name, _ in layers_of(copied):
        setattr(layer, name, current_context())
    return copied, {}


def compile(
    hlo_module: TraceArtifacts,
    metaneff: None = None,
    compiler_workdir: Any = None,
    compiler_args: Words = None,
    key: str | None = None,
) -> dict[str, Any]:
    """Return how a traced shape is to be compiled, which an :class:`NxDModel` does with all its shapes."""
    return {"arguments": compiler_args, "workdir": compiler_workdir}


compile_wlo = compile


def compile_layout_transformer(*args: Any, **kwargs: Any) -> None:
    """Return None: weights are packed as they load, so no program has to rearrange them before."""


class ModelBuilder:
    """Traces ``model``, built inside ``NxDParallelState`` as any rank, for all ranks.

    Its weights are not read, so they may be on the meta device (``init_on_device``); ``NxDModel.set_weights`` gives
    them. Buffers have their values; those that the model changes in place are its states.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.traced: dict[str, TraceArtifacts] = {}

    def trace(
        self, args: Any = None, kwargs: Mapping[str, Any] | None = None, tag: str | None = None, spmd: bool = True
    ) -> ModelBuilder:
        """Add a shape called ``tag`` (default: ``bucket_0``, ...), and return the builder; see :func:`trace`."""
        tag = f"bucket_{len(self.traced)}" if tag is None else tag
        if tag in self.traced:
            raise TraceConfigError(f"the tag {tag!r} was traced before: give each shape a tag of its own")
        self.traced[tag] = trace(self.model, args, kwargs, spmd)
        return self

    def compile(
        self,
        priority_model_key: str | None = None,
        compiler_workdir: Any = None,
        compiler_args: Words = None,
        max_workers: int | None = None,
    ) -> NxDModel:
        """Trace and compile every shape, and return the model, which has no weights yet.

        ``priority_model_key`` has no effect, because all shapes share weights that are packed for all. The others are
        as for ``parallel_model_trace``; ``compiler_args`` may be ``{tag: arguments}``.

        Raises TraceConfigError for an unknown tag, and what ``parallel_model_trace`` raises.
        """
        given: Mapping[str, Any] = dict.fromkeys(self.traced, compiler_args)
        if isinstance(compiler_args, Mapping) and compiler_args.keys() & self.traced.keys():
            given = compiler_args
        for tag in {*given, priority_model_key} - {*self.traced, None}:
            raise TraceConfigError(f"nothing was traced as {tag!r}; the tags are {', '.join(self.traced) or 'none'}")
        model = NxDModel()
        for tag, traced in self.traced.items():
            model.add(tag, traced, {"arguments": given.get(tag), "workdir": compiler_workdir})
        return model.build(workers=max_workers)
