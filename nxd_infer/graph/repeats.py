"""Layers that repeat are traced once: a later one is recorded as a call of the first one's operators.

A module whose class (or that itself) has ``nxd_repeats = True`` promises that its forward depends on nothing but the
module and its arguments, and changes nothing but tensors among them. While a model is exported, such a module that is
like an earlier one (:mod:`nxd_infer.graph.likeness`) does not run: one node stands for it, and export takes as long as
for a model of one layer. Afterwards each such node becomes the operators of the first, on the later one's tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
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
from nxd_infer.graph.likeness import alike

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
            made = [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                for like in (*filter(torch.is_tensor, self.results), *self.changed)
            ]
        call = tracer.create_proxy("call_function", REPEATED, (inputs, self.number), {})
        fresh = iter(track_tensor_tree(made, call, constant=None, tracer=tracer))
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
                pairs = alike(body.called, called, _FREE)
                if pairs is not None:
                    return body.again(pairs)
        own = alike(called, called, _FREE) or []
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


_FREE = (Repeats,)


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
