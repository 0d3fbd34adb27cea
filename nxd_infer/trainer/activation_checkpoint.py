"""Activation checkpointing: chosen modules keep only their inputs, and are recomputed in the backward pass.

``module.forward`` is replaced on the instance, so names, classes and state dicts do not change. The recomputation uses
the same random numbers as the forward, also of the tensor-parallel streams, so gradients are bit-equal.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.stand_in import modules_of_all
from nxd_infer.modules.transformer_layers import class_names, transformer_layers
from nxd_infer.parallel_layers.random import get_xla_rng_tracker
from nxd_infer.util.devices import on_xla

__all__ = ["apply_activation_checkpoint", "transformer_layers"]


def _recomputed(module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a checkpointed module, as a partial function, which can be copied and pickled with it.

    ``own``: a ``forward`` that was already set on the instance, if any.
    """
    forward = own or functools.partial(type(module).forward, module)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    bound = functools.partial(forward, **kwargs)  # checkpoint() would take arguments that are named like its own
    if there := [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and on_xla(one)]:
        # If it saw them, PyTorch would look for a module torch.xla, which torch_xla does not have.
        bound = functools.partial(bound, *args)
        return checkpoint(bound, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _XlaAsNow(there)))
    return checkpoint(bound, *args, use_reentrant=False, context_fn=_streams_as_now)


class _StreamsAsNow:
    """Sets the streams as they are when it is made. Can be entered again: each backward of a graph recomputes."""

    def __init__(self) -> None:
        self._before = get_xla_rng_tracker().get_states()

    def __enter__(self) -> None:
        tracker = get_xla_rng_tracker()
        self._outside = tracker.get_states()
        tracker.set_states(self._before)

    def __exit__(self, *_: object) -> None:
        get_xla_rng_tracker().set_states(self._outside)


class _XlaAsNow(_StreamsAsNow):
    """Sets torch_xla's random numbers, too, and keeps XLA's compiler from taking the first results for the second."""

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]  # which has made them

        self._xm, self._inputs = xm, inputs
        self._device = inputs[0].device  # a backward pass runs in a thread of autograd's, which has its own
        self._seed = xm.get_rng_state(self._device)

    def __enter__(self) -> None:
        super().__enter__()
        self._seed_outside = self._xm.get_rng_state(self._device)
        self._xm.set_rng_state(self._seed, self._device)
        self._xm.optimization_barrier_(self._inputs)

    def __exit__(self, *_: object) -> None:
        self._xm.set_rng_state(self._seed_outside, self._device)
        super().__exit__()


def _streams_as_now() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Return the contexts of forward and recomputation; PyTorch itself restores the default generators."""
    return contextlib.nullcontext(), _StreamsAsNow()


def apply_activation_checkpoint(model: nn.Module, config: Any, pipeline_config: Mapping[str, Any] | None = None) -> int:
    """Checkpoint modules of ``model`` as ``activation_checkpoint_config`` says; return their number on this rank.

    Raises ParallelConfigError if no pipeline rank has one: the class is not in the model, or "full" finds no layers.
    """
    if config is None:
        return 0
    if config == "full":
        chosen = transformer_layers(model, (pipeline_config or {}).get("transformer_layer_cls"))
    else:
        classes = tuple(config) if isinstance(config, list | tuple) else (config,)
        chosen = [module for module in modules_of_all(model) if isinstance(module, classes)]
        if not chosen:
            names = ", ".join(cls.__name__ for cls in classes)
            raise ParallelConfigError(
                f"activation_checkpoint_config: the model has no {names}; its classes are {class_names(model)}"
            )
    here = {id(module) for module in model.modules()}
    chosen = [module for module in chosen if id(module) in here]
    for module in chosen:
        own = module.__dict__.get("forward")
        if getattr(own, "func", None) is not _recomputed:
            module.forward = functools.partial(_recomputed, module, own)
    return len(chosen)
