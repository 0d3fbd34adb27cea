"""The borders of parallel regions in a model's own code: hooks of its modules, and of replicated weights inside.

A hook enters or leaves a region where the model passes a tensor from one module to the next, so the model's code is
not changed. Hooks of modules are partial functions and not closures, because closures cannot be pickled with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import ParallelContext
from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import ParallelLayer

SEQUENCE_DIM = 1
"""Of the hidden states of all models of transformers: [batch, sequence, features]."""
_INPUTS = ("hidden_states", "query", "key", "value")
"""Names under which modules are given the hidden states; DistilBERT's attention of transformers 4 has three of them."""
_OTHER_INPUTS = ("key_value_states", "encoder_hidden_states")
"""What attention reads beside the hidden states; always a whole sequence."""
SUMMED = "nxd_sums_gradient"
"""Attribute of the weights of :func:`sum_gradients`; a copy of one has neither the attribute nor the hook."""


def enter_once(module: nn.Module, context: ParallelContext, sequence_parallel: bool, dim: int) -> None:
    """Make ``module`` take its input into the parallel region, once for all the layers in it that read it.

    Otherwise each of them would sum the gradients of its input over the ranks. With ``sequence_parallel`` the input is
    this rank's piece of the sequence, and is gathered along ``dim``.
    """
    module.register_forward_pre_hook(partial(_enter, context, sequence_parallel, dim), with_kwargs=True)


def _enter(
    context: ParallelContext, sequence_parallel: bool, dim: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    def change(x: Tensor) -> Tensor:
        if sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, dim, context=context)
        return mappings.copy_to_tensor_model_parallel_region(x, context=context)

    args, kwargs = _on_hidden_states(change, args, kwargs)
    for name in _OTHER_INPUTS:
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = mappings.copy_to_tensor_model_parallel_region(kwargs[name], context=context)
    return args, kwargs


def split_sequence(first: nn.Module, last: nn.Module, context: ParallelContext) -> None:
    """Give each rank its piece of the sequence before the module ``first``, and gather it after ``last``."""
    first.register_forward_pre_hook(partial(_scatter, context), with_kwargs=True)
    last.register_forward_hook(partial(_gather, context))


def _scatter(context: ParallelContext, module: nn.Module, args: Any, kwargs: Any) -> Any:
    degree = context.tp.degree

    def change(x: Tensor) -> Tensor:
        if x.shape[SEQUENCE_DIM] % degree:
            raise InputMismatchError(
                f"a sequence of {x.shape[SEQUENCE_DIM]} does not divide over {degree} ranks: with sequence parallelism "
                f"pad inputs to a multiple of {degree}"
            )
        return mappings.scatter_to_sequence_parallel_region(x, SEQUENCE_DIM, context=context)

    return _on_hidden_states(change, args, kwargs)


def _gather(context: ParallelContext, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_gather(context, module, args, output[0]), *output[1:])
    return mappings.gather_from_sequence_parallel_region(output, SEQUENCE_DIM, to_model_parallel=False, context=context)


def _on_hidden_states(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), dict(kwargs)
    given = {name: kwargs[name] for name in _INPUTS if isinstance(kwargs.get(name), Tensor)}
    if not given:
        raise ParallelConfigError(
            "the plan gives a module the style attention or shared, but it is called with "
            f"{', '.join(kwargs) or 'nothing'}: its hidden states must come first, or as one of {', '.join(_INPUTS)}"
        )
    changed = {id(x): x for x in given.values()}
    changed = {number: change(x) for number, x in changed.items()}
    return args, {**kwargs, **{name: changed[id(x)] for name, x in given.items()}}


def sum_gradients(model: nn.Module, names: Iterable[str], context: ParallelContext) -> None:
    """Sum the gradients of whole weights over the ranks, each of which computes a part of them.

    Names that the model lacks are left out: this rank's pipeline stage has not all of them. So are those of parallel
    layers, which sum what they have to.
    """
    weights = dict(model.named_parameters())
    for name in dict.fromkeys(names):
        if name in weights and not isinstance(owner := model.get_submodule(name.rpartition(".")[0]), ParallelLayer):
            _sum_gradient(weights[name], context)
            owner.register_forward_pre_hook(partial(_keep_summing, name.rpartition(".")[2], context))


def _keep_summing(name: str, context: ParallelContext, module: nn.Module, args: Any) -> None:
    """Sum the gradient of a module's weight after it was replaced: tensors lose hooks in copies and on other devices,
    and ``load_state_dict(assign=True)`` puts others there."""
    weight = module._parameters.get(name)
    # A graph has no gradients (export), or takes the weight with the hooks that it has (compile).
    if isinstance(weight, nn.Parameter) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _sum_gradient(weight, context)


def _summed(context: ParallelContext, grad: Tensor) -> Tensor:
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return comm.all_reduce(grad.to(dtype).contiguous(), context).to(grad.dtype)


def _sum_gradient(weight: nn.Parameter, context: ParallelContext) -> None:
    if any(getattr(hook, "func", None) is _summed for hook in (weight._backward_hooks or {}).values()):
        return
    trained = weight.requires_grad
    weight.requires_grad_(True)  # a frozen weight takes no hook, and may be trained later
    weight.register_hook(partial(_summed, context))
    weight.requires_grad_(trained)
    setattr(weight, SUMMED, True)
