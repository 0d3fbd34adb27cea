"""The model wrapper: used like the model, and runs training and evaluation steps.

Source: NxD Core training API, "Initialize NxD Core Model Wrapper".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.modules.stand_in import StandIn
from nxd_infer.modules.wrapper import ModelWrapper
from nxd_infer.parallel_layers.layer_norm import mark_sequence_parallel

__all__ = ["NxDModel", "local_module"]

Self = TypeVar("Self", bound="NxDModel")
MARKED = "_sequence_parallel_parameters"
"""Key of a copied or pickled model's state: the names of the parameters that ``mark_sequence_parallel`` has marked."""


class NxDModel(ModelWrapper):
    """One rank's model. Parameters, modules, state dicts and unknown attributes are those of the local module.

    ``nxd_config`` is the configuration that it was built with; ``lora_config`` in it is that of its adapter.
    """

    nxd_config: dict[str, Any]

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]):
        super().__init__(module)
        self.nxd_config = dict(nxd_config)
        self._name_parameters()
        self.train()

    def _name_parameters(self) -> None:
        """Attach the names to the parameters, for code that gets only the parameters."""
        for name, param in self.module.named_parameters():
            param.nxd_name = name  # pyright: ignore[reportAttributeAccessIssue]

    # What is attached to parameters is not copied with them, and is attached again where they are replaced.

    def _marked(self) -> list[str]:
        named = self.module.named_parameters()
        return [name for name, param in named if getattr(param, "sequence_parallel_enabled", False)]

    @contextlib.contextmanager
    def _replacing_parameters(self) -> Iterator[None]:
        marked = self._marked()
        try:
            yield
        finally:  # some may be replaced already
            self._mark(marked)

    def _mark(self, names: list[str]) -> None:
        self._name_parameters()
        mark_sequence_parallel(*(param for name, param in self.module.named_parameters() if name in names))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), MARKED: self._marked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marked = state.pop(MARKED, [])
        super().__setstate__(state)
        self._mark(marked)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._replacing_parameters():
            return super().load_state_dict(*args, **kwargs)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._replacing_parameters():
            return super()._apply(fn, recurse)

    # --- the wrapped module ---------------------------------------------------------------------------

    def local_module(self) -> nn.Module:
        """The unwrapped module of this rank."""
        return self.module

    def local_modules(self) -> list[nn.Module]:
        """The unwrapped modules of this rank: one."""
        return [self.module]

    original_module = local_module

    @property
    def dtype(self) -> torch.dtype:
        """The local module's ``dtype``, or that of its first floating-point parameter."""
        own = getattr(self.module, "dtype", None)
        if isinstance(own, torch.dtype):
            return own
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def bubble(self) -> float | None:
        """The share of the last step in which this rank waited for other pipeline stages; None without a pipeline."""
        return None

    # --- running --------------------------------------------------------------------------------------

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of one (micro)batch of this data-parallel rank; return its loss, detached.

        The loss is the output itself if that is one number, else the value marked by ``output_loss_value_spec``, else
        ``output.loss``, ``output["loss"]`` or the first of a tuple. Raises InputMismatchError if there is none.
        """
        require_gradients()
        loss = self._loss(self(*args, **kwargs))
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def run_eval(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of one batch in evaluation mode, without gradients."""
        with self._evaluating():
            return self._loss(self(*args, **kwargs))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Let all modules be in evaluation mode inside the block; each has its own mode again afterwards."""
        modules = [self, self.module, *self.module.modules()]
        modules += [hidden for one in modules if isinstance(one, StandIn) for hidden in one.hidden.modules()]
        training = [one for one in modules if one.training]
        self.eval()
        try:
            yield
        finally:
            for one in training:
                one.training = True

    def _loss(self, output: Any) -> Tensor:
        spec = (self.nxd_config.get("pipeline_config") or {}).get("output_loss_value_spec")
        loss = output
        if spec is not None and not isinstance(output, Tensor):
            loss = _marked(output, spec)
        elif not isinstance(output, Tensor):
            loss = getattr(output, "loss", None)
            if loss is None and isinstance(output, Mapping):
                loss = output.get("loss")
            elif loss is None and isinstance(output, tuple | list) and output:
                loss = output[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputMismatchError(
                f"the model's {type(output).__name__} has no loss (found {what}): pass labels, return the loss first "
                "or mark it with pipeline_config={'output_loss_value_spec': ...}"
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, including those that the optimizer sums in float32."""
        self.module.zero_grad(set_to_none)
        for param in self.module.parameters():
            if getattr(param, "main_grad", None) is not None:
                param.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]


def require_gradients() -> None:
    """Raise ParallelConfigError if nothing can be trained here."""
    if not torch.is_grad_enabled():  # inference_mode() disables them too
        raise ParallelConfigError(
            "run_train() computes gradients, which torch.no_grad() or torch.inference_mode() has disabled here: call "
            "it outside of that block, or call run_eval()"
        )


def local_module(model: nn.Module) -> nn.Module:
    """Return the module whose names checkpoints use: the wrapped one of an :class:`NxDModel`, else ``model``."""
    return model.local_module() if isinstance(model, NxDModel) else model


def _marked(output: Any, spec: Any) -> Any:
    """Return the value of ``output`` that is marked with True in ``spec``, tuples and dicts of the same structure."""
    if not isinstance(spec, Mapping | tuple | list):
        return output if spec else None
    for key, inner in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        if (value := _marked(output[key], inner) if inner else None) is not None:
            return value
    return None
