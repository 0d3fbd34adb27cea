"""TensorParallelModel: call a traced model; its ranks, its states and its buckets behind one forward.

The artifact says everything: buckets, names, dtypes, shapes. A call is checked, routed to a bucket, written into the
memory the ranks share, run by all ranks, and answered with rank 0's outputs. Calls from any number of threads are
serialised, and every caller gets its own result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn

from nxd_infer.artifact.manifest import BucketSpec
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.errors import ArtifactError, InputMismatchError
from nxd_infer.runtime.bucket_kernel import ask
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_infer.runtime.ranks.base import Ranks
from nxd_infer.runtime.ranks.channel import Kind
from nxd_infer.runtime.ranks.in_process import LocalRank
from nxd_infer.runtime.ranks.pending_step import PendingStep, free_side
from nxd_infer.runtime.router import Route, Router, cut, fill, lawful

__all__ = ["TensorParallelModel", "TensorParallelNeuronModel"]


class TensorParallelModel(nn.Module, RankModel):
    """A traced model, ready to call.

    Args:
        artifact: what ``load_artifact`` returned, or the path of a saved artifact.
        call_timeout: seconds a call may take before its ranks are taken for stuck and ended; ten times as long as its
            bucket has taken before, where that is more.
        start_timeout: seconds the ranks may take to load everything, or to take new weights. Default: 300 to load, and
            one more for every 100 MB; to take new weights, some times as long as loading has taken.
        in_process: run degree 1 in this process. Default: at degree 1, yes. A server passes False, because a graph
            holds the interpreter for a whole step, and because a call in this process cannot be timed out.
        threads_per_rank: compute threads of each rank process. Default: what the graphs were compiled for, else an
            equal share of the cores. In this process torch's own setting counts, so that with a number given here
            degree 1 has a process, too.
        allow_kernel: False refuses an artifact with a bucket kernel, which is code that runs in rank 0.

    ``model(*tensors, **named)`` takes the inputs in the traced order, or by name, and returns what the traced module
    returned: a tensor, a tuple, or a dictionary. Errors of a call: InputMismatchError, BucketError and, where
    ``begin_bucket`` has begun two steps, StepsPendingError (nothing has run), RankFailedError, RankDiedError and
    RankTimeoutError (the ranks have been ended, states included; later calls raise ModelClosedError until ``restart``).

    The ranks start at the first call or with ``start()``, and end with ``close()``, the ``with`` block, the model or
    the process.
    """

    trace_report: dict[str, Any]
    """What tracing made, on a model that ``parallel_model_trace`` returned; a loaded one has none."""

    def __init__(
        self,
        artifact: LoadedArtifact | str,
        *,
        call_timeout: float = 30.0,
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
        degree = self.tp_degree
        if in_process and degree > 1:
            raise InputMismatchError(f"in_process=True needs degree 1; this artifact has degree {degree}")
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
        return f"backend={self.manifest.backend}, tp_degree={self.tp_degree}, buckets=\n{self.bucket_table()}"

    # --- calls ---

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Run the bucket that the inputs route to. See the class for inputs, result and errors."""
        route = self._router.route(inputs, named)
        outputs = self._run(route, None)
        return _returned(self.buckets[route.bucket], outputs)

    def run_bucket(self, name: str, inputs: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Run bucket ``name`` with inputs of exactly its shapes; no routing, no padding. Outputs by name.

        Inputs with a default may be left out. ``timeout``: seconds for this call, in place of what ``call_timeout``
        comes to. Where ``arrays`` says so, inputs may be NumPy arrays, which cost less to hand over; outputs are arrays
        then, too.
        """
        if self.arrays and isinstance(next(iter(inputs.values()), None), np.ndarray):
            return RankModel.run_bucket(self, name, inputs, timeout=timeout)
        index = self._bucket_index(name, timeout)
        outputs = self._run(self._router.exact(index, inputs), timeout)
        return {spec.name: output for spec, output in zip(self.buckets[index].outputs, outputs, strict=True)}

    def begin_bucket(
        self, name: str, inputs: Mapping[str, np.ndarray], *, timeout: float | None = None, checked: bool = False
    ) -> PendingStep:
        """As :meth:`RankModel.begin_bucket`; InputMismatchError where ``arrays`` is False."""
        if not self.arrays:
            raise InputMismatchError(
                "a step can be begun ahead where ranks are processes (in_process=False) that take arrays: "
                "call run_bucket"
            )
        return RankModel.begin_bucket(self, name, inputs, timeout=timeout, checked=checked)

    def warmup(self) -> dict[str, float]:
        """Run every bucket once on its defaults or zeros, then reset the states; seconds by bucket name.

        The first run of a graph loads code and reads weights, so it may take as long as a start.
        """
        seconds = {}
        for index, bucket in enumerate(self.buckets):
            inputs = {spec.name: lawful(spec) for spec in bucket.inputs if spec.default is None}
            begin = time.perf_counter()
            self._run(Route(index, inputs), self.bounds.start)
            seconds[bucket.name] = time.perf_counter() - begin
        self.reset_states()
        return seconds

    def _ask_kernel(self, tensors: list[Tensor]) -> tuple[list[Tensor], int]:
        with self._turn.take():
            return ask(self._started(), self.tp_degree, tensors)

    def _run(self, route: Route, timeout: float | None) -> list[Tensor]:
        bucket = self.buckets[route.bucket]
        with self._turn.take():
            ranks = self._started()
            number, side = free_side(ranks)
            for spec, view in zip(bucket.inputs, side.inputs[route.bucket], strict=True):
                fill(view, spec, route.inputs.get(spec.name))
            side.last = ranks.begin(Kind.STEP, route.bucket, number, timeout=self._limit(route.bucket, timeout))
            ranks.finish(side.last)
            if side.last is not None:  # a call in this process has no bound, and needs no measure
                self.bounds.called(route.bucket, side.last.seconds)
            # Copies, made while the lock is held: the next call overwrites the arena.
            return [output.clone() for output in cut(bucket, route.inputs, side.outputs[route.bucket])]

    # --- what a model of processes cannot do ---

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise ArtifactError("a TensorParallelModel owns processes and cannot be copied; load the artifact again")

    def __reduce__(self) -> NoReturn:
        raise ArtifactError("a TensorParallelModel cannot be pickled; use parallel_model_save and parallel_model_load")


TensorParallelNeuronModel = TensorParallelModel
"""The name that existing code imports."""


def _returned(bucket: BucketSpec, outputs: list[Tensor]) -> Any:
    """Outputs in the form the traced module returned them; a list comes back as a tuple."""
    if bucket.structure is None:
        return tuple(outputs)
    return _filled(bucket.structure, {spec.name: output for spec, output in zip(bucket.outputs, outputs, strict=True)})


def _filled(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(structure, Mapping):
        return {key: _filled(value, tensors) for key, value in structure.items()}
    if isinstance(structure, list):
        return tuple(_filled(value, tensors) for value in structure)
    return tensors[structure]
