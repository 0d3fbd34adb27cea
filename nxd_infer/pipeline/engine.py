"""Runs one rank's passes of a step in the order of its schedule, and moves values between the ranks meanwhile.

Messages between two stages have a tag of their own, so they are received ahead of their use and in any order. A weight
that another rank needs is lent to it: sent before its first pass, and its gradient comes back after its last one. So a
tied weight is one parameter of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.comm.overlapped import Pending
from nxd_infer.context import ParallelContext
from nxd_infer.parallel_layers.random import get_xla_rng_tracker
from nxd_infer.pipeline.messages import messages_for
from nxd_infer.pipeline.passes import DeferredWeights, Forward, Late, Pass, finish, run_backward
from nxd_infer.pipeline.plan import Output, Plan, Shape, has_gradient
from nxd_infer.pipeline.schedule import Action, Span
from nxd_infer.pipeline.stage import Stage, Weight, calling, own_forward, shadowed

LOOKAHEAD = 2
"""Passes ahead of the one that runs whose messages are being received."""


class Engine:
    """One step on one rank. ``run`` returns this rank's losses by microbatch: none but on the last stage.

    Args:
        actions: of every rank.
        calls: for each microbatch the forward of the model on it; ``loss_of`` finds the loss in what it returns.
        weights: of each microbatch's loss.
        seed: of the random numbers; None draws from the generators as they are.
    """

    def __init__(
        self,
        stage: Stage,
        context: ParallelContext,
        plan: Plan,
        actions: Sequence[Sequence[Action]],
        calls: Sequence[Callable[[], Any]],
        loss_of: Callable[[Any], Tensor],
        weights: Sequence[float],
        seed: int | None,
    ):
        self.stage, self.plan, self.seed = stage, plan, seed
        self.calls, self.loss_of, self.weights = calls, loss_of, weights
        self.spans: list[Span] = []
        """When each pass ran, in seconds of ``time.perf_counter``."""
        self.losses: dict[int, Tensor] = {}
        self.actions = actions[stage.rank]
        self.training = any(action.backward for action in self.actions)
        self.messages = messages_for(context, actions, stage.units.stages)
        self._forward = Forward(plan, seed)
        self._deferred = DeferredWeights()
        self._late: dict[tuple[int, int], Late] = {}
        """Of each microbatch between the two parts of its backward pass."""
        self._passes: dict[tuple[int, int], Pass] = {}
        self._coming: dict[Action, dict[Output, Pending]] = {}
        self._here: dict[Action, dict[Output, Tensor]] = {}
        """Values for passes of this rank that come from another stage of this rank."""
        self._sent: dict[Action, list[Pending]] = {}
        self._loans = _Loans(self)

    def drop(self) -> None:
        """Forget what a failed step has begun. A traceback keeps the engine alive, and an operation in flight keeps
        gloo's connections open: the peers would wait for this rank until their time limit."""
        loans = self._loans
        for held in (self._late, self._passes, self._coming, self._here, self._sent, loans.sent, loans.coming):
            held.clear()

    def run(self) -> dict[int, Tensor]:
        modules = {path: (module, own_forward(module)) for path, module in self.stage.unit_modules().items()}
        self._loans.send()
        for action in self.actions[: LOOKAHEAD + 1]:
            self._receive(action)
        self.messages.before(0)
        in_parts = any(action.late for action in self.actions)
        linears = self._deferred.linears() if in_parts else contextlib.nullcontext()
        streams = get_xla_rng_tracker().reseeded() if self.seed is not None else contextlib.nullcontext()
        with shadowed(self._loans.places()), calling(self._forward.directed(modules)), linears, streams as start:
            self._forward.start_streams = start or self._forward.start_streams
            for number, action in enumerate(self.actions):
                self.messages.before(number)
                for ahead in self.actions[number : number + LOOKAHEAD + 1]:
                    self._receive(ahead)
                values = self._arrived(action)
                start = time.perf_counter()
                if action.late:
                    finish(self._late.pop((action.stage, action.microbatch)))
                elif action.backward:
                    self._deferred.late = self._late[action.stage, action.microbatch] = []
                    self._run_backward(action, values)
                else:
                    self._run_forward(action, values)
                self.spans.append(Span(action, start, time.perf_counter()))
        self._loans.give_back()
        self.messages.before(len(self.actions))
        self._loans.take_back()
        for sent in (*self._sent.values(), self._loans.sent):
            for pending in sent:
                pending.wait()
        return self.losses

    # --- passes ---------------------------------------------------------------------------------------

    def _run_forward(self, action: Action, received: dict[Output, Tensor]) -> None:
        if self.training:
            for tensor in received.values():
                tensor.requires_grad_(has_gradient(tensor.dtype))
        at = Pass(action.stage, action.microbatch, received)
        self._forward.run(at, self.calls[action.microbatch], self.loss_of)
        if at.loss is not None:
            self.losses[action.microbatch] = at.loss.detach()
        if action.stage < self._last:
            self._send(Action(action.stage + 1, action.microbatch), at.handed_on(self.plan))
        if self.training:
            self._passes[action.stage, action.microbatch] = at

    def _run_backward(self, action: Action, gradients: dict[Output, Tensor]) -> None:
        at = self._passes.pop((action.stage, action.microbatch))
        found = run_backward(at, self.weights[action.microbatch], gradients)
        if action.stage:
            self._send(Action(action.stage - 1, action.microbatch, True), found)
        # What was handed on has arrived: its gradient is here. So it is not kept until the end of the step.
        for pending in self._sent.pop(Action(action.stage + 1, action.microbatch), ()):
            pending.wait()

    # --- messages -------------------------------------------------------------------------------------

    @property
    def _last(self) -> int:
        return self.stage.units.stages - 1

    def _source(self, action: Action) -> int | None:
        """The stage whose results ``action`` needs."""
        if action.late:
            return None
        if action.backward:
            return action.stage + 1 if action.stage < self._last else None
        return action.stage - 1 if action.stage else None

    def _outputs(self, action: Action) -> list[Output]:
        """What is handed to ``action``: outputs, or their gradients."""
        if not action.backward:
            return list(self.plan.handed[action.stage])
        handed = self.plan.handed[action.stage + 1] if action.stage < self._last else ()
        return [output for output in handed if has_gradient(self.plan.shape(output).dtype)]

    def _tag(self, action: Action, place: int) -> int:
        several = max((len(handed) for handed in self.plan.handed), default=0) + 1
        count = len(self.calls)
        return ((action.backward * (self._last + 1) + action.stage) * count + action.microbatch) * several + place

    @property
    def first_free_tag(self) -> int:
        return self._tag(Action(self._last + 1, 0, True), 0)

    def _receive(self, action: Action) -> None:
        """Begin to receive what ``action`` needs from another rank."""
        source = self._source(action)
        if source is None or action in self._coming or self.stage.rank_of(source) == self.stage.rank:
            return
        self._coming[action] = {
            output: self.messages.recv(
                self.plan.shape(output).empty(), self.stage.rank_of(source), self._tag(action, place)
            )
            for place, output in enumerate(self._outputs(action))
        }

    def _arrived(self, action: Action) -> dict[Output, Tensor]:
        if self._source(action) is None:
            return {}
        if action in self._coming:
            # Kept as an entry without values, so that it is not received again.
            found = {output: pending.wait() for output, pending in self._coming[action].items()}
            self._coming[action] = {}
            return found
        return self._here.pop(action)

    def _send(self, action: Action, values: Mapping[Output, Tensor]) -> None:
        """Hand ``values`` to ``action``, on its rank."""
        target = self.stage.rank_of(action.stage)
        if target == self.stage.rank:
            self._here[action] = {output: values[output].detach() for output in self._outputs(action)}
            return
        self._sent[action] = [
            self.messages.send(values[output].detach().contiguous(), target, self._tag(action, place))
            for place, output in enumerate(self._outputs(action))
        ]


