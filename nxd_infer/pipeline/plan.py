"""The plan of a pipeline: which calls a forward makes, on which stage, and which values each stage must be handed.

The model's own forward runs once, here, with units that only say what shapes they give. A value *carries a tag* of each
unit's output and each weight that it was computed from; where it is needed (an argument of a unit on a later stage, the
loss) those are what that stage must be handed.

Code between units runs on every stage, on what the stage was handed and on zeros in the place of everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.stand_in import hidden_of
from nxd_infer.pipeline.stage import Stage, calling, own_forward, shadowed
from nxd_infer.util.devices import transport_device

Output = tuple[int, int]
"""Number of a call, and number of the tensor among its results."""
Tag = Output | str
"""An output, or the name of a weight."""

READS = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "is_floating_point", "__len__", "stride", "ndimension"}
)
"""What may be asked of a tensor whose values are elsewhere."""
DECISIONS = frozenset({"__bool__", "item", "tolist", "__int__", "__float__", "__index__"})
"""What makes a Python value of a tensor's."""


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    size: torch.Size
    dtype: torch.dtype

    def zeros(self) -> Tensor:
        """Zeros of this shape that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=transport_device()).expand(self.size)

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=transport_device())


@dataclass(frozen=True)
class Call:
    """One call of a unit in the forward of the whole model."""

    unit: str
    stage: int
    leaves: tuple[Any, ...] = field(compare=False)
    """What it gives, flattened: a Shape for each tensor, and other values as they are."""
    spec: TreeSpec = field(compare=False)

    def result(self, tensors: Mapping[int, Tensor]) -> Any:
        """Return its result with these tensors, and zeros for others."""
        flat = [
            tensors.get(number, leaf.zeros()) if isinstance(leaf, Shape) else leaf
            for number, leaf in enumerate(self.leaves)
        ]
        return tree_unflatten(flat, self.spec)


@dataclass(frozen=True)
class Plan:
    """What every stage does in the forward of one microbatch. Equal on all ranks."""

    calls: tuple[Call, ...]
    handed: tuple[tuple[Output, ...], ...]
    """Of each stage: the outputs that the stage before hands to it, which may be of an earlier one still."""
    lent: tuple[tuple[str, int], ...]
    """(weight, stage) for what a stage needs of another rank."""
    ends: tuple[int, ...]
    """Of each stage but the last: the number of its last call."""
    loss: float = field(compare=False)
    """What the model's loss is where units give zeros."""

    def shape(self, output: Output) -> Shape:
        return self.calls[output[0]].leaves[output[1]]

    def bytes_handed(self, stage: int) -> int:
        shapes = [self.shape(output) for output in self.handed[stage]]
        return sum(shape.size.numel() * shape.dtype.itemsize for shape in shapes)


