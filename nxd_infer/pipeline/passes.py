"""One microbatch through one stage: the model's own forward, stopped after the stage's last unit; and its backward.

Gradients of linear layers' weights can be computed after the backward pass: what fills the bubble of ``"zero-bubble"``
("Zero Bubble Pipeline Parallelism", Qi et al., 2023: a stage waits for gradients of activations only).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers.random import seed_of
from nxd_infer.pipeline.plan import Output, Plan, has_gradient, leaves_of
from nxd_infer.util.devices import seed_generators


class StageEnd(BaseException):
    """Stops a model's forward: what follows is another stage's."""


@dataclass
class Pass:
    """A microbatch on a stage, from its forward to its backward."""

    stage: int
    microbatch: int
    received: dict[Output, Tensor]
    """What the stage before handed over; for training, all but integers require gradients."""
    produced: dict[Output, Tensor] = field(default_factory=dict)
    """Outputs of this stage that the next one is handed."""
    loss: Tensor | None = None
    """On the last stage."""
    versions: dict[Output, int] = field(default_factory=dict)

    def handed_on(self, plan: Plan) -> dict[Output, Tensor]:
        """Return what the next stage is handed. Raises ParallelConfigError if it was changed after its layer."""
        found = {}
        for output in plan.handed[self.stage + 1]:
            if output in self.produced:
                tensor = self.produced[output]
                if tensor._version != self.versions[output]:
                    raise ParallelConfigError(
                        f"the result of {plan.calls[output[0]].unit!r} is changed in place after it is returned, so "
                        "the next stage would do it again: use an operation that makes a new tensor"
                    )
                found[output] = tensor
            else:
                found[output] = self.received[output]
        return found


class Forward:
    """Directs the calls of units while a stage's forward runs. One for all stages of a rank; not reentrant.

    Used as ``calling(forward.directed(modules))``.
    """

    def __init__(self, plan: Plan, seed: int | None):
        self.plan, self.seed = plan, seed
        self.start_streams: Callable[[str], None] = lambda _: None
        """Of a tensor-parallel rank's own streams; see :class:`~nxd_infer.parallel_layers.random.RNGStatesTracker`."""
        self._at: Pass | None = None
        self._number = 0
        self._inside = False
        self._wanted: dict[int, dict[int, list[int]]] = {}
        for stage, outputs in enumerate(plan.handed):
            for number, place in outputs:
                if stage == plan.calls[number].stage + 1:
                    self._wanted.setdefault(stage - 1, {}).setdefault(number, []).append(place)

    def directed(self, modules: Mapping[str, tuple[nn.Module, Callable[..., Any]]]) -> dict[nn.Module, Any]:
        """Return what calls of units go to, for (module, its own forward) by path."""
        return {module: functools.partial(self._call, path, forward) for path, (module, forward) in modules.items()}

    def run(self, at: Pass, call: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> None:
        """Run the forward of ``at``, and fill in what it produces."""
        self._at, self._number, self._inside = at, 0, False
        try:
            output = call()
            if at.stage < len(self.plan.ends):
                raise InputMismatchError(_other_calls(self.plan, self._number, "the model's end"))
            at.loss = loss_of(output)
        except StageEnd:
            pass
        finally:
            self._at = None

    def _call(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        at = self._at
        if self._inside or at is None:
            return forward(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number >= len(self.plan.calls) or self.plan.calls[number].unit != path:
            raise InputMismatchError(_other_calls(self.plan, number, path))
        planned = self.plan.calls[number]
        if planned.stage < at.stage:
            self._reseed(number, after=True)
            handed = {i: at.received[number, i] for i in range(len(planned.leaves)) if (number, i) in at.received}
            return planned.result(handed)
        self._reseed(number, after=False)
        self._inside = True
        try:
            result = forward(*args, **kwargs)
        finally:
            self._inside = False
        self._keep(number, result, at)
        if at.stage < len(self.plan.ends):
            self._require_plain_values(number, result)
        if at.stage < len(self.plan.ends) and number == self.plan.ends[at.stage]:
            raise StageEnd
        self._reseed(number, after=True)
        return result

    def _keep(self, number: int, result: Any, at: Pass) -> None:
        places = self._wanted.get(at.stage, {}).get(number)
        if places is None:
            return
        flat = tree_leaves(result)
        for place in places:
            planned = self.plan.shape((number, place))
            tensor = flat[place] if place < len(flat) else None
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (planned.size, planned.dtype):
                found = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputMismatchError(
                    f"{self.plan.calls[number].unit!r} gave {found} where its shapes promised {tuple(planned.size)} "
                    f"{planned.dtype}: what a layer returns must depend on the shapes of the inputs only"
                )
            at.produced[number, place] = tensor
            at.versions[number, place] = tensor._version

    def _require_plain_values(self, number: int, result: Any) -> None:
        """Check that numbers and texts of a result are those of the plan, which the next stages have."""
        for found, planned in zip(tree_leaves(result), self.plan.calls[number].leaves, strict=False):
            if isinstance(planned, bool | int | float | complex | str) and found != planned:
                raise InputMismatchError(
                    f"{self.plan.calls[number].unit!r} gave the Python value {found!r} where its shapes promised "
                    f"{planned!r}, and only tensors are handed to other stages: return a tensor"
                )

    def _reseed(self, number: int, after: bool) -> None:
        """Make random numbers those of this call of this microbatch, whatever the stages and the schedule are."""
        if self.seed is not None and self._at is not None:
            text = f"{self.seed} {self._at.microbatch} {number} {after}"
            seed_generators(seed_of(text))
            self.start_streams(text)


def run_backward(at: Pass, weight: float, gradients: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
    """Run the backward of a pass; return the gradients of what it had received.

    ``weight``: of this microbatch's loss. ``gradients``: what the next stage returned.
    """
    roots: list[tuple[Tensor, Tensor]] = []
    if at.loss is not None and at.loss.requires_grad:
        if weight:
            roots.append((at.loss, torch.full_like(at.loss, weight)))
        else:  # no targets: a mean over none has gradients of NaN, and zero times NaN is NaN
            roots += [(leaf, torch.zeros_like(leaf)) for leaf in leaves_of(at.loss)]
    roots += [(at.produced[output], g) for output, g in gradients.items() if output in at.produced]
    roots = [(tensor, gradient) for tensor, gradient in roots if tensor.requires_grad]
    if roots:
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
    found: dict[Output, Tensor] = {}
    for output, tensor in at.received.items():
        if not has_gradient(tensor.dtype):
            continue
        parts = [part for part in (tensor.grad, gradients.get(output)) if part is not None]
        found[output] = torch.zeros_like(tensor) if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return found


def _other_calls(plan: Plan, number: int, found: str) -> str:
    wanted = plan.calls[number].unit if number < len(plan.calls) else "the model's end"
    return (
        f"the model came to {found!r} where it came to {wanted!r} before: a pipeline needs the same calls for all "
        "microbatches; values of the inputs must not decide about them"
    )


Late = list[tuple[Tensor, Tensor, Tensor]]
"""(weight, input, gradient of the output) of linear layers whose weights still have to get their gradient."""


class DeferredWeights:
    """What takes the weights of linear layers out of autograd's graph, and keeps what their gradients are made of."""

    def __init__(self):
        self.late: Late = []
        """Where the backward pass that runs puts it."""

    @contextlib.contextmanager
    def linears(self) -> Iterator[None]:
        """Let ``F.linear`` take part inside the block, where its weight is a parameter and its input has a gradient."""
        before = F.linear

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            own = weight.is_leaf and weight.requires_grad and input.requires_grad and torch.is_grad_enabled()
            if not own or torch.is_autocast_enabled(input.device.type):
                return before(input, weight, bias)
            result = _Linear.apply(input, lambda: weight, before, self)
            return result if bias is None else result + bias

        F.linear = linear
        try:
            yield
        finally:
            F.linear = before


def finish(late: Late) -> None:
    """Add the gradients that were left for later, as a backward pass adds them: hooks of the weights run."""
    for weight, input, gradient in late:
        rows = gradient.reshape(-1, gradient.shape[-1]), input.reshape(-1, input.shape[-1])
        torch.autograd.backward(weight, rows[0].T @ rows[1])
    late.clear()


class _Linear(torch.autograd.Function):
    """A linear layer that autograd knows as a function of its input alone, so the weight's hooks run once."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Callable[[], Tensor], linear: Any, weights: DeferredWeights) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.weights = weight, weights
        return linear(input, weight())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (input,), weight = grad_outputs, ctx.saved_tensors, ctx.weight()
        ctx.weights.late.append((weight, input, gradient))
        return gradient @ weight, None, None, None
