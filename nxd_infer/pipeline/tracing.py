"""The graph-tracing split: a tracer of torch.fx records the code around a pipeline's units, and its graph replaces it.

The units stay calls of modules, so the graph is split between stages like any other forward.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import loss_functions, mappings
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.stage import find_units

log = logging.getLogger(__name__)

WRAPS = ("autowrap_functions", "autowrap_modules", "autowrap_obj_methods")
OWN = (loss_functions, mappings)
WITHOUT = "leave tracer_cls out: a model is split by the calls of its modules then, which needs no tracing"


def trace_around_units(model: nn.Module, cuts: Sequence[str], options: PipelineOptions) -> None:
    """Let calls of ``model`` run the graph that ``options.tracer_cls`` records of its forward.

    ``"hf"`` is the tracer of transformers before 5; without it nothing is traced, which splits their models as well.
    The inputs are ``input_names``, or the parameters of the forward without a default; all others have their defaults.
    Raises ParallelConfigError if the code around the units cannot be traced, with what would work.
    """
    chosen = _tracer_class(options.tracer_cls)
    if chosen is None:
        log_once('tracer_cls="hf": transformers 5 has no tracer; the model is split by the calls of its modules')
        return
    leaves = {unit.path for unit in find_units(model, cuts).units}
    parameters = inspect.signature(type(model).forward).parameters
    named = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    inputs = options.input_names or [name for name in named if parameters[name].default is inspect.Parameter.empty]
    fixed = {name: parameters[name].default for name in named if name not in inputs}
    tracer = _tracer(chosen, options, leaves)
    try:
        with _recorded_methods(options.autowrap_obj_methods or {}):
            graph = tracer.trace(model, concrete_args=fixed or None)
        traced = fx.GraphModule(model, graph)
    except Exception as error:
        raise ParallelConfigError(
            f"tracer_cls={options.tracer_cls!r} cannot trace the code around the layers of {type(model).__name__}: "
            f"{type(error).__name__}: {error}; name what it calls in autowrap_functions, autowrap_modules or "
            f"leaf_module_cls, or {WITHOUT}"
        ) from error
    forward: Any = type(traced).forward
    kept = [p for name, p in parameters.items() if name in inputs]
    forward.__signature__ = inspect.Signature([next(iter(parameters.values())), *kept])
    model.forward = types.MethodType(forward, model)


def _tracer(chosen: type[fx.Tracer], options: PipelineOptions, leaves: set[str]) -> fx.Tracer:
    kept = options.leaf_module_cls or []
    names = {
        leaf if isinstance(leaf, str) else leaf.__name__ for leaf in [*kept, options.transformer_layer_cls] if leaf
    }

    class AroundUnits(chosen):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            is_leaf = module_qualified_name in leaves or type(m).__name__ in names
            return is_leaf or super().is_leaf_module(m, module_qualified_name)

    wrapped = [*(options.autowrap_functions or ()), *(options.autowrap_modules or ())]
    # The documents' types of the two are exchanged; what they say of them is not.
    modules = tuple(one for one in wrapped if isinstance(one, types.ModuleType))
    functions = tuple(one for one in wrapped if not isinstance(one, types.ModuleType))
    # The parallel functions communicate: their insides are not a graph's.
    given: dict[str, Any] = {"autowrap_modules": (math, *OWN, *modules), "autowrap_functions": functions}
    try:
        return AroundUnits(**given)
    except TypeError as error:
        if not wrapped:
            return AroundUnits()
        raise ParallelConfigError(
            f"tracer_cls={chosen.__name__} does not take autowrap_modules and autowrap_functions, which "
            f"torch.fx.Tracer has: {error}"
        ) from error


def _tracer_class(given: Any) -> type[fx.Tracer] | None:
    if given == "hf":
        with contextlib.suppress(ImportError):
            return importlib.import_module("transformers.utils.fx").HFTracer
        return None
    return fx.Tracer if isinstance(given, str) else given


@contextlib.contextmanager
def _recorded_methods(methods: Mapping[Any, Sequence[str]]) -> Iterator[None]:
    """Let calls of objects' methods on traced values be recorded as they are, inside the block."""
    with contextlib.ExitStack() as stack:
        for number, (target, name) in enumerate((target, name) for target, names in methods.items() for name in names):
            had, before = name in vars(target), getattr(target, name)
            stack.callback(
                functools.partial(setattr, target, name, before) if had else functools.partial(delattr, target, name)
            )
            setattr(target, name, _recorded(before, number))
        yield


def _recorded(method: Callable[..., Any], number: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    call.__name__ = f"{method.__name__}_{number}"

    def record(*args: Any, **kwargs: Any) -> Any:
        proxies = (value for value in tree_leaves((args, kwargs)) if isinstance(value, fx.Proxy))
        proxy = next(proxies, None)
        return (
            method(*args, **kwargs) if proxy is None else proxy.tracer.create_proxy("call_function", call, args, kwargs)
        )

    return record


def say_what_has_no_effect(options: PipelineOptions) -> None:
    """Log once what of a configuration does nothing here, and why."""
    given = [name for name in WRAPS if getattr(options, name)]
    if given and options.tracer_cls is None:
        log_once(f"{', '.join(given)}: no effect without tracer_cls, since nothing is traced")
    if options.fuse_microbatches:
        log_once("fuse_microbatches: no effect, since microbatches run one by one, in the schedule's order")


@functools.cache
def log_once(text: str) -> None:
    log.warning("pipeline_config: %s", text)
