"""The plan of a pipeline: which calls a forward makes, on which stage, and which values each stage must be handed.

The model's own forward runs once, here, with units that only say what shapes they give. A value *carries a tag* of each
unit's output and each weight that it was computed from; where it is needed (an argument of a unit on a later stage, the
loss) those are what that stage must be handed.

Code between units runs on every stage, on what the stage was handed and on zeros in the place of everything else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from nxd_infer.errors import NxdError, ParallelConfigError
from nxd_infer.modules.stand_in import hidden_of, named_modules_of_all
from nxd_infer.pipeline.stage import Stage, calling, own_forward, shadowed
from nxd_infer.util.devices import keeping_generators, transport_device

Like = Callable[[Tensor], Tensor]


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether values of ``dtype`` have gradients."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    size: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(tensor.shape, tensor.dtype)

    def zeros(self) -> Tensor:
        """Zeros of this shape that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=transport_device()).expand(self.size)

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=transport_device())


def run_without_values(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noted: Callable[[Tensor], object],
) -> tuple[Any, list[Tensor]]:
    """Run a unit's ``forward`` on the meta device; where something in it cannot run there, or under autocast, which the
    meta device does not have, on zeros.

    ``noted`` gets each tensor that takes the place of one that the unit is given or has. What the unit puts into its
    attributes, lists and dicts stays there: see :func:`unchanged`.

    Returns what the forward returns, and the tensors that it changes in place, as they were given.
    """
    cast = torch.is_autocast_enabled(transport_device().type)
    for like in (_zeros,) if cast else (_on_meta, _zeros):
        before, taken = _Held(module.modules()), _Places(like, noted)
        try:
            with torch.no_grad():
                taken.of_module(module)
                return forward(*taken.of(args), **taken.of(kwargs)), taken.changed()
        except NxdError:
            raise
        except Exception:
            before.restore()
            if like is _zeros:
                raise
        finally:
            taken.give_back()
    raise AssertionError


class _Places:
    """Puts tensors without values in the place of others; lists and dicts stay the same objects."""

    def __init__(self, like: Like, noted: Callable[[Tensor], object]):
        self._like, self._noted = like, noted
        self._made: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By id: a tensor, what takes its place, and the version of that. So tied weights stay tied."""
        self._filled: list[tuple[Any, Any, Tensor]] = []
        """(list or dict, place in it, tensor that was there)."""

    def of_module(self, module: nn.Module) -> None:
        for child in module.modules():
            for table in (child._parameters, child._buffers, child.__dict__):
                for name, value in list(table.items()):
                    if isinstance(value, Tensor):
                        self._put(table, name, value)

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._instead(value)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if type(value) in (list, dict):
            for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(item, Tensor):
                    self._put(value, place, item)
                else:
                    value[place] = self.of(item)
            return value
        return tree_map(lambda leaf: self._instead(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _put(self, container: Any, place: Any, value: Tensor) -> None:
        self._filled.append((container, place, value))
        container[place] = self._instead(value)

    def _instead(self, value: Tensor) -> Tensor:
        if id(value) not in self._made:
            made = self._like(value)
            self._noted(made)
            self._made[id(value)] = (value, made, made._version)
        return self._made[id(value)][1]

    def changed(self) -> list[Tensor]:
        return [value for value, made, version in self._made.values() if made._version != version]

    def give_back(self) -> None:
        """Put back what is neither replaced nor changed: a later use of what is stays visible as one."""
        changed = {id(value) for value in self.changed()}
        for container, place, value in reversed(self._filled):
            there = place in container if isinstance(container, dict) else place < len(container)
            if there and container[place] is self._instead(value) and id(value) not in changed:
                container[place] = value


def _on_meta(value: Tensor) -> Tensor:
    return _as(value, torch.empty_like(value, device="meta"))


def _zeros(value: Tensor) -> Tensor:
    return _as(value, Shape.of(value).zeros())


def _as(value: Tensor, made: Tensor) -> Tensor:
    return nn.Parameter(made, False) if isinstance(value, nn.Parameter) else made


class _Held:
    """The attributes of modules as they are now, and what is in those that are lists and dicts."""

    def __init__(self, modules: Iterable[nn.Module]):
        containers = [one for module in modules for one in (module.__dict__, *module.__dict__.values())]
        self._before = [(one, one.copy()) for one in containers if type(one) in (dict, list)]

    def restore(self) -> None:
        for container, before in self._before:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)


@contextlib.contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have the attributes after the block that they had before it."""
    before = _Held(modules)
    try:
        yield
    finally:
        before.restore()


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
NOT_IN_PLACE = ("in-place", "written-to tensor")
"""What torch's errors say of a change in place of what the planner puts in the place of results and weights."""


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
    """(weight, rank) for what a rank needs of another one."""
    ends: tuple[int, ...]
    """Of each stage but the last: the number of its last call."""
    loss: float = field(compare=False)
    """What the model's loss is where units give zeros."""

    def shape(self, output: Output) -> Shape:
        return self.calls[output[0]].leaves[output[1]]