class _Loans:
    """Weights of one rank that another rank needs while a step runs."""

    def __init__(self, engine: Engine):
        self.engine, self.stage, self.messages = engine, engine.stage, engine.messages
        self.loans = [(self.stage.weights[name], rank) for name, rank in engine.plan.lent]
        """(weight, rank that borrows it)."""
        self.sent: list[Pending] = []
        self.coming: dict[str, Pending] = {}
        self._sums: dict[str, Tensor] = {}
        """Gradients of what is borrowed, over the microbatches."""

    def send(self) -> None:
        """Begin to send what this rank lends, and to receive what it borrows."""
        for tag, (weight, rank) in enumerate(self.loans, self.engine.first_free_tag):
            if rank == self.stage.rank:
                made = Shape(weight.shape, weight.dtype).empty()
                self.coming[weight.name] = self.messages.recv(made, self.stage.rank_of(weight.stage), tag)
            elif self.stage.owns(weight):
                tensor = self.stage.own(weight.name).detach().contiguous()
                self.sent.append(self.messages.send(tensor, rank, tag))

    def places(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Wait for what is borrowed; return where it is put, and zeros for all other weights of other ranks."""
        found: list[tuple[nn.Module, str, Tensor]] = []
        for weight in self.stage.foreign():
            coming = self.coming.pop(weight.name, None)
            tensor = Shape(weight.shape, weight.dtype).zeros() if coming is None else coming.wait()
            tensor = nn.Parameter(tensor, False) if weight.parameter else tensor
            if coming is not None and self._is_trained(weight):
                tensor.requires_grad_()
                tensor.register_post_accumulate_grad_hook(functools.partial(self._add, weight.name))
            found += [(self.stage.find(path), name, tensor) for path, name in weight.places]
        return found

    def _is_trained(self, weight: Weight) -> bool:
        return self.engine.training and weight.parameter and has_gradient(weight.dtype)

    def _add(self, name: str, tensor: Tensor) -> None:
        """Sum in at least float32, as the owner may: each microbatch would round the sum of all before it."""
        assert tensor.grad is not None
        gradient, tensor.grad = tensor.grad.to(torch.promote_types(tensor.dtype, torch.float32)), None
        self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient

    def _trained(self) -> Iterator[tuple[int, Weight, int]]:
        first = self.engine.first_free_tag + len(self.loans)
        return ((tag, *loan) for tag, loan in enumerate(self.loans, first) if self._is_trained(loan[0]))

    def give_back(self) -> None:
        """Begin to send the gradients of what was borrowed."""
        for tag, weight, rank in self._trained():
            if rank == self.stage.rank:
                zeros = Shape(weight.shape, weight.dtype).zeros()
                gradient = self._sums.get(weight.name, zeros).to(weight.dtype).contiguous()
                self.sent.append(self.messages.send(gradient, self.stage.rank_of(weight.stage), tag))

    def take_back(self) -> None:
        """Wait for the gradients of what was lent, and add them as one more backward pass."""
        found: dict[Tensor, Tensor] = {}
        for tag, weight, rank in self._trained():
            if self.stage.owns(weight):
                gradient = self.messages.recv(Shape(weight.shape, weight.dtype).empty(), rank, tag).wait()
                own = self.stage.own(weight.name)
                if own.requires_grad:
                    found[own] = found[own] + gradient if own in found else gradient
        if found:
            torch.autograd.backward(list(found), list(found.values()))
