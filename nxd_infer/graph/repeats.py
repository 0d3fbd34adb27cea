"""Layers that repeat are traced once: a later one is recorded as a call of the first one's operators.

A module whose class (or that itself) has ``nxd_repeats = True`` promises that its forward depends on nothing but the
module and its arguments, and changes nothing but tensors among them. While a model is exported, such a module that is
like an earlier one (:func:`alike`) does not run: one node stands for it, and export takes as long as
for a model of one layer. Afterwards each such node becomes the operators of the first, on the later one's tensors.
"""

from __future__ import annotations

import contextlib
import enum
import io
import itertools
import operator
import pickle  # nosec B403  # nothing is unpickled
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from nxd_infer.comm.ops import EFFECT, LIBRARY
from nxd_infer.graph import passes

LIBRARY.define("repeated(Tensor[] inputs, int body) -> Tensor[]", tags=EFFECT)
REPEATED = torch.ops.nxd.repeated.default
"""Stands for the operators of body number ``body``. Nothing ever runs it."""


_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and the arguments of its forward."""


@dataclass
class _Body:
    """The first layer of a kind: its call, and what it recorded."""

    called: _Call
    tracer: Any
    number: int
    inputs: list[Tensor]
    """The tensors of the call that ``graph`` takes."""
    graph: fx.GraphModule
    """Returns the tensors among the results, then those that ``changed`` have become."""
    results: list[Any]
    """The results, flattened."""
    structure: pytree.TreeSpec
    changed: list[Tensor]
    """Tensors of the call that the tracer knows, after an operator in place, as that operator's result."""

    def again(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Record a call of the graph on the second tensors of ``pairs``, whose first ones the first call had."""
        tensors, tracer = {id(first): second for first, second in pairs}, self.tracer
        inputs = [get_proxy_slot(tensors[id(tensor)], tracer).proxy for tensor in self.inputs]
        with disable_proxy_modes_tracing():
            empty = [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                for like in (*filter(torch.is_tensor, self.results), *self.changed)
            ]
        call = tracer.create_proxy("call_function", REPEATED, (inputs, self.number), {})
        fresh = iter(track_tensor_tree(empty, call, constant=None, tracer=tracer))
        results = [next(fresh) if isinstance(value, Tensor) else value for value in self.results]
        for tensor, now in zip(self.changed, fresh, strict=True):
            set_proxy_slot(tensors[id(tensor)], tracer, get_proxy_slot(now, tracer))
        return pytree.tree_unflatten(results, self.structure)


class Repeats:
    """The repeating layers of one export."""

    def __init__(self) -> None:
        self._bodies: list[_Body] = []

    @contextlib.contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Inside the block, let calls of repeating layers in ``module`` be recorded once."""
        layers = [m for m in module.modules() if getattr(m, "nxd_repeats", False) and "forward" not in vars(m)]
        for layer in layers:
            vars(layer)["forward"] = partial(self._call, layer)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def _call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called: _Call = (layer, args, kwargs)
        mode = None if torch.compiler.is_dynamo_compiling() else get_proxy_mode()
        if mode is None:  # a branch of torch.cond, which Dynamo runs
            return type(layer).forward(layer, *args, **kwargs)
        tracer: Any = mode.tracer
        for body in self._bodies:
            if body.tracer is tracer and type(body.called[0]) is type(layer):
                pairs = alike(body.called, called)
                if pairs is not None:
                    return body.again(pairs)
        own = alike(called, called) or []
        known = {tensor: slot for tensor, _ in own if (slot := get_proxy_slot(tensor, tracer, None)) is not None}
        last = next(iter(reversed(tracer.graph.nodes)))
        result = type(layer).forward(layer, *args, **kwargs)
        if not any(slot.constant is not None for slot in known.values()):  # of which forward can read the value
            self._record(called, {slot.proxy.node: tensor for tensor, slot in known.items()}, result, tracer, last)
        return result

    def _record(self, called: _Call, known: dict[fx.Node, Tensor], result: Any, tracer: Any, last: fx.Node) -> None:
        """Keep what the tracer recorded after ``last``, unless it is more than operators on the ``known`` tensors."""

        def node_of(tensor: Tensor) -> fx.Node | None:
            return get_proxy_slot(tensor, tracer, None, lambda slot: slot.proxy.node)

        nodes = list(itertools.takewhile(lambda node: node is not last, reversed(tracer.graph.nodes)))[::-1]
        own = set(nodes)
        used = {source for node in nodes for source in node.all_input_nodes} - own
        if not used <= known.keys() or not all(_is_operator(node) for node in nodes):
            return
        results, structure = pytree.tree_flatten(result)
        if not all(isinstance(value, (Tensor, bool, int, float, str, type(None))) for value in results):
            return
        returned = [node_of(value) for value in results if isinstance(value, Tensor)]
        memory = [key for node in returned if node is not None and node in own for key in passes.storages(node)]
        taken = {key for node in used for key in passes.storages(node)}
        # Each result has memory of its own, as those of a repeated call have.
        if len(set(memory)) < len(returned) or not taken.isdisjoint(memory):
            return
        changed = [tensor for node, tensor in known.items() if node_of(tensor) is not node]
        graph = fx.Graph()
        values: dict[fx.Node | None, fx.Node] = {}
        inputs = [node for node in known if node in used]
        for node in inputs:
            values[node] = graph.placeholder(node.name)
            values[node].meta["val"] = node.meta["val"]
        for node in nodes:
            values[node] = graph.node_copy(node, lambda n: values[n])
            values[node].meta = {"val": node.meta.get("val")}
        graph.output(tuple(values[node] for node in (*returned, *map(node_of, changed))))
        takes = [known[node] for node in inputs]
        body = passes.Nodes(nn.Module(), graph)
        self._bodies.append(_Body(called, tracer, len(self._bodies), takes, body, results, structure, changed))

    def write_out(self, module: fx.GraphModule) -> None:
        """Replace the calls of bodies in ``module`` and its nested graphs by the bodies' operators."""
        for graph in [child.graph for child in module.modules() if isinstance(child, fx.GraphModule)]:
            while calls := [node for node in graph.nodes if node.target is REPEATED]:
                for node in calls:
                    number: Any = node.args[1]
                    body = self._bodies[number].graph
                    passes.inline(node, body, passes.tensors_of(node.args[0]), _Fresh(body, node))


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    )


