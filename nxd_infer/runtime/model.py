"""TensorParallelModel: a traced model, with its ranks, states and buckets behind one ``forward``; saved and loaded.

The artifact defines buckets, names, dtypes and shapes. A call is checked, routed to a bucket, written to the memory
shared with the ranks, run by all ranks, and answered with rank 0's outputs. Calls from any number of threads are
serialised, and every caller gets its own result. Source of saving and loading: the API guide's chapter "Model Trace".
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn

from nxd_infer.artifact.manifest import WEIGHTS_LATER_REQUIREMENT, weight_name
from nxd_infer.artifact.rank_weights import replace_weights
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.structure import filled
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends import registry
from nxd_infer.errors import ArtifactError, InputMismatchError
from nxd_infer.runtime.bucket_kernel import ask
from nxd_infer.runtime.ipc import Kind
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_infer.runtime.ranks import PendingStep, Ranks, free_side
from nxd_infer.runtime.router import Route, Router, cut, fill, lawful_inputs
from nxd_infer.runtime.supervisor.in_process import LocalRank


class TensorParallelModel(nn.Module, RankModel):
    """A traced model, ready to call.

    Args:
        artifact: the result of ``load_artifact``, or the path of a saved artifact.
        call_timeout: seconds a call may take before its ranks count as stuck and are ended; if longer, ten times as
            long as its bucket has taken before. Default: 30, and the first call may take as long as a first start.
        start_timeout: seconds the ranks may take to load everything, or to take new weights. Default: 300 to load, plus
            one per 100 MB; to take new weights, a multiple of the time that loading took.
        in_process: run degree 1 in this process. Default: at degree 1, yes. A server passes False, because a graph
            holds the GIL for a whole step, and because a call in this process cannot time out.
        threads_per_rank: compute threads of each rank process. Default: what the graphs were compiled for, else an
            equal share of the cores. A number here starts a process even at degree 1, because in this process torch's
            own setting applies.
        allow_kernel: False rejects an artifact with a bucket kernel, which is code that runs in rank 0.

    ``model(*tensors, **named)`` takes the inputs in the traced order, or by name, and returns what the traced module
    returned: a tensor, a tuple, or a dictionary. Errors of a call: InputMismatchError, BucketError and, if
    ``begin_bucket`` has begun two steps, StepsPendingError (nothing has run); RankFailedError, RankDiedError and
    RankTimeoutError (the ranks and states are gone; later calls raise ModelClosedError until ``restart``).

    The ranks start at the first call or with ``start()``, and end with ``close()``, the ``with`` block, the model or
    the process.
    """

    trace_report: dict[str, Any]
    """Statistics of the trace, on a model returned by ``parallel_model_trace``; a loaded model has none."""

    def __init__(
        self,
        artifact: LoadedArtifact | str,
        *,
        call_timeout: float | None = None,
        start_timeout: float | None = None,
        in_process: bool | None = None,
        threads_per_rank: int | None = None,
        allow_kernel: bool = True,
    ):
        nn.Module.__init__(self)
        if not isinstance(artifact, LoadedArtifact):
            artifact = load_artifact(artifact)
        RankModel.__init__(
            self,
            artifact,
            call_timeout=call_timeout,
            start_timeout=start_timeout,
            threads_per_rank=threads_per_rank,
        )
        if in_process and threads_per_rank is not None:
            raise InputMismatchError(
                "threads_per_rank is for rank processes; with in_process=True call torch.set_num_threads"
            )
        degree = self.world_size
        if in_process and degree > 1:
            stages = "" if self.pp_degree == 1 else f" ({self.pp_degree} pipeline stages)"
            raise InputMismatchError(f"in_process=True needs degree 1; this artifact has degree {degree}{stages}")
        self.in_process = degree == 1 and threads_per_rank is None if in_process is None else in_process
        self.arrays = not self.in_process and takes_arrays(artifact.manifest)
        artifact.check_kernel(allow_kernel)
        self._router = Router(
            artifact.manifest.buckets, self._ask_kernel if artifact.bucket_kernel_file is not None else None
        )

    def _new_ranks(self) -> Ranks:
        if self.in_process:
            return LocalRank(self.artifact, threads=self.threads_per_rank)
        return super()._new_ranks()

    def extra_repr(self) -> str:
        stages = "" if self.pp_degree == 1 else f"pp_degree={self.pp_degree}, "
        return f"backend={self.manifest.backend}, tp_degree={self.tp_degree}, {stages}buckets=\n{self.bucket_table()}"

    # --- calls ---

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Run the bucket that the inputs route to. For inputs, result and errors see the class."""
        route = self._router.route(inputs, named)
        outputs, bucket = self._run(route, None), self.buckets[route.bucket]
        if bucket.structure is None:
            return tuple(outputs)
        named = {spec.name: output for spec, output in zip(bucket.outputs, outputs, strict=True)}
        return filled(bucket.structure, named)

    def run_bucket(self, name: str, inputs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Run bucket ``name`` with inputs of exactly its shapes; no routing, no padding. Returns outputs by name.

        Inputs with a default may be omitted. ``timeout``: seconds for this call, overriding the derived limit. If
        ``arrays`` is True, inputs may be NumPy arrays, which are cheaper to pass; then outputs are arrays, too."""
        if self.arrays and isinstance(next(iter(inputs.values()), None), np.ndarray):
            return RankModel.run_bucket(self, name, inputs, timeout=timeout)
        index = self._bucket_index(name, timeout)
        outputs = self._run(self._router.exact(index, inputs), timeout)
        return {spec.name: output for spec, output in zip(self.buckets[index].outputs, outputs, strict=True)}

    def begin_bucket(
        self, name: str, inputs: Mapping[str, np.ndarray], *, timeout: float | None = None, checked: bool = False
    ) -> PendingStep:
        """Like :meth:`RankModel.begin_bucket`; raises InputMismatchError if ``arrays`` is False."""
        if not self.arrays:
            raise InputMismatchError(
                "a step can be begun ahead where ranks are processes (in_process=False) that take arrays: "
                "call run_bucket"
            )
        return RankModel.begin_bucket(self, name, inputs, timeout=timeout, checked=checked)

    def warmup(self) -> dict[str, float]:
        """Run every bucket once on its defaults or zeros, then reset the states; return seconds by bucket name.

        The first run of a graph loads code and reads weights, so it may take as long as starting the ranks.
        """
        seconds = {}
        for index, bucket in enumerate(self.buckets):
            inputs = lawful_inputs(bucket)
            begin = time.perf_counter()
            self._run(Route(index, inputs), self.bounds.start)
            seconds[bucket.name] = time.perf_counter() - begin
        self.reset_states()
        return seconds

    def _ask_kernel(self, tensors: list[Tensor]) -> tuple[list[Tensor], int]:
        with self._lock.take():
            return ask(self._started(), self.world_size, tensors)

    def _run(self, route: Route, timeout: float | None) -> list[Tensor]:
        bucket = self.buckets[route.bucket]
        with self._lock.take():
            ranks = self._started()
            number, side = free_side(ranks)
            for spec, view in zip(bucket.inputs, side.inputs[route.bucket], strict=True):
                fill(view, spec, route.inputs.get(spec.name))
            side.last = ranks.begin(Kind.STEP, route.bucket, number, timeout=self._limit(route.bucket, timeout))
            ranks.finish(side.last)
            if side.last is not None:  # a call in this process has no time limit to derive
                self.bounds.called(route.bucket, side.last.seconds)
            # Copy while the lock is held, because the next call overwrites the arena.
            return [output.clone() for output in cut(bucket, route.inputs, side.outputs[route.bucket])]

    # --- unsupported operations ---

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise ArtifactError("a TensorParallelModel owns processes and cannot be copied; load the artifact again")

    def __reduce__(self) -> NoReturn:
        raise ArtifactError("a TensorParallelModel cannot be pickled; use parallel_model_save and parallel_model_load")


TensorParallelNeuronModel = TensorParallelModel
"""The name that existing code imports."""


def parallel_model_save(model: TensorParallelModel, save_dir: str | os.PathLike[str], *, replace: bool = True) -> None:
    """Save a traced model as the artifact directory ``save_dir``, all or nothing.

    An existing artifact is replaced in one step; any other non-empty directory is rejected (ArtifactError). Weights
    that ``update_weights`` swapped in are saved. Files of a freshly traced model are hard-linked if the file system
    allows it, else copied and checked. Raises ArtifactSpaceError if the disk is full; then nothing half-written
    remains.
    """
    if not isinstance(model, TensorParallelModel):
        raise ArtifactError(
            f"parallel_model_save takes the model that parallel_model_trace or parallel_model_load returned, "
            f"got {type(model).__name__}"
        )
    source = model.artifact
    updated = model.updated_weights()
    if Path(os.path.abspath(save_dir)) == source.path and not any(updated):
        return  # it is already complete
    manifest = source.manifest.model_copy(deep=True)
    if not model.missing_weights():
        manifest.requires = [name for name in manifest.requires if name != WEIGHTS_LATER_REQUIREMENT]
    specs = {spec.name: spec for spec in manifest.weights}

    def encode(name: str, tensor: Tensor) -> Tensor:
        return registry.get(manifest.backend).encode(specs[name], tensor)

    with ArtifactWriter(save_dir, replace=replace) as writer:
        for rank, tensors in enumerate(updated):
            if tensors:
                new = writer.file(weight_name(rank))
                replace_weights(source.weight_file(rank), new, tensors, manifest.packed, encode)
        for name, spec in source.manifest.files.items():
            if not (writer.path / name).exists():
                writer.add(name, source.path / name, link=source.temporary, known=spec)
        writer.commit(manifest)


def parallel_model_load(
    load_dir: str | os.PathLike[str],
    *,
    call_timeout: float | None = None,
    start_timeout: float | None = None,
    backend: str | None = None,
    verify: bool = True,
    expect_digest: str | None = None,
    **options: Any,
) -> TensorParallelModel:
    """Load a saved model as a :class:`TensorParallelModel`; nothing is compiled and no model code is needed.

    The ranks start at the first call, or with ``model.start()``. ``options``: see TensorParallelModel; for errors see
    :func:`load_artifact`.
    """
    artifact = load_artifact(load_dir, verify=verify, expect_digest=expect_digest, backend=backend)
    return TensorParallelModel(artifact, call_timeout=call_timeout, start_timeout=start_timeout, **options)