def make_plan(stage: Stage, call: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> Plan:
    """Return the plan for ``call()``, a forward of the model on one microbatch; ``loss_of`` finds the loss in it.

    Runs nothing but the code between units. Every rank of a tensor-parallel group must call it: that code may
    communicate. Raises ParallelConfigError if a cut is not reached in order, if a value leaves a unit by another way
    than its result, or if it is changed in place afterwards.
    """
    with unchanged(module for _, module, _ in named_modules_of_all(stage.module)):
        return _Planner(stage).plan(call, loss_of)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a backward pass from ``tensor`` gives a gradient to."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found, seen, waiting = [], set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found


class _Origin(NamedTuple):
    """The unit that runs, or that has computed a value."""

    unit: str
    stage: int


class _Planner:
    def __init__(self, stage: Stage):
        self.stage = stage
        self.cuts = stage.units.cuts
        self.now = 0
        self.inside: _Origin | None = None
        self.within: Any = WeakTensorKeyDictionary()
        """What units compute, up to their results: tensors to their origins."""
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
            keeping_generators(),
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
        """Zeros in the place of all weights, and copies of what contains units, for code between units."""
        for path, _ in self.stage.units.opened:
            holder = self.stage.module.get_submodule(path)
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    yield holder, name, buffer.clone()
        for weight in self.stage.weights.values():
            zeros = Shape(weight.shape, weight.dtype).zeros()
            zeros = nn.Parameter(zeros, False) if weight.parameter else zeros
            if has_gradient(weight.dtype):
                zeros.requires_grad_()
                self.sources[id(zeros)] = (zeros, weight.name)
            self.tags[zeros] = {weight.name}
            for path, name in weight.places:
                yield self.stage.find(path), name, zeros

    def _source(self, tensor: Tensor, tag: Tag) -> Tensor:
        made = tensor.detach().requires_grad_(has_gradient(tensor.dtype))
        self.sources[id(made)] = (made, tag)
        self.tags[made] = {tag}
        return made

    def tags_of(self, tensor: Tensor) -> set[Tag]:
        """Return what a tensor was computed from: as seen here, and as autograd has it (custom functions)."""
        found: set[Tag] = set(self.tags.get(tensor, ()))
        return found | {self.sources[id(leaf)][1] for leaf in leaves_of(tensor) if id(leaf) in self.sources}

    def need(self, values: Any, stage: int) -> None:
        """Note that ``stage`` needs all that ``values`` were computed from."""
        for value in tree_flatten(values)[0]:
            if not isinstance(value, Tensor):
                continue
            self.require_result(value)
            for tag in self.tags_of(value):
                if isinstance(tag, str):
                    self._need_weight(tag, stage)
                else:
                    self.last_needed[tag] = max(self.last_needed.get(tag, 0), stage)

    def _need_weight(self, name: str, stage: int) -> None:
        rank = self.stage.rank_of(stage)
        if rank != self.stage.rank_of(self.stage.weights[name].stage):
            self.lent.add((name, rank))

    def require_result(self, value: Tensor, used_by: str = "") -> None:
        """Raise ParallelConfigError if a unit has computed ``value``, and another stage or no unit uses it."""
        origin: _Origin | None = self.within.get(value)
        if origin is None and (self.inside or not value.is_meta):
            return
        if origin and self.inside and origin.stage == self.inside.stage:
            return
        whose = f"the layer {origin.unit!r}" if origin else "a layer"
        where = f"in {self.inside.unit!r}, on another stage" if self.inside else "outside of it"
        how = f" ({used_by})" if used_by else ""
        raise ParallelConfigError(
            f"a value leaves {whose} by another way than its result, and is used {where}{how}: return it from the "
            "layer's forward, as a tensor or in a tuple, list or dict, or cut the pipeline elsewhere"
        )

    def _call(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for the call of a unit."""
        if self.inside:
            return forward(*args, **kwargs)
        self.inside = here = _Origin(path, self.now)
        try:
            self.need((args, kwargs), self.now)
            for weight in self.stage.weights.values():
                if any(f"{place}.".startswith(f"{path}.") for place, _ in weight.places):
                    self._need_weight(weight.name, self.now)
            result, changed = run_without_values(
                module, forward, args, kwargs, lambda tensor: self.within.__setitem__(tensor, here)
            )
            flat, spec = tree_flatten(result)
            for leaf in flat:
                if isinstance(leaf, Tensor) and leaf in self.within:
                    self.require_result(leaf)
        finally:
            self.inside = None
        self._require_unchanged(path, changed)
        number = len(self.calls)
        leaves = tuple(Shape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat)
        self.calls.append(Call(path, self.now, leaves, spec))
        tensors = {
            place: self._source(leaf.zeros(), (number, place))
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Shape)
        }
        if self.now < len(self.cuts) and path == self.cuts[self.now]:
            self.ends.append(number)
            self.now += 1
        return self.calls[-1].result(tensors)

    def _require_unchanged(self, path: str, changed: Iterable[Tensor]) -> None:
        """Check that a unit changes no result of another stage, which autograd has as the beginning of a graph."""
        for value in changed:
            _, tag = self.sources.get(id(value), (value, ""))
            if isinstance(tag, tuple) and self.calls[tag[0]].stage < self.now:
                unit = self.calls[tag[0]].unit
                raise ParallelConfigError(
                    f"{path!r} changes in place what it is given, the result of {unit!r} on another stage: use an "
                    "operation that makes a new tensor"
                )


class _Watch(TorchFunctionMode):
    """Follows values through the code between units."""

    def __init__(self, planner: _Planner):
        super().__init__()
        self.planner = planner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        planner, name = self.planner, getattr(func, "__name__", "")
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if name not in READS:
            for value in given:
                if planner.inside is None or value in planner.within:
                    planner.require_result(value, name)
        tags = set().union(*(planner.tags.get(value, ()) for value in given)) if given else set()
        if planner.inside is not None:
            if tags:  # by another way than the unit's arguments
                planner.need(given, planner.now)
            result = func(*args, **kwargs)
            if any(value in planner.within for value in given):
                for value in tree_flatten(result)[0]:
                    if isinstance(value, Tensor):
                        planner.within[value] = planner.inside
            return result
        if name in DECISIONS and given:
            # Every stage that follows goes the same way only if it knows the value.
            planner.need(given, planner.stage.units.stages - 1)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if tags and any(text in str(error) for text in NOT_IN_PLACE):
                raise ParallelConfigError(
                    f"the code between the layers changes a layer's result or a weight in place ({name}), which every "
                    "stage would do again: use an operation that makes a new tensor"
                ) from error
            raise
        for value in tree_flatten(result)[0] if tags else ():
            if isinstance(value, Tensor):
                planner.tags[value] = set(planner.tags.get(value, ())) | tags
        return result