class _Fresh:
    """Gives copied nodes fake tensors with memory of their own, shared among them as among the originals'."""

    def __init__(self, body: fx.GraphModule, call: fx.Node):
        self.memory: dict[int, torch.UntypedStorage] = {}
        for place, argument in zip(passes.placeholders(body.graph), passes.tensors_of(call.args[0]), strict=True):
            self.memory[place.meta["val"].untyped_storage()._cdata] = argument.meta["val"].untyped_storage()

    def __call__(self, node: fx.Node) -> None:
        node.meta["val"] = pytree.tree_map_only(Tensor, self._fresh, node.meta["val"])

    def _fresh(self, fake: Any) -> Any:
        old = fake.untyped_storage()
        new = self.memory.get(old._cdata)
        if new is None:
            new = self.memory[old._cdata] = torch.UntypedStorage(old.nbytes(), device="meta")
        own = torch.empty(0, dtype=fake.dtype, device="meta").set_(
            new, fake.storage_offset(), fake.shape, fake.stride()
        )
        return type(fake)(fake.fake_mode, own, fake.device)


# --- likeness -----------------------------------------------------------------------------------------

_ITSELF = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)
"""Alike only if they are one object."""
_SAYS_HOW = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__")
"""Methods by which a class decides what of it is pickled."""
_OF_MODULES = getattr(nn.Module, "__getstate__", None)


def alike(first: Any, second: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors at equal places of two object graphs, each pair once; None if the graphs are not alike.

    Two are alike if a program that reads the first and one that reads the second do the same, except for the values of
    the tensors that they find. They are compared as pickles, in which a tensor is its form, and a class, a module or
    what is written in C is its identity. What cannot be pickled, or says itself how, is unlike.

    Paired tensors have the same class, dtype, shape, strides and device, and share memory with one another in the same
    way. What is one object in one graph is one in the other. A :class:`Repeats` is not read.
    """
    try:
        with torch._C.DisableTorchFunction():  # a tracer's mode would see each look at a tensor
            a, b = (_Description(value) for value in (first, second))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return list(zip(a.tensors, b.tensors, strict=True)) if a.text == b.text else None


class _Description(pickle.Pickler):
    def __init__(self, value: Any):
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.dump(value)
        self.text = file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Say how a value of no simple type is written: ``(_same, what is compared, what is written after it)``."""
        if value is _same:
            return NotImplemented
        if isinstance(value, Repeats):
            return _same, ()
        if isinstance(value, _ITSELF):
            return _same, (id(value),)
        if isinstance(value, types.FunctionType):  # what functions that one ``def`` has made have captured differs
            captured = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = (captured, value.__defaults__, value.__kwdefaults__, vars(value))
            return _same, (id(value.__code__), id(value.__globals__)), parts
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _same, self._form(value), _own_attributes(value)
        own = [getattr(type(value), name, None) for name in _SAYS_HOW]
        if any(isinstance(method, types.FunctionType) and method is not _OF_MODULES for method in own):
            raise pickle.PicklingError(f"{type(value).__name__} may hide what it holds")
        return NotImplemented

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise pickle.PicklingError(f"a tensor of layout {tensor.layout}")
        storage = self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))
        return (
            *(id(type(tensor)), str(tensor.dtype), str(tensor.device), storage, tensor.storage_offset()),
            *(tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg()),
        )


def _same(*_: Any) -> None:
    """Stand for what is written; nothing ever calls it."""


def _own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what programs have set on a tensor; a fake one's class has attributes of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    attributes = vars(tensor)
    if not isinstance(tensor, FakeTensor):
        return attributes
    if not _of_fakes:
        with tensor.fake_mode:
            _of_fakes.update(vars(torch.empty(0)))
        _of_fakes.add("_is_param")
    return {name: value for name, value in attributes.items() if name not in _of_fakes}


_of_fakes: set[str] = set()
"""Names of the attributes that every fake tensor has."""
