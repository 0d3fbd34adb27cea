"""The first generation: ``ModelBuilder(router, tp_degree, checkpoint_loader).add(key, instance, examples).trace()``."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from nxd_infer.compat.model_builder.build import Made, Shape, Words, modules_of, trace_shapes
from nxd_infer.compat.model_builder.nxd_model import NxDModel
from nxd_infer.compat.model_builder.shards import Checkpoint, shard_checkpoint
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import TraceConfigError
from nxd_infer.trace.request import BucketModelConfig, scripted


class BaseModelInstance:
    """What a builder makes a model of: ``module_cls()`` returns it. Subclasses override ``load_module`` and ``get``.

    ``input_output_aliases`` maps states (parameters or buffers of the module, or their names) to the number of the
    output that is their next value.
    """

    module: nn.Module | None = None

    def __init__(self, module_cls: Callable[[], nn.Module], input_output_aliases: Mapping[Any, int] | None = None):
        self.module_cls = module_cls
        self.input_output_aliases = dict(input_output_aliases or {})

    def load_module(self) -> None:
        """Build ``self.module``. It is called for every rank and shape; parameters have no memory meanwhile."""
        self.module = self.module_cls()

    def get(self, bucket_rank: int | None, **kwargs: Any) -> Any:
        """Return the module for a shape, and its aliases."""
        return self.module, self.input_output_aliases


class ModelBuilder:
    """Traces several shapes of several modules (the *keys*), which share their states and weights by name.

    Args:
        router: None: the shape of exactly a call's inputs runs. Or a TorchScript function of the list of a call's
            inputs that returns a key, or a key and the number of its shape.
        checkpoint_loader: returns the unsharded weights by the modules' names.
        compiler_workdir, tp_degree, and among the others ``pp_degree``: as for ``parallel_model_trace``.
        master_proc_env_vars: environment variables during the trace.
        others: those of the reference. ``debug``, ``logical_nc_config`` and ``weights_to_skip_layout_optimization``
            change no result; the rest must say that all ranks are on this host and form no further groups.

    Raises TraceConfigError for what the trace would not honour.
    """

    def __init__(
        self,
        router: Any,
        tp_degree: int,
        checkpoint_loader: Callable[[], Any] | None,
        compiler_workdir: Any = None,
        master_proc_env_vars: Mapping[str, str] | None = None,
        debug: bool = False,
        **others: Any,
    ):
        tp, pp = tp_degree, others.pop("pp_degree", 1)
        self.context = make_context(tp * pp, tp=tp, pp=pp)
        neutral = dict.fromkeys(("num_cores_per_group", "ep_degree"), (1,)) | {"start_rank_id": (0, None)}
        neutral |= dict.fromkeys(("world_size", "local_ranks_size"), (tp * pp, None))
        for name in others.keys() - {"logical_nc_config", "weights_to_skip_layout_optimization"}:
            if others[name] not in neutral.get(name, (None,) if name == "init_custom_process_group_fn" else ()):
                raise TraceConfigError(f"{name}={others[name]!r} with tp_degree={tp} is not supported: leave it out")
        self.router, self.checkpoint_loader = router, checkpoint_loader
        self.compiler_workdir, self.environment = compiler_workdir, dict(master_proc_env_vars or {})
        self.shapes: list[Shape] = []
        self.kernels: list[BucketModelConfig] = []

    def add(
        self,
        key: str,
        model_instance: Any,
        example_inputs: Sequence[Any],
        compiler_args: Words = None,
        bucket_config: BucketModelConfig | Mapping[str, Any] | None = None,
        priority_model_idx: int | None = None,
    ) -> ModelBuilder:
        """Add a module under ``key``, with a tuple of ``example_inputs`` for each shape, and return the builder.

        Args:
            model_instance: has ``load_module()`` and ``get(bucket_rank, **kwargs)``, as :class:`BaseModelInstance`.
            bucket_config: its ``func_kwargs`` are for ``get``; a ``bucket_kernel`` is for builders with one key.
            priority_model_idx: a shape's number; no effect, because all shapes share weights that are packed for all.

        Raises TraceConfigError for a key that is there, and for what the trace would not honour.
        """
        if key in {shape.key for shape in self.shapes}:
            raise TraceConfigError(f"the key {key!r} was added before: give each model a key of its own")
        config = BucketModelConfig(**bucket_config) if isinstance(bucket_config, Mapping) else bucket_config
        config = config or BucketModelConfig()
        config.store_example_inputs(example_inputs)
        count = len(example_inputs)
        if priority_model_idx is not None and not 0 <= priority_model_idx < count:
            raise TraceConfigError(f"priority_model_idx={priority_model_idx}: {key!r} has {count} shapes")
        if config.shared_state_buffer is not None:
            raise TraceConfigError("shared_state_buffer is not supported: states of one name are shared as they are")
        self.kernels += [config] if config.bucket_kernel is not None else []
        for number, example in enumerate(example_inputs):
            asked = {"bucket_rank": None if bucket_config is None else number}
            make = functools.partial(_made, model_instance, asked | config.get_func_kwargs_for_bucket_rank(number))
            name = key if count == 1 else f"{key}_{number}"
            self.shapes.append(Shape(name, example, make, self.context, key, compiler_args, self.compiler_workdir))
        return self

    def trace(
        self, tp_degree: int | None = None, initialize_model_weights: bool = True, dry_run: bool = False
    ) -> NxDModel | Any:
        """Trace and compile what was added, and return the model, ready to call.

        ``initialize_model_weights=False``: without weights, for ``initialize()``. ``dry_run``: return the TracePlan.
        Raises TraceConfigError, TraceError and WeightMismatchError as ``parallel_model_trace`` does.
        """
        if tp_degree not in (None, self.context.tp.degree):
            raise TraceConfigError(f"tp_degree={tp_degree}, and the builder has {self.context.tp.degree}: leave it out")
        if initialize_model_weights and self.checkpoint_loader is None:
            raise TraceConfigError("initialize_model_weights=True needs a checkpoint_loader: give one, or pass False")
        loader = self.checkpoint_loader if initialize_model_weights else None
        with patch.dict(os.environ, self.environment):
            traced = trace_shapes(self.shapes, loader, kernel=self._kernel(), dry_run=dry_run)
        return traced if dry_run else NxDModel(model=traced)

    def shard_checkpoint(self, serialize_path: str | os.PathLike[str] | None = None) -> list[Checkpoint]:
        """Return the weights of each tensor parallel rank of the first key; see :func:`shards.shard_checkpoint`."""
        if self.checkpoint_loader is None or not self.shapes:
            raise TraceConfigError("shard_checkpoint() needs a checkpoint_loader, and a model that was added")
        ((module, _),) = modules_of(self.shapes[:1]).values()
        checkpoint = self.checkpoint_loader()
        with use_context(self.context):
            return shard_checkpoint(checkpoint, module, serialize_path=serialize_path)

    def _kernel(self) -> tuple[Callable[[], Any] | None, Sequence[Any] | None]:
        """Return the artifact's bucket kernel and its constants, if something of the user's chooses the shape."""
        numbers = {shape.key: number for number, shape in reversed(list(enumerate(self.shapes)))}
        if self.kernels and (self.router is not None or len(numbers) > 1):
            raise TraceConfigError(
                "a bucket_kernel chooses among the shapes of its key, and there is a router or another key: leave it "
                "out, and give the model inputs of a traced shape"
            )
        if self.kernels:
            return self.kernels[0].bucket_kernel, self.kernels[0].bucket_kernel_constant_args
        return None if self.router is None else functools.partial(_routing, self.router, numbers), None


def _made(instance: Any, kwargs: Mapping[str, Any]) -> Made:
    own = copy.copy(instance)  # get() may change the module for its shape
    own.load_module()
    return own.get(**kwargs)


class _Routing(nn.Module):
    def __init__(self, router: Any, first: dict[str, int]):
        super().__init__()
        self.router, self.first = router, torch.jit.Attribute(first, dict[str, int])


def _routing(router: Any, first: dict[str, int]) -> Any:
    """Return a bucket kernel that asks ``router``; ``first``: the number of the first shape of each key."""
    router = scripted(lambda: router, "router")
    schema = router.forward.schema if isinstance(router, torch.jit.ScriptModule) else router.schema
    pair = schema.returns[0].type.kind() == "TupleType"
    module: Any = torch.jit.script(_Routing(router, first))
    module.define(
        "def forward(self, inputs: List[Tensor]):\n"
        f"    {'key, number' if pair else 'key'} = self.router(inputs)\n"
        f"    return inputs, torch.tensor([self.first[key] + {'int(number)' if pair else '0'}])\n"
    )
    return module
