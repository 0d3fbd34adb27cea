"""The optimizer of parallel training: a ``torch.optim.Optimizer`` around another one.

A step averages the gradients over the data-parallel ranks, sums those of sequence-parallel parameters, checks that they
are finite, clips them by the norm of the whole model, runs the wrapped optimizer, and writes back what it updated
elsewhere (float32 master weights, ZeRO-1 shards). ``param_groups`` has the model's own parameters (for schedulers);
hyperparameters are copied before each step. Other attributes and methods are those of the wrapped optimizer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.comm.texts import gather_texts
from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError, ParallelConfigError
from nxd_infer.layout.params import ParamLayout, layout_by_name
from nxd_infer.optimizer.buckets import GradReducer
from nxd_infer.optimizer.groups import (
    NOT_HYPERPARAMETERS,
    ON_NONFINITE,
    Parameters,
    checked_norm,
    in_order,
    parameter_names,
    require_frozen,
    require_once,
    require_supported,
    require_unchanged,
    with_defaults,
)
from nxd_infer.optimizer.pieces import Masters, Piece, make_pieces
from nxd_infer.optimizer.wrapper import OptimizerWrapper
from nxd_infer.parallel_layers import grads as gradients
from nxd_infer.util.devices import transport_device
from nxd_infer.util.options import Option

__all__ = ["NxDOptimizer"]


class NxDOptimizer(OptimizerWrapper):
    """``optimizer_class(parameters, **defaults)`` over all ranks of the current context.

    Args:
        parameters: tensors, ``(name, tensor)`` pairs or parameter groups, as for any optimizer; the same on every rank.
        optimizer_class: the wrapped optimizer. With ``zero1`` it gets flat ranges of parameters, so it must be
            elementwise (like Adam and SGD; PyTorch optimizers that need matrices are rejected).
        zero1: each data-parallel rank updates an equal share of the elements and holds only their state.
        grad_clipping, max_grad_norm: scale all gradients so that the model's 2-norm is at most ``max_grad_norm``.
        on_nonfinite: ``"raise"`` NonFiniteGradientError if a gradient is NaN or infinite on any rank, before anything
            changes, or ``"skip"`` the step with a warning. Every rank does the same.
        master_weights: True updates float32 copies of narrower parameters; a dtype updates copies in that dtype of all
            parameters with another one.
        fp32_grad_acc: sum gradients over backward passes (in ``param.main_grad``) in at least float32 and the dtype of
            the copies. ``zero_grad()`` of the optimizer or of an NxDModel drops them; another module's does not.
        reduce_dtype: sum gradients over the ranks in at least this dtype.
        bucket_cap_mb: reduce gradients in flat buckets of about this size.
        lazy_init: shard nothing and create no ``optimizer_class`` before :meth:`init_zero`.
        defaults: passed to ``optimizer_class``.

    Gradients are final after :meth:`synchronize_gradients`, which ``step`` calls; call it before you clip or read
    ``.grad`` yourself. With ZeRO-1, ``.grad`` stays this rank's own, see :meth:`named_gradients`. Accumulated gradients
    are averages over ranks of sums over backward passes: divide the loss, and zero them, as in any PyTorch loop.

    The wrapper exposes the attributes and methods of the wrapped optimizer, and ``state`` is its state keyed by the
    model's parameters. A copy is in the state between two steps: parameters, state and settings are copied, gradients
    and hooks are not.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        zero1: bool = False,
        grad_clipping: bool = True,
        max_grad_norm: float = 1.0,
        on_nonfinite: str = "raise",
        master_weights: Masters = False,
        fp32_grad_acc: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        bucket_cap_mb: float = 25.0,
        lazy_init: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ):
        Option("raise", "", str, choices=ON_NONFINITE).checked("on_nonfinite", on_nonfinite, ParallelConfigError)
        self.zero1, self.grad_clipping, self.max_grad_norm = zero1, grad_clipping, max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.master_weights = master_weights
        self.optimizer_class, self._options = optimizer_class, dict(defaults or {})
        self._wide = master_weights if isinstance(master_weights, torch.dtype) else torch.float32
        self._fp32_grad_acc, self._reduce_dtype, self._cap_mb = fp32_grad_acc, reduce_dtype, bucket_cap_mb
        self.skipped_steps = 0
        """Number of steps skipped by ``on_nonfinite="skip"``."""
        self._grad_norm: Tensor | None = None
        self._replicas_compared = False
        self.names: list[str] = []
        """Names of the trained parameters, in order."""
        self._reducer = GradReducer([], current_context(), cap_mb=bucket_cap_mb)
        listed = in_order(parameters)
        if not listed and current_context().pp.degree > 1:  # a stage may train nothing, where others do
            listed = [{"params": []}]
        super().__init__(listed, dict(self._options))
        if not lazy_init:
            self.init_zero()

    # --- construction ---------------------------------------------------------------------------------

    def init_zero(self) -> None:
        """Shard the current parameters and create the wrapped optimizer. Without ``lazy_init`` the constructor does.

        A second call starts over with a new wrapped optimizer without state.
        """
        require_no_lonely_rank(type(self).__name__)
        self.inited, self.context = False, current_context()
        require_supported(self.optimizer_class, self.zero1, self.context)
        self._final = False
        self._given = []
        self.names, self.pieces = [], []
        self._names_elsewhere: list[list[str]] = []
        self.logical_groups_elsewhere: list[list[str]] = []
        """The logical names of what other pipeline stages train in each group of this one."""
        self.logical_elsewhere: set[str] = set()
        """Logical names of all that other pipeline stages train, also in groups that this one does not have."""
        self._reducer = GradReducer(
            [],
            self.context,
            scatter=self.zero1,
            accumulate_dtype=torch.promote_types(self._wide, torch.float32) if self._fp32_grad_acc else None,
            reduce_dtype=self._reduce_dtype,
            cap_mb=self._cap_mb,
        )
        self.optimizer = self.optimizer_class(self._take(self.param_groups), **self._options)
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group.update(with_defaults(group, inner))
        self.defaults = self.optimizer.defaults
        self.inited = True

    def _take(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the parameters of ``groups``; return the wrapped optimizer's groups, over this rank's pieces."""
        first, number = len(self._params), len(self._given)
        self._given += [list(group["params"]) for group in groups]
        self._reducer.extend([param for group in groups for param in group["params"] if param.requires_grad])
        self.names += parameter_names(groups, self._params[first:], self.names, number)
        self._meet_other_stages(groups)
        added = make_pieces(self._reducer, self.master_weights, first)
        self.pieces += added
        self.pieces_changed()
        tensors = {id(piece.param): piece.tensor for piece in added}
        return [
            {
                **{k: v for k, v in group.items() if k not in NOT_HYPERPARAMETERS},
                "params": [tensors[id(param)] for param in group["params"] if id(param) in tensors],
            }
            for group in groups
        ]

    def _meet_other_stages(self, groups: list[dict[str, Any]]) -> None:
        """Note the names of the parameters that the other pipeline stages train, by group. A collective."""
        names = dict(zip(map(id, self._params), self.names, strict=True))
        layouts = self.layouts
        own = [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
        logical = [[n for name in group for n in layouts[name].logical_names] for group in own]
        texts = gather_texts(json.dumps([own, logical]), self.context)
        others = [json.loads(text) for rank, text in enumerate(texts) if rank != self.context.pp.rank]
        for number in range(len(groups)):
            stages = [one for one in others if number < len(one[0])]
            self._names_elsewhere.append([name for names, _ in stages for name in names[number]])
            self.logical_groups_elsewhere.append([name for _, names in stages for name in names[number]])
        self.logical_elsewhere |= {name for _, names in others for group in names for name in group}

    @property
    def _params(self) -> list[Tensor]:
        """The trained parameters."""
        return self._reducer.params

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the trained parameters of each group."""
        name_of = dict(zip(map(id, self._params), self.names, strict=True))
        return [[name_of[id(p)] for p in group["params"] if id(p) in name_of] for group in self.param_groups]

    @property
    def whole_group_names(self) -> list[list[str]]:
        """:attr:`group_names`, with those of the other pipeline stages."""
        return [[*own, *others] for own, others in zip(self.group_names, self._names_elsewhere, strict=True)]

    @property
    def layouts(self) -> dict[str, ParamLayout]:
        """The layout of each trained parameter, by name."""
        return {name: layout_by_name(param, name) for name, param in zip(self.names, self._params, strict=True)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, as with any optimizer; their gradients use separate buckets.

        Every rank must call it, between steps. To load the ``state_dict``, build the optimizer in the same order.
        Raises ValueError for a parameter that is already in a group.
        """
        super().add_param_group(dict(param_group))
        group = self.param_groups[-1]
        try:
            require_once(group)
        except ParallelConfigError:
            self.param_groups.pop()
            raise
        if self.inited:
            added = self._take([group])[0]
            self.optimizer.add_param_group(added)
            # Some optimizers make the state of their parameters in the constructor alone (Adagrad, torch 2.9).
            for tensor, state in self.optimizer_class([dict(added)], **self._options).state.items():
                self.optimizer.state.setdefault(tensor, state)
            group.update(with_defaults(group, self.optimizer.param_groups[-1]))

    # --- gradients ------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of the model's gradients in the last step, before clipping; None without a step or clipping."""
        return self._grad_norm

    @property
    def max_grad_norm(self) -> float:
        """The norm that gradients are clipped to. Setting it raises ParallelConfigError unless it is above 0."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float) -> None:
        self._max_grad_norm = checked_norm("max_grad_norm", norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.inited:
            self.optimizer.zero_grad(set_to_none)
        super().zero_grad(set_to_none)
        self._reducer.zero()
        for piece in self.pieces:
            if piece.tensor is not piece.param:
                piece.tensor.grad = None

    @torch.no_grad()
    def synchronize_gradients(self) -> None:
        """Wait for the averages over the data-parallel ranks and sum sequence-parallel gradients. A collective.

        Afterwards the gradients of ``pieces`` are final; without ZeRO-1 and master weights these are the parameters'
        own. A second call without a backward pass in between changes nothing.
        """
        self.require_inited("synchronize_gradients() or step()")
        require_unchanged(self.param_groups, self._given)
        require_frozen(self._given, self._params)
        if self._final and not any(self._reducer.is_fresh(index) for index in range(len(self._params))):
            return
        present, fresh = self._reducer.finish(final=self._final)
        partial: list[Tensor] = []
        own: list[int] = []
        self.refresh_pieces()
        for piece in self.pieces:
            source = self._reducer.gradient(piece.index)
            grad = self._average(piece) if present[piece.index] else None
            if piece.tensor is not piece.param:
                piece.tensor.grad = grad
            elif grad is not source:
                _give(piece.param, grad)
            grad = piece.tensor.grad
            # The parameter's own gradient may be a sum already, of this optimizer or another; and what replaces a final
            # gradient is made of it.
            if (
                grad is not None
                and gradients.is_sequence_parallel(piece.param)
                and not self._reducer.is_sum(piece.index)
                and (not self._final or fresh[piece.index] or source is None or not _same_memory(grad, source))
            ):
                partial.append(grad)
                source = self._reducer.gradient(piece.index)
                if source is not None and _same_memory(grad, source):
                    own.append(piece.index)
        gradients.sum_over_tp(partial, self.context)
        self._reducer.settle(summed=own)
        self._final = True
        if not self._replicas_compared:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Warn of replicated parameters whose gradients differ between tensor-parallel ranks. A collective, once.

        Such a parameter is used on a piece of the sequence and was not marked, and its copies would drift apart.
        """
        self._replicas_compared = True
        names, norms = [], []
        for piece in self.pieces:
            if self.context.tp.degree > 1 and not gradients.split_over_ranks(piece.param):
                grad = piece.tensor.grad
                dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
                norm = torch.zeros(()) if dense is None else torch.linalg.vector_norm(dense).float()
                names.append(self.names[piece.index])
                norms.append(norm.to(transport_device()))
        if not names:
            return
        own = torch.stack(norms)
        mean = own.clone()
        gradients.sum_over_tp([mean], self.context)
        mean /= self.context.tp.degree
        apart = ((own - mean).abs() > 0.01 * mean).tolist()
        differ = [name for name, differs in zip(names, apart, strict=True) if differs]
        if differ:
            shown = ", ".join(differ[:8]) + (f" and {len(differ) - 8} more" if len(differ) > 8 else "")
            warnings.warn(
                f"replicated parameters with other gradients on other tensor-parallel ranks: {shown}. With sequence "
                "parallelism pass sequence_parallel_enabled=True to their modules, or mark them with "
                "parallel_layers.layer_norm.mark_sequence_parallel(module)",
                stacklevel=4,
            )

    def _average(self, piece: Piece) -> Tensor | None:
        """Return the averaged gradient of a piece, in the shape and dtype of its tensor."""
        averaged = self._reducer.averaged(piece.index, piece.start, piece.stop)
        if averaged is None or (averaged is piece.param.grad and piece.tensor is piece.param):
            return averaged
        if averaged.is_sparse:
            averaged = averaged.to_dense()
        return averaged.reshape(piece.tensor.shape).to(piece.tensor.dtype)

    def named_gradients(self) -> dict[str, Tensor]:
        """Return the final gradients of this rank's parameters by name, zeros if there is none. A collective."""
        self.synchronize_gradients()
        whole = self._publisher.gather([piece.tensor.grad for piece in self.pieces])
        return dict(zip(self.names, whole, strict=True))

    def _shares(self) -> list[gradients.Share]:
        over = "dp" if self.zero1 and self._reducer.communicates else None
        return [
            gradients.Share(
                piece.tensor.grad, piece.spans, over or ("ep" if gradients.is_expert_parallel(piece.param) else None)
            )
            for piece in self.pieces
            if piece.tensor.grad is not None
        ]

    def _nonfinite_names(self) -> tuple[str, ...]:
        shares: list[gradients.Share | None] = [None] * len(self._params)
        for piece in self.pieces:
            if piece.tensor.grad is not None:
                shares[piece.index] = gradients.Share(piece.tensor.grad, piece.spans)
        bad = gradients.nonfinite(shares, self.context, zero1=self.zero1)
        text = json.dumps([self.names[index] for index in bad])
        return tuple(name for names in gather_texts(text, self.context) for name in json.loads(names))

    # --- the step -------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run one step over all ranks; see the class. ``args`` and ``kwargs`` are the wrapped optimizer's.

        ``closure`` is called once before; the wrapped optimizer is given one that returns this result. Returns what the
        wrapped optimizer does, else the closure's result.

        Raises NonFiniteGradientError with the names of the parameters, unless such steps are skipped, and
        ParallelConfigError if the wrapped optimizer evaluates the closure again or in the middle of its step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if not self._ready():
            return loss
        self.hand_on_hyperparameters()
        inner = None if closure is None else self._known(loss)
        if args:
            args = (inner, *args)
        elif inner is not None:
            kwargs["closure"] = inner
        result = self.optimizer.step(*args, **kwargs)
        self.take_back_hyperparameters()
        self.publish()
        return loss if result is None else result

    def _known(self, loss: Any) -> Callable[[], Any]:
        """Return a closure that gives ``loss`` once, and only for the weights that it belongs to."""
        versions: list[int] | None = [piece.tensor._version for piece in self.pieces]

        def known() -> Any:
            nonlocal versions
            if versions != [piece.tensor._version for piece in self.pieces]:
                raise ParallelConfigError(
                    f"{type(self.optimizer).__name__} evaluates the model in the middle of a step, which no rank can "
                    "do alone: use an optimizer that needs one evaluation per step, such as AdamW"
                )
            versions = None
            return loss

        return known

    def _ready(self) -> bool:
        """Make the gradients final, and clip them. Return False if the step is to be skipped. A collective."""
        self.synchronize_gradients()
        self._final = False
        zero1 = self.zero1 and self._reducer.communicates
        shares = self._shares()
        # Finite exactly if all gradients are. Used even without clipping: the inf-norm takes 20 times as long.
        norm = gradients.total_norm(shares, 2.0, self.context, zero1=zero1)
        self._grad_norm = norm if self.grad_clipping else None
        if not torch.isfinite(norm) and self._refuse_nonfinite():
            return False
        if self.grad_clipping:
            with torch.no_grad():
                gradients.clip_with_norm([share.grad for share in shares], self.max_grad_norm, norm)
        return True

    def _refuse_nonfinite(self) -> bool:
        names = self._nonfinite_names()
        if not names:
            return False  # finite gradients whose norm overflows float64: they are clipped to zero
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        message = f"gradients are NaN or infinite: {shown}"
        if self.on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f'{message}. No parameter was updated; optimizer_config["on_nonfinite"] = "skip" skips such steps',
                names,
            )
        self.skipped_steps += 1
        warnings.warn(f"step skipped: {message}", stacklevel=4)
        return True


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether one is the other or a view of it. XLA's tensors have no addresses, but storages."""
    return one is other or StorageWeakRef(one.untyped_storage()) == StorageWeakRef(other.untyped_storage())


def _give(param: Tensor, grad: Tensor | None) -> None:
    """Set the gradient of ``param`` to a copy of ``grad``, whose own memory is reused for the next sums."""
    if grad is not None and param.grad is not None and not param.grad.is_sparse:
        param.grad.copy_(grad)
    else:
        param.grad = None if grad is None else grad.clone()
