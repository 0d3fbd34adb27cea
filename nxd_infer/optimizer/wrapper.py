"""A wrapper for an optimizer that updates other tensors than the model's parameters.

It exposes the attributes, methods and state of the wrapped optimizer; changes that its methods make to weights reach
the model.
"""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from nxd_infer.context import ParallelContext
from nxd_infer.errors import CheckpointError, NotInitializedError, ParallelConfigError
from nxd_infer.optimizer.buckets import GradReducer
from nxd_infer.optimizer.groups import NOT_HYPERPARAMETERS, require_unchanged
from nxd_infer.optimizer.pieces import Piece, Publisher

OF_PYTORCH = ("_optimizer_", "_zero_grad_")
"""Name prefixes of what ``torch.optim.Optimizer`` keeps per object: hooks, and names for a profiler."""
NOT_COPIED = ("step", "_opt_called", "_publisher", "_stepped")
"""Attributes that learning-rate schedulers set on an optimizer, and those derived from the pieces."""


class OptimizerWrapper(torch.optim.Optimizer):
    """Presents ``optimizer``, which updates this rank's ``pieces``, as an optimizer of the parameters themselves.

    A copy is in the state between two steps: parameters, state and settings are copied, gradients and hooks are not.
    """

    context: ParallelContext
    optimizer: torch.optim.Optimizer
    """The wrapped optimizer; its parameters are the tensors of ``pieces``."""
    pieces: list[Piece]
    names: list[str]
    """Names of the trained parameters, in order."""
    zero1: bool
    """Whether data-parallel ranks have different pieces."""
    _reducer: GradReducer

    def __init__(self, groups: Iterable[Any], defaults: dict[str, Any]):
        self.inited = False
        """Whether the wrapped optimizer exists."""
        self.pieces = []
        self._stepped: dict[int, Tensor] = {}
        self._given: list[list[Tensor]] = []
        """The parameters of each group when the wrapped optimizer was made."""
        super().__init__(groups, defaults)

    def require_inited(self, what: str) -> None:
        """Raise NotInitializedError if the wrapped optimizer does not exist; ``what`` needs it."""
        if not self.inited:
            raise NotInitializedError(f"lazy_init=True: call init_zero() before {what}")

    def init_zero(self) -> None:
        """Create the wrapped optimizer."""
        raise NotImplementedError

    def pieces_changed(self) -> None:
        """Update what is derived from ``pieces`` after it was replaced or extended."""
        self._stepped = {id(piece.param): piece.tensor for piece in self.pieces}
        self._publisher = Publisher(self._reducer, self.pieces)

    def publish(self) -> None:
        """Write the tensors of ``pieces`` to the parameters, those of other ranks too."""
        self._publisher.publish()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks first. False: it unscales ``param.grad`` itself, before the step.

        Raises ParallelConfigError where that would not reach the gradients of the step, or not alike on every rank.
        """
        apart = any(piece.tensor is not piece.param for piece in self.pieces)
        if self.inited and (apart or self.context.world_size > 1):
            raise ParallelConfigError(
                "torch.amp.GradScaler does not work with parallel degrees, ZeRO-1, master weights or fp32_grad_acc: "
                "use bfloat16 autocast, which needs no scaling"
            )
        return False

    # --- attributes and methods -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("optimizer")
        if inner is None or name.startswith("_"):  # private names are not forwarded
            early = " before init_zero(), which comes first with lazy_init=True" if inner is None else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{early}", name=name, obj=self
            )
        try:
            value = getattr(inner, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(inner).__name__} in it has an attribute {name!r}"
            ) from None
        return self._forwarded(value) if inspect.ismethod(value) and value.__self__ is inner else value

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("optimizer")
        ours = inner is None or name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if ours or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def _forwarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the wrapped optimizer so that it sees the current hyperparameters and weights.

        With ZeRO-1 the call is a collective whatever the method does, because it may change weights on only one rank.
        """

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.hand_on_hyperparameters()
            self.refresh_pieces()
            result = method(*args, **kwargs)
            self.take_back_hyperparameters()
            self._publisher.publish(only_changes=True)  # always: no version tells of changes through `.data`
            return result

        return call

    def hand_on_hyperparameters(self) -> None:
        """Copy the hyperparameters that users and schedulers have set here to the wrapped optimizer."""
        self.require_inited("hyperparameters are handed on")
        require_unchanged(self.param_groups, self._given)
        _hand_on(self.param_groups, self.optimizer.param_groups)

    def take_back_hyperparameters(self) -> None:
        """Copy the wrapped optimizer's hyperparameters back."""
        _hand_on(self.optimizer.param_groups, self.param_groups)

    def refresh_pieces(self) -> None:
        """Update the pieces whose weights were loaded or moved since the last step."""
        for piece in self.pieces:
            piece.refresh()

    # --- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> MutableMapping[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped optimizer's state, keyed by the model's parameters."""
        return StateByParameter(self)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if self.inited:
            fresh = dict(value)
            self.state.clear()
            self.state.update(fresh)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, as the wrapped optimizer has it.

        If it updates other tensors than the parameters themselves, or with ZeRO-1 may update none, there is also a key
        ``"pieces"``: the parameter range of each entry, and its float32 master weight if there is one. ``"zero1"`` says
        that other data-parallel ranks have other pieces.
        """
        self.require_inited("state_dict()")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.hand_on_hyperparameters()
        self.refresh_pieces()
        state = self.optimizer.state_dict()
        if self.zero1 or any(piece.tensor is not piece.param for piece in self.pieces):
            state["pieces"] = [
                {
                    "name": self.names[piece.index],
                    "range": (piece.start, piece.stop),
                    "master": piece.tensor if piece.own_memory else None,
                }
                for piece in self.pieces
            ]
            state["zero1"] = self.zero1
        for hook in self._optimizer_state_dict_post_hooks.values():
            replaced = hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the :meth:`state_dict` of the same rank of an equal job.

        Raises CheckpointError if it describes other pieces: another model, or other degrees.
        """
        if not self.inited:
            self.init_zero()
        state = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state)
            state = state if replaced is None else replaced
        stored, _ = state.pop("pieces", None), state.pop("zero1", None)
        if stored is not None or any(piece.tensor is not piece.param for piece in self.pieces):
            saved = [(one["name"], tuple(one["range"])) for one in stored or ()]
            own = [(self.names[piece.index], (piece.start, piece.stop)) for piece in self.pieces]
            if saved != own:
                other = next(((a, b) for a, b in zip_longest(saved, own) if a != b))
                raise CheckpointError(
                    f"optimizer state: it describes {other[0]} where this rank has {other[1]}; it was saved by another "
                    "model, at other degrees, or without ZeRO-1 or master weights"
                )
        try:
            self.optimizer.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"optimizer state: it does not fit this optimizer: {error!r}") from error
        self.take_back_hyperparameters()
        with torch.no_grad():
            for piece, saved in zip(self.pieces, stored or [], strict=False):
                if piece.own_memory and saved["master"] is not None:
                    piece.tensor.copy_(saved["master"])
                    piece.settled()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # --- copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.refresh_pieces()
        own = {name: value for name, value in vars(self).items() if not name.startswith(OF_PYTORCH)}
        for name in NOT_COPIED:
            own.pop(name, None)
        params = [param for group in self.param_groups for param in group["params"]]
        marks = [{name: value for name, value in vars(param).items() if name != "main_grad"} for param in params]
        return {**own, "_marks": marks, "_final": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("_marks")
        super().__setstate__(state)
        params = [param for group in self.param_groups for param in group["params"]]
        for param, own in zip(params, marks, strict=True):  # a copied parameter has lost its attributes
            for name, value in own.items():
                if not hasattr(param, name):
                    setattr(param, name, value)
        for piece in self.pieces:
            piece.copied()
        self.pieces_changed()


class StateByParameter(MutableMapping[Any, Any]):
    """``optimizer.state[parameter]["exp_avg"]``, whichever tensor the wrapped optimizer updates for the parameter.

    With ZeRO-1 the tensors are flat and cover this rank's range; a parameter without a range here has no entry. Keys
    that are not parameters are those of the wrapped optimizer.
    """

    def __init__(self, optimizer: OptimizerWrapper):
        self._optimizer = optimizer
        self._inner: MutableMapping[Any, Any] = optimizer.optimizer.state if optimizer.inited else {}

    def _inner_key(self, key: Any) -> Any:
        """Return the tensor that is updated for a parameter; None if other ranks do that, or if it is frozen."""
        stepped = self._optimizer._stepped.get(id(key))
        groups = self._optimizer.param_groups
        ours = stepped is not None or any(key is param for group in groups for param in group["params"])
        return stepped if ours else key

    def __getitem__(self, key: Any) -> Any:
        inner = self._inner_key(key)
        return _SteppedElsewhere(key) if inner is None else self._inner[inner]

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:  # the wrapped optimizer's defaultdict would create the entry
            return default
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        inner = self._inner_key(key)
        if inner is None:
            raise _elsewhere(key)
        self._inner[inner] = value

    def __delitem__(self, key: Any) -> None:
        del self._inner[self._inner_key(key)]

    def __contains__(self, key: object) -> bool:
        inner = self._inner_key(key)
        return inner is not None and inner in self._inner

    def __iter__(self) -> Iterator[Any]:
        param_of = {id(piece.tensor): piece.param for piece in self._optimizer.pieces}
        return iter([param_of.get(id(key), key) for key in self._inner])

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return repr(dict(self))


class _SteppedElsewhere(UserDict[Any, Any]):
    """The state of a parameter that other ranks update: empty, and it rejects writes, which would be lost."""

    def __init__(self, param: Tensor):
        super().__init__()
        self._param = param

    def __setitem__(self, key: Any, item: Any) -> None:
        raise _elsewhere(self._param)


def _elsewhere(param: Tensor) -> KeyError:
    return KeyError(
        f"other ranks update this parameter of shape {tuple(param.shape)}, so it has no state here; check "
        "`parameter in optimizer.state` first"
    )


def _hand_on(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for one, other in zip(source, target, strict=True):
        other.update({k: v for k, v in one.items() if k not in NOT_HYPERPARAMETERS})
