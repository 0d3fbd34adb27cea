"""Export one rank's module for one bucket: ``(states, inputs, weights) -> outputs``, states changed in place.

Every state becomes an input under its qualified name; each aliased output is copied into its state and dropped.
Anything else that the module changes while it runs is found in the graph: a registered buffer or parameter becomes a
state, a plain tensor attribute is rejected by name.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import math
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from nxd_infer.artifact.structure import PLAIN
from nxd_infer.errors import NxdError, TraceConfigError, TraceError
from nxd_infer.graph import passes
from nxd_infer.graph.repeats import Repeats
from nxd_infer.graph.returned import DROPPED, form_of, key_text, leaves_of
from nxd_infer.layout.sources import named_tensors

log = logging.getLogger(__name__)

_PREFIX = "module."


@dataclass
class Step:
    """What to export: a module, named example inputs in order, and the states that stay with the rank."""

    module: nn.Module
    inputs: dict[str, Tensor]
    keyword: bool = False
    """Whether forward takes the inputs by name."""
    states: list[str] = field(default_factory=list)
    """Qualified names of buffers and parameters that are changed in place."""
    aliases: dict[int, str] = field(default_factory=dict)
    """Index of an output (flattened) -> the state it becomes."""
    views: Any = None
    """``views(list of state tensors) -> list of tensors the module sees``; None if it sees the states themselves."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """States whose tensor does not belong to the module (a shared state buffer), by name."""
    overlaps: dict[str, str] | None = None
    """``names.shared_memory`` of the module as returned by ``func``; None: computed when needed."""


@dataclass
class Exported:
    """A flat graph, and the origin of its placeholders."""

    module: fx.GraphModule
    states: list[str]
    inputs: list[str]
    weights: list[str]
    constants: dict[str, Tensor]
    """Values of weights that are neither parameters nor buffers, by name."""
    outputs: list[str]
    structure: Any
    """The form of what the module returns, see ``nxd_infer.artifact.structure``."""


# --- the wrapper that is exported ---------------------------------------------------------------------


@dataclass
class _Seen:
    """What the wrapper records while it runs. A separate object, because export undoes assignments to the module."""

    outputs: list[str] = field(default_factory=list)
    structure: Any = None
    reassigned: list[str] = field(default_factory=list)
    drew: bool = False
    """Numbers of Python's or NumPy's generator."""


class _Traced(nn.Module):
    """Calls the user's module on lifted states; flattens its outputs and copies the aliased ones into their states."""

    def __init__(self, step: Step, clone_inputs: set[str]):
        super().__init__()
        self.module = step.module
        self.step = step
        self.clone_inputs = clone_inputs
        self.seen = _Seen()
        self.repeats: Repeats | None = Repeats()
        """None: every layer is traced."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        step = self.step
        count = len(step.states)
        states = dict(zip(step.states, tensors[:count], strict=True))
        values = [
            value.clone() if name in self.clone_inputs else value
            for name, value in zip(step.inputs, tensors[count:], strict=True)
        ]
        seen = states
        if step.views is not None:
            seen = dict(zip(step.states, step.views(list(states.values())), strict=True))
        # Not self.module, which is the tracer's stand-in if a module has several names.
        repeats = contextlib.nullcontext() if self.repeats is None else self.repeats.watched(step.module)
        with _swapped(self.module, seen) as changed, repeats:
            args, kwargs = _call_arguments(step, values)
            before = _drawn()
            result = self.module(*args, **kwargs)
            self.seen.drew = before != _drawn()
        self.seen.reassigned = [name for name in changed if name not in seen]
        stores = [
            (seen[name], value, f"the state {name!r} was assigned") for name, value in changed.items() if name in seen
        ]
        return self._outputs(result, seen, stores)

    def _outputs(
        self, result: Any, states: dict[str, Tensor], stores: list[tuple[Tensor, Any, str]]
    ) -> tuple[Tensor, ...]:
        """Return the remaining outputs, after ``stores`` (state, its next value, text) and the aliased outputs.

        The model has seen the states' old values throughout. So what shares memory with a state that is about to be
        overwritten is copied first: an output that is the old value, or two states that are swapped.
        """
        leaves = leaves_of(result)
        aliases = self.step.aliases
        bad = [index for index in aliases if not 0 <= index < len(leaves)]
        if bad:
            raise TraceConfigError(
                f"input_output_aliases names output {bad[0]}, but the model returned {len(leaves)} outputs"
            )
        forms: list[Any] = []
        kept: list[Tensor] = []
        names: list[str] = []
        for index, (label, leaf) in enumerate(leaves):
            if index in aliases:
                state = states[aliases[index]]
                if not isinstance(leaf, Tensor):
                    raise TraceConfigError(f"output {index} becomes a state but is {type(leaf).__name__}")
                stores.append((state, leaf, f"output {index} becomes the state {aliases[index]!r}"))
                forms.append(DROPPED)
            elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                what = f"{label!r}, which the model returns," if label else f"output {index} of the model"
                raise TraceError(f"{what} is a number read from a tensor (.item(), .tolist()): return the tensor")
            elif isinstance(leaf, Tensor):
                if leaf.layout != torch.strided:
                    raise TraceError(
                        f"output {index} of the model has the layout {leaf.layout}, which no artifact holds: return a "
                        "dense tensor"
                    )
                forms.append(label if label and label not in names else f"output_{len(kept)}")
                names.append(forms[-1])
                kept.append(leaf)
            elif isinstance(leaf, PLAIN):
                is_text = isinstance(leaf, float) and not math.isfinite(leaf)
                forms.append({"number": str(leaf)} if is_text else {"value": leaf})
            else:
                log.warning(
                    "the model returns a %s%s, which no artifact can hold: a traced model returns None in its place",
                    type(leaf).__name__,
                    f" as {label!r}" if label else "",
                )
                forms.append({"value": None})
        self.seen.outputs = names
        form = form_of(result, forms)
        self.seen.structure = None if form is DROPPED else form
        if not kept and not states:
            raise TraceError("the model returned no tensor and keeps no state: there is nothing to run")
        stores = [(state, value, what) for state, value, what in stores if value is not state]
        for state, value, what in stores:
            if value.shape != state.shape or value.dtype != state.dtype:
                raise TraceConfigError(
                    f"{what}, but is {value.dtype}{list(value.shape)} where the state is "
                    f"{state.dtype}{list(state.shape)}"
                )
        overwritten = {_memory(state) for state, _, _ in stores}
        kept = [leaf.clone() if _memory(leaf) in overwritten else leaf for leaf in kept]
        values = [value.clone() if _memory(value) in overwritten else value for _, value, _ in stores]
        for (state, _, _), value in zip(stores, values, strict=True):
            state.copy_(value)
        return tuple(kept)


def _drawn() -> tuple[Any, ...]:
    """Return what changes when numbers are drawn from Python's or NumPy's generator."""
    return random.getstate(), repr(np.random.get_state())


def _shown(program: torch.export.ExportedProgram) -> tuple[str, str]:
    """Return what two exports have in common if they compute the same."""
    return program.graph_module.code, repr(program.constants)


def _memory(tensor: Tensor) -> int:
    """Return a key that is equal for views of the same memory, also for fake tensors."""
    return tensor.untyped_storage()._cdata


def _call_arguments(step: Step, values: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Rebuild forward's arguments, including nested ones, from the flat named values."""
    tree: dict[str, Any] = {}
    for name, value in zip(step.inputs, values, strict=True):
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value

    def build(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        built = {key: build(value) for key, value in node.items()}
        return tuple(built.values()) if all(key.isdigit() for key in built) else built

    arguments = {name: build(value) for name, value in tree.items()}
    return ([], arguments) if step.keyword else (list(arguments.values()), {})


# --- substituted tensors ------------------------------------------------------------------------------


_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of parameters, buffers and hooks."""


@contextlib.contextmanager
def _swapped(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Replace the module's own tensors (under every name they have) by ``tensors`` inside the block.

    Yields a dictionary that holds, afterwards, what the module assigned to its buffers and parameters. A tensor that
    it keeps anywhere else (an attribute, a list) would be lost between calls and is an error that names it. A Python
    number that it changes causes a warning, because a graph keeps the value it was traced with.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    slots: dict[int, list[tuple[nn.Module, str, str]]] = {}
    names: dict[str, int] = {}
    empty: list[tuple[dict[str, Any], str, str]] = []
    for path, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            saved.append((table, dict(table)))
            for name, value in table.items():
                qualified = _join(path, name)
                if value is None:
                    empty.append((table, name, qualified))
                    continue
                slots.setdefault(id(value), []).append((child, name, qualified))
                names[qualified] = id(value)
    attributes = _attributes(module)
    for path, child in module.named_modules(remove_duplicate=False):  # a module may have several names
        for name in (*child._parameters, *child._buffers):
            value = child._parameters.get(name, child._buffers.get(name))
            if value is not None:
                names.setdefault(_join(path, name), id(value))
    expected: list[tuple[nn.Module, str, str, Tensor]] = []
    replaced: dict[int, tuple[str, Tensor]] = {names[name]: (name, tensor) for name, tensor in tensors.items()}
    for key, places in slots.items():
        for child, name, qualified in places:
            if key in replaced:
                # As a buffer, because a module rejects a plain tensor under the name of a parameter.
                child._parameters.pop(name, None)
                child._buffers[name] = replaced[key][1]
                expected.append((child, name, *replaced[key]))
            else:
                expected.append((child, name, qualified, getattr(child, name)))
    changed: dict[str, Tensor] = {}
    try:
        yield changed
        _refuse_untied(slots)
        for child, name, qualified, value in expected:
            now = getattr(child, name, None)
            if now is not value and isinstance(now, Tensor):
                changed[qualified] = now
        filled = [qualified for table, name, qualified in empty if table.get(name) is not None]
    finally:
        for table, values in saved:
            table.clear()
            table.update(values)
    if filled:
        raise TraceError(
            f"the model assigns {filled[0]!r} while it runs, which is None before: a state has one shape from the "
            "start; register it with its first value (zeros, say)"
        )
    _compare(attributes, _attributes(module), {*slots, *(id(value) for _, _, _, value in expected)})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_untied(slots: Mapping[int, list[tuple[nn.Module, str, str]]]) -> None:
    """Raise for an assignment to one of several names of a tensor: one tensor is one state, and this would untie it."""
    for places in slots.values():
        now = {id(getattr(child, name, None)) for child, name, _ in places}
        if len(now) > 1:
            raise TraceError(
                f"the model assigns to one of {', '.join(repr(q) for _, _, q in places)} while it runs, which are one "
                "tensor: change it in place, or register a tensor of its own for each name"
            )


def _attributes(module: nn.Module) -> dict[str, tuple[nn.Module, str, Any, list[Tensor]]]:
    """Return what modules hold besides parameters and buffers: by qualified name, with the tensors in it."""
    return {
        _join(path, name): (child, name, value, _tensors_in(value))
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in _OWN
    }


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple, dict, collections.deque)) and value:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], own: set[int]) -> None:
    """Reject a tensor that was stored in an attribute, and warn about a changed number.

    An attribute may list the module's ``own`` tensors anew: a recurrent layer does (``nn.LSTM``) if they were replaced.
    """
    for qualified, (child, name, value, held) in after.items():
        old = before.get(qualified, (child, name, None, []))
        if value is not old[2] and len(held) == len(old[3]) > 0 and all(id(tensor) in own for tensor in held):
            object.__setattr__(child, name, old[2])
            continue
        known = {id(tensor) for tensor in old[3]}
        if any(id(tensor) not in known for tensor in held):
            if qualified in before:
                object.__setattr__(child, name, old[2])
            else:
                object.__delattr__(child, name)
            raise TraceError(_not_registered(qualified))
        if isinstance(value, (bool, int, float)) and isinstance(old[2], (bool, int, float)) and value != old[2]:
            log.warning(
                "the model changes %r from %r to %r while it runs; a traced model keeps the value it was traced with "
                "(make it a buffer if it is to be counted)",
                qualified,
                old[2],
                value,
            )


def _not_registered(name: str) -> str:
    return (
        f"the model keeps a tensor in {name!r} while it runs, which is neither a buffer nor a parameter: register it "
        f"as a buffer (register_buffer({name.rpartition('.')[2]!r}, ...)), so that it is kept between calls"
    )


# --- export -------------------------------------------------------------------------------------------


def export(step: Step) -> Exported:
    """Export ``step``; adds to ``step.states`` the buffers and parameters that the graph changes.

    Raises TraceError with torch's reason if the module cannot be exported.
    """
    clone_inputs: set[str] = set()
    for name in step.aliases.values():
        if name not in step.states:
            step.states.append(name)
    for _ in range(4):
        wrapper = _Traced(step, clone_inputs)
        program = _run_export(wrapper, step)
        exported = _flat_graph(program, wrapper, step)
        new_states, new_clones = _undeclared(exported)
        new_states = [*wrapper.seen.reassigned, *(n for n in new_states if n not in wrapper.seen.reassigned)]
        if not new_states and new_clones <= clone_inputs:
            return exported
        for name in new_states:
            step.states.append(name)
        clone_inputs |= new_clones
    raise TraceError("the model changes other tensors each time it is exported; its forward must not depend on calls")


def _run_export(wrapper: _Traced, step: Step) -> torch.export.ExportedProgram:
    own = named_tensors(step.module)
    _refuse_overlap(step, own)
    # Uninitialised memory of the right form: export never reads a value, and a view would bring its base along.
    states = [
        torch.empty_like(step.shared.get(name, own[name]), memory_format=torch.contiguous_format, requires_grad=False)
        for name in step.states
    ]
    args = tuple(states) + tuple(step.inputs.values())
    try:
        with torch.no_grad(), _no_stack_traces():
            program = torch.export.export(wrapper, args, strict=False)
            if wrapper.seen.drew and _shown(program) != _shown(torch.export.export(wrapper, args, strict=False)):
                raise TraceError(
                    f"{type(step.module).__name__} computes with random numbers of Python's or NumPy's generator, "
                    "which every call of the graph would repeat: take them as an input, or draw them by torch"
                )
            _require_known_sizes(program, wrapper, args)
            if not any(node.target is torch.ops.higher_order.flat_apply for node in program.graph.nodes):
                return program
            # Decompositions put the called Python function's operators in, and must see those of all layers.
            wrapper.repeats = None
            program = torch.export.export(wrapper, args, strict=False).run_decompositions({})
            if any("MUTATION" in spec.kind.name for spec in program.graph_signature.output_specs):
                raise TraceError(
                    f"{type(step.module).__name__} changes a state or an input, and calls a Python function that "
                    "torch.export keeps as one (such as one made for an attention mask): do one of them outside of it"
                )
            return program
    except NxdError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise TraceError(
            f"{type(step.module).__name__} decides by values that only a call knows (an `if`, a loop, an assert, a "
            f"size){_place_of(error)}: {VALUES_DECIDE}"
        ) from error
    except Exception as error:
        what = str(error).strip().partition("\n\n")[0]
        raise TraceError(
            f"{type(step.module).__name__} cannot be exported{_place_of(error)}: {type(error).__name__}: {what}"
        ) from error


VALUES_DECIDE = (
    "a traced graph computes the same operators on the same shapes for all values. Select by torch.where or a mask, "
    "return a tensor of full size, or do this outside the model"
)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _place_of(error: BaseException) -> str:
    """Return where the user's code was when ``error`` was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f", at {frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""


def _is_users(filename: str) -> bool:
    return not filename.startswith(("<", *_NOT_THE_USERS))


def _require_known_sizes(program: torch.export.ExportedProgram, wrapper: _Traced, args: tuple[Tensor, ...]) -> None:
    """Raise TraceError if the shape of an output depends on values."""
    outputs = [node for node in passes.output_of(program.graph).args[0] if isinstance(node, fx.Node)]
    odd = next((n for n, node in enumerate(outputs) if _depends_on_values(node)), None)
    if odd is None:
        return
    config: Any = getattr(torch.fx, "config", None)
    if config is not None and hasattr(config, "do_not_emit_stack_traces"):  # once more, to know where
        config.do_not_emit_stack_traces = False
    again = torch.export.export(wrapper, args, strict=False)
    first = next(node for node in again.graph.nodes if _depends_on_values(node))
    lines = [line.strip() for line in (first.meta.get("stack_trace") or "").splitlines()]
    places = [n for n, line in enumerate(lines) if line.startswith("File") and _is_users(line.split('"')[1])]
    where = ""
    if places:
        _, file, rest = lines[places[-1]].split('"')
        code = lines[places[-1] + 1] if len(lines) > places[-1] + 1 else ""
        where = f", at {file}:{rest.split()[2].rstrip(',')}: `{code}`"
    raise TraceError(
        f"the shape of {wrapper.seen.outputs[odd]!r}, which {type(wrapper.step.module).__name__} returns, depends on "
        f"values that only a call knows ({first.target}){where}: {VALUES_DECIDE}"
    )


def _depends_on_values(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape)


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Keep the tracer from looking up where in Python each node was made, which nobody reads (since torch 2.13)."""
    config: Any = getattr(torch.fx, "config", None)
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _refuse_overlap(step: Step, own: dict[str, Tensor]) -> None:
    """Reject states that share memory: when a state has been lifted, a view of it would no longer follow."""
    tensors: dict[int, str] = {}
    for name in step.states:
        if id(own[name]) in tensors:
            raise TraceConfigError(f"the states {tensors[id(own[name])]!r} and {name!r} are one tensor; name it once")
        tensors[id(own[name])] = name
    if step.overlaps is None:
        step.overlaps = shared_memory(step.module)
    for name in step.states:
        if name in step.overlaps:
            raise TraceConfigError(
                f"the state {name!r} shares memory with {step.overlaps[name]!r}: give each a tensor of its own, or "
                f"slice {name!r} inside forward"
            )


def _flat_graph(program: torch.export.ExportedProgram, wrapper: _Traced, step: Step) -> Exported:
    """Reorder the placeholders to states, inputs, then the used weights; flatten nested graphs; drop what has no
    effect."""
    from torch.export.graph_signature import InputKind

    module = program.graph_module
    if wrapper.repeats is not None:
        wrapper.repeats.write_out(module)
    passes.flatten_nested(module)
    passes.simplify(module)
    passes.eliminate_dead_code(module)
    user: list[fx.Node] = []
    weights: list[tuple[str, fx.Node]] = []
    constants: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    own = {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(step.module).items()}
    for node, spec in zip(passes.placeholders(module.graph), program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            user.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            if node.users:
                name = (spec.target or "").removeprefix(_PREFIX)
                name = own.get(name, name)  # use a tied tensor's first name
                known = next((other for other_name, other in weights if other_name == name), None)
                if known is None:
                    weights.append((name, node))
                else:
                    node.replace_all_uses_with(known)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            if node.users:
                name = "constant:" + (spec.target or "").removeprefix(_PREFIX)
                weights.append((name, node))
                value = program.constants[spec.target or ""]
                if not isinstance(value, Tensor):
                    raise TraceError(f"the model holds {spec.target!r}, a {type(value).__name__} that cannot be traced")
                constants[name] = value
        else:
            raise TraceError(f"the model holds {spec.target!r} of a kind that cannot be traced ({spec.kind.name})")
    graph = module.graph
    taken = [*user, *(node for _, node in weights)]
    for node in set(passes.placeholders(graph)).difference(taken):
        graph.erase_node(node)
    start = next(node for node in graph.nodes if node.op != "placeholder")
    for node in taken:
        start.prepend(node)
    for node in graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    output = passes.output_of(graph)
    output.args = (tuple(output.args[0]),)
    return Exported(
        module=passes.Nodes(module, graph),
        states=list(step.states),
        inputs=list(step.inputs),
        weights=[name for name, _ in weights],
        constants=constants,
        outputs=list(wrapper.seen.outputs),
        structure=wrapper.seen.structure,
    )


def _undeclared(exported: Exported) -> tuple[list[str], set[str]]:
    """Return buffers and parameters that are written without being states, and inputs that are written."""
    placeholders = passes.placeholders(exported.module.graph)
    names = [*exported.states, *exported.inputs, *exported.weights]
    written = passes.mutated_placeholders(exported.module.graph)
    first_input, first_weight = len(exported.states), len(exported.states) + len(exported.inputs)
    states: list[str] = []
    clones: set[str] = set()
    for place, (node, name) in enumerate(zip(placeholders, names, strict=True)):
        if node not in written or place < first_input:
            continue
        if place < first_weight:
            clones.add(name)
        elif name in exported.constants:
            raise TraceError(_not_registered(name.removeprefix("constant:")))
        else:
            states.append(name)
    return states, clones


# --- names --------------------------------------------------------------------------------------------


def named_inputs(module: nn.Module, example: Any, where: str = "example_inputs") -> tuple[dict[str, Tensor], bool]:
    """Return ``example`` as named contiguous tensors in order, and whether they are passed by keyword.

    A tensor, a tuple or list of tensors (positional), or a dictionary (by name). Nested lists are flattened, their
    entries named like ``past.0``. Raises TraceConfigError naming a value that is not a tensor or has no parameter.
    """
    module = _innermost(module)
    parameters = inspect.signature(module.forward).parameters
    kinds = inspect.Parameter
    if isinstance(example, Mapping):
        anything = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        unknown = [] if anything else [name for name in example if name not in parameters]
        if unknown:
            raise TraceConfigError(
                f"{where} names {', '.join(map(repr, unknown))}, but {type(module).__name__}.forward takes "
                f"{', '.join(parameters)}"
            )
        pairs = list(example.items())
    else:
        values = [example] if isinstance(example, Tensor) else list(example)
        positional = [
            p.name for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        star = next((p.name for p in parameters.values() if p.kind is kinds.VAR_POSITIONAL), None)
        if len(values) > len(positional) and star is None:
            raise TraceConfigError(
                f"{where} holds {len(values)} inputs, but {type(module).__name__}.forward takes {len(positional)} "
                f"({', '.join(positional)})"
            )
        names = positional + [f"{star}_{i}" for i in range(len(values) - len(positional))]
        pairs = list(zip(names, values, strict=False))
    flat: dict[str, Tensor] = {}
    for name, value in pairs:
        leaves = pytree.tree_flatten_with_path(value)[0]
        if not leaves:
            raise TraceConfigError(
                f"{where}: {name!r} is an empty {type(value).__name__}; only tensors are inputs of a traced model: "
                "give the inputs by name and leave it out"
            )
        for path, leaf in leaves:
            key = ".".join([name, *(key_text(part) for part in path)])
            if not isinstance(leaf, Tensor):
                raise TraceConfigError(
                    f"{where}: {key!r} is {type(leaf).__name__}; only tensors are inputs of a traced model: "
                    "give the model its other arguments inside func, or give the inputs by name and leave it out"
                )
            flat[key] = leaf.detach().clone(memory_format=torch.contiguous_format)
    return flat, isinstance(example, Mapping)


def _innermost(module: nn.Module) -> nn.Module:
    """Return the module whose inputs ``module`` takes: a wrapper's ``forward`` passes on whatever it gets."""
    kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
    inner = module._modules.get("module")
    if inner is None or kinds != {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return module
    return _innermost(inner)


def shared_memory(module: nn.Module) -> dict[str, str]:
    """Map each parameter, buffer or tensor attribute that overlaps another tensor of the module to that one's name.

    Two names of one tensor are not an overlap.
    """
    tensors = {**{id(t): (name, t) for name, t in reversed(named_tensors(module).items())}}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                tensors.setdefault(id(value), (f"{path}.{name}" if path else name, value))
    places: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.values():
        if tensor.layout == torch.strided and tensor.numel():
            start = int(tensor.storage_offset()) * tensor.element_size()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = start + (int(last) + 1) * tensor.element_size()
            places.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, name))
    overlaps: dict[str, str] = {}
    for group in places.values():
        widest = None  # of the tensors that begin earlier, the one with the highest end
        for start, end, name in sorted(group):
            if widest is not None and start < widest[0]:
                overlaps.setdefault(name, widest[1])
                overlaps.setdefault(widest[1], name)
            if widest is None or end > widest[0]:
                widest = (end, name)
    return overlaps


def state_names(module: nn.Module, keys: Iterable[Any]) -> list[str]:
    """Return the qualified names of states given by name or as tensors. Raises TraceConfigError for one without."""
    tensors = named_tensors(module)
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)  # the first of its names
    ordered = []
    for key in keys:
        name = names.get(id(tensors.get(key) if isinstance(key, str) else key))
        if name is None:
            raise TraceConfigError(_unknown_state(module, key, list(tensors)))
        ordered.append(name)
    return ordered


def _unknown_state(module: nn.Module, key: Any, names: list[str]) -> str:
    if isinstance(key, str):
        return (
            f"the state {key!r} is not a buffer or parameter of {type(module).__name__}; it has "
            f"{', '.join(names[:12]) or 'none'}{', ...' if len(names) > 12 else ''}"
        )
    kind = f"a {type(key).__name__}" if not isinstance(key, Tensor) else f"a tensor of shape {tuple(key.shape)}"
    return (
        f"{kind} is given as a state but is not a buffer or parameter of {type(module).__name__}: "
        "register it with register_buffer, so that it stays with the rank"
    )
