"""Runs one rank's passes of a step in the order of its schedule, and moves values between the ranks meanwhile.

Messages between two stages have a tag of their own, so they are received ahead of their use and in any order. A weight
that another rank needs is lent to it: sent before its first pass, and its gradient comes back into the owner's last
backward pass. So a tied weight is one parameter of one rank.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Step:
    """What a step is made of."""

    plan: Plan
    all_actions: Sequence[Sequence[Action]]
    """Of every rank."""
    calls: Sequence[Callable[[], Any]]
    """For each microbatch: the forward of the model on it."""
    loss_of: Callable[[Any], Tensor]
    weights: Sequence[float]
    """Of each microbatch's loss."""
    seed: int | None


class Engine:
    """One step on one rank. ``run`` returns this rank's losses by microbatch: none but on the last stage."""

    def __init__(self, stage: Stage, context: ParallelContext, step: Step):
        self.stage, self.context, self.step, self.plan = stage, context, step, step.plan
        self.spans: list[Span] = []
        """When each pass ran, in seconds of ``time.perf_counter``."""
        self.losses: dict[int, Tensor] = {}
        self.actions = step.all_actions[stage.rank]
        self.training = any(action.backward for action in self.actions)
        self.messages = messages_for(context, step.all_actions, stage.units.stages)
        self._forward = Forward(step.plan)
        self._forward.seed = step.seed
        self._weights = DeferredWeights()
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
        for held in (self._late, self._passes, self._coming, self._here, self._sent):
            held.clear()
        self._loans.drop()

    def run(self) -> dict[int, Tensor]:
        modules = {path: (module, own_forward(module)) for path, module in self.stage.unit_modules().items()}
        self._loans.send()
        for action in self.actions[: LOOKAHEAD + 1]:
            self._receive(action)
        self.messages.before(0)
        in_parts = any(action.late for action in self.actions)
        linears = self._weights.linears() if in_parts else contextlib.nullcontext()
        streams = get_xla_rng_tracker().reseeded() if self.step.seed is not None else contextlib.nullcontext()
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
                    self._weights.late = self._late[action.stage, action.microbatch] = []
                    self._run_backward(action, values, last=number == len(self.actions) - 1)
                else:
                    self._run_forward(action, values)
                self.spans.append(Span(action, start, time.perf_counter()))
                self._loans.give_back(number)
        self.messages.before(len(self.actions))
        self._loans.take_rest()
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
        self._forward.run(at, self.step.calls[action.microbatch], self.step.loss_of)
        if at.loss is not None:
            self.losses[action.microbatch] = at.loss.detach()
        if action.stage < self._last:
            self._send(Action(action.stage + 1, action.microbatch), at.handed_on(self.plan))
        if self.training:
            self._passes[action.stage, action.microbatch] = at

    def _run_backward(self, action: Action, gradients: dict[Output, Tensor], last: bool) -> None:
        at = self._passes.pop((action.stage, action.microbatch))
        weight = self.step.weights[action.microbatch] if at.loss is not None else None
        more = self._loans.returned(action.stage) if last else {}
        found = run_backward(at, weight, gradients, more)
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
        count = len(self.step.calls)
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
        users: dict[tuple[str, int], list[int]] = {}
        for name, stage in engine.plan.lent:
            users.setdefault((name, self.stage.rank_of(stage)), []).append(stage)
        self.users = users
        self.weights = [self.stage.weights[name] for name, _ in users]
        self.borrowed: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        """Gradients of what is borrowed, over the microbatches."""
        self.sent: list[Pending] = []
        self._coming: dict[tuple[str, int], Pending] = {}
        self._taken: set[tuple[str, int]] = set()
        actions = engine.actions
        self._last_use = {
            name: max(number for number, action in enumerate(actions) if action.stage in stages)
            for (name, rank), stages in users.items()
            if rank == self.stage.rank
        }

    def send(self) -> None:
        """Begin to send what this rank lends, and to receive what it borrows."""
        for number, ((name, rank), weight) in enumerate(zip(self.users, self.weights, strict=True)):
            tag = self.engine.first_free_tag + number
            if rank == self.stage.rank:
                made = Shape(weight.shape, weight.dtype).empty()
                self._coming[name, rank] = self.messages.recv(made, self._owner(weight), tag)
            elif self.stage.owns(weight):
                tensor = self.stage.own(name).detach().contiguous()
                self.sent.append(self.messages.send(tensor, rank, tag))

    def drop(self) -> None:
        self.sent.clear()
        self._coming.clear()

    def places(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Wait for what is borrowed; return where it is put, and zeros for all other weights of other ranks."""
        found: list[tuple[nn.Module, str, Tensor]] = []
        for weight in self.stage.foreign():
            coming = self._coming.pop((weight.name, self.stage.rank), None)
            tensor = Shape(weight.shape, weight.dtype).zeros() if coming is None else coming.wait()
            tensor = nn.Parameter(tensor, False) if weight.parameter else tensor
            if coming is not None:
                tensor.requires_grad_(self.engine.training and has_gradient(weight.dtype) and weight.parameter)
                if tensor.requires_grad:
                    tensor.register_post_accumulate_grad_hook(functools.partial(self._add, weight.name))
                self.borrowed[weight.name] = tensor
            found += [(self.stage.find(path), name, tensor) for path, name in weight.places]
        return found

    def _add(self, name: str, tensor: Tensor) -> None:
        """Sum in at least float32, as the owner may: each microbatch would round the sum of all before it."""
        assert tensor.grad is not None
        gradient, tensor.grad = tensor.grad.to(torch.promote_types(tensor.dtype, torch.float32)), None
        self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient

    def _tag_back(self, name: str, rank: int) -> int:
        return self.engine.first_free_tag + len(self.users) + list(self.users).index((name, rank))

    def give_back(self, number: int) -> None:
        """After pass ``number`` of this rank: begin to send the gradients of what is not needed any more."""
        for name, tensor in self.borrowed.items():
            if tensor.requires_grad and self._last_use[name] == number:
                gradient = self._sums[name].to(tensor.dtype) if name in self._sums else torch.zeros_like(tensor)
                owner = self._owner(self.stage.weights[name])
                tag = self._tag_back(name, self.stage.rank)
                self.sent.append(self.messages.send(gradient.contiguous(), owner, tag))

    def returned(self, stage: int) -> dict[Tensor, Tensor]:
        """Wait for the gradients that come back before the owner's last pass, which is one of ``stage``, ends."""
        return self._take(lambda weight, users: weight.stage == stage and min(users) > stage)

    def take_rest(self) -> None:
        """Wait for the gradients of all other weights, and add them."""
        rest = self._take(lambda weight, users: True) if self.engine.training else {}
        if rest:
            torch.autograd.backward(list(rest), list(rest.values()))

    def _take(self, wanted: Callable[[Weight, list[int]], bool]) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for (name, rank), stages in list(self.users.items()):
            weight = self.stage.weights[name]
            trained = weight.parameter and has_gradient(weight.dtype)
            if not trained or not self.stage.owns(weight) or (name, rank) in self._taken or not wanted(weight, stages):
                continue
            self._taken.add((name, rank))
            made = Shape(weight.shape, weight.dtype).empty()
            gradient = self.messages.recv(made, rank, self._tag_back(name, rank)).wait()
            own = self.stage.own(name)
            if own.requires_grad:
                found[own] = found[own] + gradient if own in found else gradient
        return found

    def _owner(self, weight: Weight) -> int:
        return self.stage.rank_of(weight.stage)