def make_plan(stage: Stage, call: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> Plan:
    """Return the plan for ``call()``, a forward of the model on one microbatch; ``loss_of`` finds the loss in it.

    Runs nothing but the code between units. Every rank of a tensor-parallel group must call it: that code may
    communicate. Raises ParallelConfigError if a cut is not reached in order, or if a value leaves a unit by another way
    than its result.
    """
    return _Planner(stage).plan(call, loss_of)


class _Planner:
    def __init__(self, stage: Stage):
        self.stage = stage
        self.cuts = stage.units.cuts
        self.now = 0
        self.inside = False
        self.calls: list[Call] = []
        self.ends: list[int] = []
        self.last_needed: dict[Output, int] = {}
        self.lent: set[tuple[str, int]] = set()
        self.tags: Any = WeakTensorKeyDictionary()
        self.sources: dict[int, tuple[Tensor, Tag]] = {}
        """Tensors that begin an autograd graph, by id, and kept alive by this."""

    def plan(self, call: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> Plan:
        forwards = {
            module: functools.partial(self._call, path, hidden_of(module), own_forward(module))
            for path, module in self.stage.unit_modules().items()
        }
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            shadowed(self._weights()),
            calling(forwards),
            _Watch(self),
        ):
            found = loss_of(call())
            self.need(found, self.stage.units.stages - 1)
        if len(self.ends) < len(self.cuts):
            called = [one.unit for one in self.calls]
            missing = self.cuts[len(self.ends)]
            raise ParallelConfigError(
                f"pipeline_cuts: {missing!r} was not called in this order; the model called {', '.join(called[:24])}"
                f"{', ...' if len(called) > 24 else ''}: cut after these, in their order"
            )
        handed = tuple(
            tuple(
                sorted(
                    output for output, last in self.last_needed.items() if self.calls[output[0]].stage < stage <= last
                )
            )
            for stage in range(self.stage.units.stages)
        )
        return Plan(tuple(self.calls), handed, tuple(sorted(self.lent)), tuple(self.ends), float(found.detach()))

    def _weights(self) -> Iterable[tuple[nn.Module, str, Tensor]]:
        """Zeros in the place of all weights, for code between units."""
        for weight in self.stage.weights.values():
            zeros = Shape(weight.shape, weight.dtype).zeros()
            zeros = nn.Parameter(zeros, False) if weight.parameter else zeros
            if weight.dtype.is_floating_point:
                zeros.requires_grad_()
                self.sources[id(zeros)] = (zeros, weight.name)
            self.tags[zeros] = {weight.name}
            for path, name in weight.places:
                yield self.stage.find(path), name, zeros

    def _source(self, tensor: Tensor, tag: Tag) -> Tensor:
        made = tensor.detach().requires_grad_()
        self.sources[id(made)] = (made, tag)
        return made

    def tags_of(self, tensor: Tensor) -> set[Tag]:
        """Return what a tensor was computed from: as seen here, and as autograd has it (custom functions)."""
        found: set[Tag] = set(self.tags.get(tensor, ()))
        if not tensor.requires_grad:
            return found
        if tensor.grad_fn is None:
            return found | {self.sources[id(tensor)][1]} if id(tensor) in self.sources else found
        seen, waiting = set(), [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.sources:
                found.add(self.sources[id(variable)][1])
            waiting += [following for following, _ in node.next_functions]
        return found

    def need(self, values: Any, stage: int) -> None:
        """Note that ``stage`` needs all that ``values`` were computed from."""
        for value in tree_flatten(values)[0]:
            if not isinstance(value, Tensor):
                continue
            for tag in self.tags_of(value):
                if isinstance(tag, str):
                    self._need_weight(tag, stage)
                else:
                    self.last_needed[tag] = max(self.last_needed.get(tag, 0), stage)

    def _need_weight(self, name: str, stage: int) -> None:
        owner = self.stage.rank_of(self.stage.weights[name].stage)
        if self.stage.rank_of(stage) != owner:
            self.lent.add((name, stage))

    def _call(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for the call of a unit."""
        if self.inside:
            return forward(*args, **kwargs)
        self.need((args, kwargs), self.now)
        for name in self._weights_within(path):
            self._need_weight(name, self.now)
        self.inside = True
        try:
            result = shapes_of(module, forward, args, kwargs)
        finally:
            self.inside = False
        flat, spec = tree_flatten(result)
        number = len(self.calls)
        leaves = tuple(Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in flat)
        self.calls.append(Call(path, self.now, leaves, spec))
        tensors: dict[int, Tensor] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Shape):
                zeros = leaf.zeros()
                tensors[place] = self._source(zeros, (number, place)) if leaf.dtype.is_floating_point else zeros
                self.tags[tensors[place]] = {(number, place)}
        if self.now < len(self.cuts) and path == self.cuts[self.now]:
            self.ends.append(number)
            self.now += 1
        return self.calls[-1].result(tensors)

    def _weights_within(self, path: str) -> Iterable[str]:
        for weight in self.stage.weights.values():
            if any(place == path or place.startswith(f"{path}.") for place, _ in weight.places):
                yield weight.name


def shapes_of(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a unit gives, on the meta device; where an operator cannot run there, from zeros."""
    tensors = [
        (child, name, value)
        for child in module.modules()
        for name in dict.fromkeys((*child._parameters, *child._buffers, *child.__dict__))
        if isinstance(value := getattr(child, name, None), Tensor)
    ]
    failure: Exception | None = None
    for like in (_meta_like, _zeros_like):
        made: dict[int, Tensor] = {}
        places = [(child, name, made.setdefault(id(value), like(value))) for child, name, value in tensors]
        try:
            with torch.no_grad(), shadowed(places):
                return forward(*tree_map(like, args), **tree_map(like, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _meta_like(value: Any) -> Any:
    return _as(value, torch.empty_like(value, device="meta")) if isinstance(value, Tensor) else value


def _zeros_like(value: Any) -> Any:
    return _as(value, Shape(value.shape, value.dtype).zeros()) if isinstance(value, Tensor) else value


def _as(value: Tensor, made: Tensor) -> Tensor:
    return nn.Parameter(made, False) if isinstance(value, nn.Parameter) else made


class _Watch(TorchFunctionMode):
    """Follows values through the code between units."""

    def __init__(self, planner: _Planner):
        super().__init__()
        self.planner = planner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        planner = self.planner
        if planner.inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in READS:
            return func(*args, **kwargs)
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if any(value.is_meta for value in given):
            raise ParallelConfigError(
                f"a value leaves a layer by another way than its result, and is used outside of it ({name}): return it "
                "from the layer's forward, or cut the pipeline elsewhere"
            )
        tags = set().union(*(planner.tags.get(value, ()) for value in given)) if given else set()
        if name in DECISIONS and given:
            # Every stage that follows goes the same way only if it knows the value.
            planner.need(given, planner.stage.units.stages - 1)
        result = func(*args, **kwargs)
        if tags:
            for value in tree_flatten(result)[0]:
                if isinstance(value, Tensor):
                    planner.tags[value] = set(planner.tags.get(value, ())) | tags
        return result
