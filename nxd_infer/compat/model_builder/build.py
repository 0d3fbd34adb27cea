"""From a model builder's shapes to one call of parallel_model_trace."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nxd_infer.backends import registry
from nxd_infer.compat.model_builder.parallel_context import NxDParallelState
from nxd_infer.compat.model_builder.shards import Checkpoint, adapted, zeros_of
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph.export import state_names
from nxd_infer.layout import as_source, weight_layout
from nxd_infer.layout.sources import FirstOf
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.api import parallel_model_trace, trace_plan
from nxd_infer.trace.request import BucketModelConfig

log = logging.getLogger(__name__)

Made = tuple[nn.Module, Mapping[Any, int]]
"""A module as the rank of the current context has it, and its aliases: states to numbers of outputs."""
Words = str | Sequence[str] | Mapping[str, Any] | None
"""A compiler's arguments."""


@dataclass(frozen=True)
class Shape:
    """One shape of one model."""

    name: str
    example: Any
    make: Callable[[], Made]
    arguments: Words = None
    key: str = ""
    """Shapes of one key have the same module."""
    degrees: tuple[int, int] = (1, 1)
    """Tensor and pipeline parallel."""
    workdir: Any = None


@dataclass(frozen=True)
class Job:
    """What is traced into one artifact."""

    shapes: Sequence[Shape]
    loader: Callable[[], Any] | None = None
    """Returns the unsharded weights; None: they are given later."""
    workers: int | None = None
    kernel: Callable[..., Any] | None = None
    constants: Sequence[Any] | None = None

    def as_first_rank(self) -> NxDParallelState:
        tp, pp = self.shapes[0].degrees
        return NxDParallelState(tp * pp, 0, tp, pp)

    def modules(self) -> dict[str, Made]:
        """Return each key's module, whose parameters use no memory."""
        makers = {shape.key: shape.make for shape in reversed(self.shapes)}
        with self.as_first_rank(), parameters_on_meta():
            return {key: make() for key, make in makers.items()}

    def weights(self, modules: Mapping[str, Made]) -> Any:
        """Return what the trace reads: the loader's weights, and zeros for parameters that are states; for all of them
        if there is no loader."""
        loaded = {} if self.loader is None else self.loader()
        given: Checkpoint = dict(loaded) if isinstance(loaded, Mapping) else {}
        zeros: Checkpoint = {}
        for module, aliases in modules.values():
            if given:  # keys share weights, so each module's hooks get what was loaded
                given |= {name: one for name, one in adapted(module, loaded).items() if one is not loaded.get(name)}
            parameters = dict(module.named_parameters(remove_duplicate=False))
            states = state_names(module, [*aliases, *getattr(module, "nxd_states", ())])
            chosen = parameters.keys() if self.loader is None else parameters.keys() & set(states)
            zeros |= zeros_of({name: one for name, one in weight_layout(module).items() if name in chosen}, parameters)
        return FirstOf(as_source(given or loaded), as_source(zeros))

    def trace(self, dry_run: bool = False) -> Any:
        """Return the TensorParallelModel; with ``dry_run`` what the trace would do (a TracePlan)."""
        if not self.shapes:
            raise TraceConfigError("there is nothing to trace: add() a model, or trace() a shape, first")

        def func(bucket_rank: int) -> Made:
            return self.shapes[bucket_rank].make()

        modules = self.modules()
        weights = self.weights(modules)
        traced = (trace_plan if dry_run else parallel_model_trace)(
            func,
            [shape.example for shape in self.shapes],
            next((shape.workdir for shape in self.shapes if shape.workdir is not None), None),
            joined({shape.name: shape.arguments for shape in self.shapes}),
            False,
            BucketModelConfig(
                self.kernel,
                bucket_kernel_constant_args=self.constants,
                names=[shape.name for shape in self.shapes],
                metadata=[{"key": shape.key, "bare": bool(modules[shape.key][1])} for shape in self.shapes],
            ),
            self.shapes[0].degrees[0],
            self.workers,
            pp_degree=self.shapes[0].degrees[1],
            checkpoint_loader_callable=lambda: weights,
            metadata={"weights_later": self.loader is None},
        )
        if isinstance(traced, TensorParallelModel) and (ignored := traced.trace_report["ignored_compiler_args"]):
            log.warning("these arguments of the Neuron compiler mean nothing to the backend: %s", " ".join(ignored))
        return traced


def joined(arguments: Mapping[str, Words]) -> list[str] | None:
    """Return the compiler arguments of all shapes as one list.

    Raises TraceConfigError if they differ and the backend compiles: it compiles all graphs with the same.
    """
    words = {name: tuple(_words(given)) for name, given in arguments.items()}
    backend = registry.get(registry.default())
    if len(set(words.values())) > 1 and backend.compiles:
        raise TraceConfigError(
            f"{', '.join(words)} have different compiler arguments, and the {backend.name} backend compiles all graphs "
            "of a model with the same: give each the same"
        )
    return [word for given in dict.fromkeys(words.values()) for word in given] or None


def _words(given: Words) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{key}={value}" for key, value in given.items()]
    return shlex.split(given) if isinstance(given, str) else list(given or ())
