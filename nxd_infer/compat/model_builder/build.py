"""From a model builder's shapes to one call of parallel_model_trace."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxd_infer.backends import registry
from nxd_infer.compat.model_builder.shards import Checkpoint, adapted
from nxd_infer.context import ParallelContext, use_context
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph.export import state_names
from nxd_infer.layout import as_source, weight_layout
from nxd_infer.layout.sources import FirstOf
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.api import parallel_model_trace, trace_plan
from nxd_infer.trace.ranks.from_checkpoint import UntouchedZeros
from nxd_infer.trace.request import BucketModelConfig

log = logging.getLogger(__name__)

Made = tuple[nn.Module, Mapping[Any, int]]
"""A module as the rank of the current context has it, and its aliases: states to numbers of outputs."""
Words = str | Sequence[str] | Mapping[str, Any] | None
"""A compiler's arguments."""


@dataclass(frozen=True)
class Shape:
    """One shape of one model; those of one ``key`` have the same module."""

    name: str
    example: Any
    make: Callable[[], Made]
    context: ParallelContext
    """The first rank's."""
    key: str = ""
    arguments: Words = None
    workdir: Any = None
    metaneff = weight_name_to_idx = None
    """For the functions of the second generation, like :attr:`hlo`."""

    @property
    def hlo(self) -> Shape:
        return self


def trace_shapes(
    shapes: Sequence[Shape],
    loader: Callable[[], Any] | None,
    *,
    workers: int | None = None,
    kernel: tuple[Callable[..., Any] | None, Sequence[Any] | None] = (None, None),
    dry_run: bool = False,
) -> Any:
    """Return the TensorParallelModel of all shapes; with ``dry_run`` what the trace would do (a TracePlan).

    ``loader`` returns the unsharded weights; None: they are given later. ``kernel``: a bucket kernel and its constants.
    """
    if not shapes:
        raise TraceConfigError("there is nothing to trace: add() a model, or trace() a shape, first")

    def func(bucket_rank: int) -> Made:
        return shapes[bucket_rank].make()

    modules = modules_of(shapes)
    weights = _weights(modules, loader)
    traced = (trace_plan if dry_run else parallel_model_trace)(
        func,
        [shape.example for shape in shapes],
        next((shape.workdir for shape in shapes if shape.workdir is not None), None),
        joined({shape.name: shape.arguments for shape in shapes}),
        False,
        BucketModelConfig(
            kernel[0],
            bucket_kernel_constant_args=kernel[1],
            names=[shape.name for shape in shapes],
            metadata=[{"key": shape.key, "bare": bool(modules[shape.key][1])} for shape in shapes],
        ),
        shapes[0].context.tp.degree,
        workers,
        pp_degree=shapes[0].context.pp.degree,
        checkpoint_loader_callable=lambda: weights,
        metadata={"weights_later": loader is None},
    )
    if isinstance(traced, TensorParallelModel) and (ignored := traced.trace_report["ignored_compiler_args"]):
        log.warning("these arguments of the Neuron compiler mean nothing to the backend: %s", " ".join(ignored))
    return traced


def modules_of(shapes: Sequence[Shape]) -> dict[str, Made]:
    """Return each key's module as the first rank has it; its parameters use no memory."""
    with use_context(shapes[0].context), parameters_on_meta(), UntouchedZeros():
        return {key: make() for key, make in {shape.key: shape.make for shape in reversed(shapes)}.items()}


def _weights(modules: Mapping[str, Made], loader: Callable[[], Any] | None) -> Any:
    """Return what the trace reads: the loader's weights, and zeros for parameters that are states; for all of them
    without a loader."""
    loaded = {} if loader is None else loader()
    given: Checkpoint = dict(loaded) if isinstance(loaded, Mapping) else {}
    zeros: Checkpoint = {}
    for module, aliases in modules.values():
        if given:  # keys share weights, so each module's hooks get what was loaded
            given |= {name: one for name, one in adapted(module, loaded).items() if one is not loaded.get(name)}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        states = state_names(module, [*aliases, *getattr(module, "nxd_states", ())])
        chosen = parameters.keys() if loader is None else parameters.keys() & set(states)
        for name, layout in weight_layout(module).items() if chosen else ():
            if name in chosen:  # expanded, so that they use no memory
                zero = torch.zeros((), dtype=parameters[name].dtype)
                zeros |= {logical: zero.expand(shape) for logical, shape in layout.logical_shapes.items()}
    return FirstOf(as_source(given or loaded), as_source(zeros))


def joined(arguments: Mapping[str, Words]) -> list[str] | None:
    """Return the compiler arguments of all shapes as one list.

    Raises TraceConfigError if they differ and the backend compiles: it compiles all graphs with the same.
    """
    words = [tuple(_words(given)) for given in arguments.values()]
    if len(set(words)) > 1 and registry.get(registry.default()).compiles:
        raise TraceConfigError(
            f"this backend compiles {', '.join(arguments)} with the same arguments: give them the same"
        )
    return [word for given in dict.fromkeys(words) for word in given] or None


def _words(given: Words) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{key}={value}" for key, value in given.items()]
    return shlex.split(given) if isinstance(given, str) else list(given or ())
