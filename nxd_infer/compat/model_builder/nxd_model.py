"""NxDModel: a traced model as model builders return it, around a :class:`TensorParallelModel`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import compat
from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.structure import filled
from nxd_infer.compat.model_builder.build import Shape, trace_shapes
from nxd_infer.errors import InputMismatchError, TraceConfigError, WeightSchemaError
from nxd_infer.layout import TensorLayout, as_source
from nxd_infer.layout.merge import RunsSource, Shard
from nxd_infer.runtime.model import TensorParallelModel, parallel_model_load, parallel_model_save
from nxd_infer.runtime.router import bind, check_tensors, fits


class NxDModel(nn.Module):
    """Call it with the inputs of a traced shape, by position or by name; ``model_name=`` chooses a shape by its tag.

    States such as caches stay with the ranks between calls. What is returned are the first rank's outputs. The ranks
    start with ``to_neuron()``, or at the first call. ``world_size`` and ``local_ranks_size``: None, or their number.
    """

    def __init__(
        self,
        world_size: int | None = None,
        start_rank: int | None = None,
        local_ranks_size: int | None = None,
        state_initializer: None = None,
        layout_transformer: None = None,
        *,
        model: TensorParallelModel | None = None,
    ):
        super().__init__()
        _require_all(start_rank)
        if state_initializer is not None or layout_transformer is not None:
            raise TraceConfigError(
                "states start as traced, and weights are packed as they load: leave both objects out"
            )
        self._shapes: list[Shape] = []
        self._model, self._sizes = model, {None, world_size, local_ranks_size}
        if model is not None:
            self._require_size(model.world_size)

    def _require_size(self, ranks: int) -> None:
        if given := self._sizes - {None, ranks}:
            raise TraceConfigError(
                f"world_size or local_ranks_size is {given.pop()}, and the model was built for {ranks} ranks"
            )

    def add(self, key: str, trace_artifacts: Shape, compilation_artifacts: Mapping[str, Any] | None = None) -> NxDModel:
        """Add a shape of ``trace()`` and ``compile()``, before the first use; return the model."""
        if self._model is not None:
            raise TraceConfigError(f"{key!r} cannot be added: the model is compiled already")
        self._require_size(trace_artifacts.context.tp.degree * trace_artifacts.context.pp.degree)
        self._shapes.append(dataclasses.replace(trace_artifacts, name=key, **(compilation_artifacts or {})))
        return self

    def build(self, workers: int | None = None) -> NxDModel:
        """Trace and compile the shapes that were added, unless that is done; return the model."""
        self._model = self._model or trace_shapes(self._shapes, None, workers=workers)
        return self

    @property
    def model(self) -> TensorParallelModel:
        """The traced model that does the work."""
        return self.build()._model  # pyright: ignore[reportReturnType]

    @property
    def nxd_model(self) -> NxDModel:
        """The model itself: what a first-generation builder returns has it as an attribute."""
        return self

    def forward(
        self, *inputs: Tensor, model_name: str | None = None, forward_mode: str = "default", **named: Tensor
    ) -> Any:
        """Run the shape called ``model_name``, or the one of exactly these inputs, and return what the model returned.

        An output that is declared as a state's next value is not returned; a single other one comes without its list.

        Raises BucketError, with the shapes, if none takes these inputs; InputMismatchError if several do, and for a
        ``forward_mode`` other than ``"default"``; and what a call of TensorParallelModel raises.
        """
        if forward_mode != "default":
            raise InputMismatchError(
                f"forward_mode={forward_mode!r}: all ranks have the same inputs here, and the first one's outputs are "
                "returned; leave it out"
            )
        buckets = {bucket.name: bucket for bucket in self.model.buckets}
        if model_name in buckets:
            outputs = self.model.run_bucket(model_name, bind(buckets[model_name], inputs, named))
            form = buckets[model_name].structure
            result = tuple(outputs.values()) if form is None else filled(form, outputs)
        else:
            takers = self._takers(inputs, named)
            if model_name is not None or len(takers) > 1:
                raise InputMismatchError(
                    f"model_name={model_name!r} must be one of {', '.join(takers or buckets)}, which take such inputs"
                )
            result = self.model(*inputs, **named)
        bare = isinstance(result, list | tuple) and len(result) == 1 and self.model.buckets[0].metadata.get("bare")
        return result[0] if bare else result

    def _takers(self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> list[str]:
        """Return the shapes of exactly these inputs, if the artifact has no rule that chooses."""
        takers = []
        for bucket in self.model.buckets if self.model.artifact.bucket_kernel_file is None else ():
            with contextlib.suppress(InputMismatchError):
                check_tensors(given := bind(bucket, inputs, named))
                pairs = [(spec, given[spec.name]) for spec in bucket.inputs if spec.name in given]
                if all(fits(spec, tensor) and list(tensor.shape) == spec.shape for spec, tensor in pairs):
                    takers.append(bucket.name)
        return takers

    # --- weights ---

    def set_weights(self, sharded_checkpoint: Sequence[Mapping[str, Tensor]]) -> None:
        """Give every rank its weights: a dictionary per tensor parallel rank, as ``shard_checkpoint`` returns them.

        States stay as they are, and names that no graph reads are ignored. Raises WeightSchemaError for missing names,
        other shapes, and another number of ranks; then nothing has changed.
        """
        manifest = self.model.manifest
        new = self.model.cut_weights(logical_source(manifest, sharded_checkpoint), strict=False)
        missing = {spec.name for spec in manifest.weights if spec.kind == "parameter"} - new.names
        if missing:
            new.close()
            raise WeightSchemaError(
                f"the weights of {', '.join(sorted(missing)[:12])} are missing ({len(missing)} in all)"
            )
        self.model.update_weights(new)

    replace_weights = set_weights

    def to_neuron(self) -> NxDModel:
        """Start the ranks, which load weights and graphs. Raises WeightSchemaError if weights are missing."""
        self.model.start()
        return self

    def initialize(self, weights: Sequence[Mapping[str, Tensor]], start_rank: Tensor | int = 0) -> None:
        """:meth:`set_weights` and :meth:`to_neuron`; ``start_rank`` must be 0."""
        _require_all(start_rank)
        self.set_weights(weights)
        self.to_neuron()

    def initialize_with_saved_weights(self, start_rank: Tensor | int = 0) -> None:
        """As :meth:`initialize`, with the weights that were traced or saved."""
        _require_all(start_rank)
        self.to_neuron()

    # --- files ---

    def save(self, path: str | os.PathLike[str], save_weights: bool = False, _extra_files: Any = None) -> None:
        """Save as the artifact directory ``path``, with the weights if they are set: ``nxd-infer serve`` takes it.

        ``torch.jit.save(model, path)`` calls this. ``save_weights=True`` raises WeightSchemaError if they are not set.
        """
        if _extra_files:
            raise TraceConfigError("an artifact has no place for _extra_files: write them beside it")
        if save_weights and (missing := self.model.missing_weights()):
            raise WeightSchemaError(f"{', '.join(sorted(missing)[:4])} have no values yet: call set_weights() first")
        parallel_model_save(self.model, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], start_rank: int | None = None, local_ranks_size: int | None = None
    ) -> NxDModel:
        """Load what :meth:`save` wrote; for errors see ``load_artifact``."""
        return cls(None, start_rank, local_ranks_size, model=parallel_model_load(path))


def logical_source(manifest: Manifest, shards: Sequence[Mapping[str, Tensor]]) -> RunsSource:
    """Return the logical tensors of weights that are sharded as the artifact has them, by rank. Raises
    WeightSchemaError for another number of ranks."""
    if isinstance(shards, Mapping) or len(shards) != manifest.tp_degree:
        count = "one dictionary" if isinstance(shards, Mapping) else len(shards)
        raise WeightSchemaError(
            f"the weights are a list of a dictionary for each rank of {manifest.tp_degree}, got {count}"
        )
    pieces = []
    for name, entry in manifest.layout.get("weights", {}).items():
        logical = {key: tuple(shape) for key, shape in entry["logical"].items()}
        for rank, (runs, shard) in enumerate(zip(entry["ranks"], shards, strict=True)):
            layout = TensorLayout.from_json(runs)
            if name in shards[0]:
                end = math.prod(layout.shape)
                pieces.append(Shard(name, rank, as_source(shard), layout, layout.shape, 0, end, logical))
    return RunsSource(pieces)


def replace_weights(model: NxDModel | TensorParallelModel, weights: Any) -> None:
    """Replace the weights of a traced model: by rank (a list of dictionaries), or logical ones by name."""
    if isinstance(model, NxDModel) and not isinstance(weights, Mapping | nn.Module):
        model.set_weights(weights)
    else:
        (model.model if isinstance(model, NxDModel) else model).update_weights(weights)


def _require_all(start_rank: Tensor | int | None) -> None:
    if start_rank is not None and int(torch.as_tensor(start_rank).reshape(-1)[0]) != 0:
        raise TraceConfigError(f"start_rank={start_rank}: all ranks run on this host, from rank 0")


_load_script = torch.jit.load


@functools.wraps(_load_script)
def _load(f: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.jit.load``, which under the old names also takes what ``torch.jit.save`` made of an NxDModel."""
    if compat.is_installed() and isinstance(f, str | os.PathLike) and os.path.isdir(f):
        return NxDModel.load(f)
    return _load_script(f, *args, **kwargs)


torch.jit.load = _load
