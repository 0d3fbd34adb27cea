"""TensorParallelModel: call a traced model; its ranks, its states and its buckets behind one forward.

The artifact says everything: buckets, names, dtypes, shapes. A call is checked, routed to a bucket, written into the
memory the ranks share, run by all ranks, and answered with rank 0's outputs. Calls from any number of threads are
serialised, and every caller gets its own result.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from nxd_infer.errors import (
    ArtifactCorruptError,
    ArtifactError,
    BucketError,
    InputMismatchError,
    ModelClosedError,
)
from nxd_infer.trace.artifact import LoadedArtifact, load_artifact, parallel_model_load, parallel_model_save
from nxd_infer.trace.channel import Kind
from nxd_infer.trace.cores import check_degree, default_threads
from nxd_infer.trace.health import RankHealth
from nxd_infer.trace.local import LocalRank
from nxd_infer.trace.manifest import BucketSpec, Manifest
from nxd_infer.trace.router import Route, Router, bucket_table, cut, fill, lawful
from nxd_infer.trace.sources import Weights
from nxd_infer.trace.supervisor import Supervisor
from nxd_infer.trace.swaps import WeightSwaps
from nxd_infer.trace.weights import NewWeights, WeightUpdate

__all__ = [
    "RankHealth",
    "TensorParallelModel",
    "TensorParallelNeuronModel",
    "parallel_model_load",
    "parallel_model_save",
]


class Ranks(Protocol):
    """Where the graphs run: processes (:class:`Supervisor`) or, at degree 1, this one (:class:`LocalRank`)."""

    arena: Any

    def start(self) -> None: ...
    def exchange(
        self,
        kind: Kind,
        bucket: int = 0,
        *,
        timeout: float | None = None,
        fds: list[int] | None = None,
        fatal: bool = True,
    ) -> None: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...
    def health(self) -> list[RankHealth]: ...
    def close(self) -> None: ...


class TensorParallelModel(nn.Module):
    """A traced model, ready to call.

    Args:
        artifact: what ``load_artifact`` returned, or the path of a saved artifact.
        call_timeout: seconds a call may take before its ranks are taken for stuck and ended.
        start_timeout: seconds the ranks may take to load everything.
        in_process: run degree 1 in this process. Default: at degree 1, yes. A server passes False, because a graph
            holds the interpreter for a whole step, and because a call in this process cannot be timed out.
        threads_per_rank: compute threads of each rank process. Default: what the graphs were compiled for, else an
            equal share of the cores. In this process torch's own setting counts, so that with a number given here
            degree 1 has a process, too.

    ``model(*tensors, **named)`` takes the inputs in the traced order, or by name, and returns what the traced module
    returned: a tensor, a tuple, or a dictionary. Errors of a call: InputMismatchError and BucketError (nothing has
    run), RankFailedError, RankDiedError and RankTimeoutError (the ranks have been ended, states included; later calls
    raise ModelClosedError until ``restart``).

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
        start_timeout: float = 300.0,
        in_process: bool | None = None,
        threads_per_rank: int | None = None,
    ):
        super().__init__()
        if not isinstance(artifact, LoadedArtifact):
            artifact = load_artifact(artifact)
        _check_seconds("call_timeout", call_timeout)
        _check_seconds("start_timeout", start_timeout)
        if threads_per_rank is not None and (type(threads_per_rank) is not int or threads_per_rank < 1):
            raise InputMismatchError(
                f"threads_per_rank must be a whole number of at least 1, or None, got {threads_per_rank!r}"
            )
        if in_process and threads_per_rank is not None:
            raise InputMismatchError(
                "threads_per_rank is for rank processes; with in_process=True call torch.set_num_threads"
            )
        degree = artifact.manifest.tp_degree
        check_degree(degree)
        if in_process and degree > 1:
            raise InputMismatchError(f"in_process=True needs degree 1; this artifact has degree {degree}")
        self.artifact = artifact
        self.call_timeout = call_timeout
        self.start_timeout = start_timeout
        self.in_process = degree == 1 and threads_per_rank is None if in_process is None else in_process
        self.threads_per_rank = threads_per_rank or default_threads(degree, artifact.manifest.target.get("threads"))
        self._router = Router(artifact.manifest.buckets, _load_kernel(artifact))
        self._index = {bucket.name: i for i, bucket in enumerate(artifact.manifest.buckets)}
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._busy = False
        """Whether the thread that holds the lock is inside a call."""
        self._ranks: Ranks | None = None
        self._closed = False
        self._finalizer: weakref.finalize | None = None
        self._swaps = WeightSwaps(artifact.manifest, start_timeout)

    # --- what it is ---

    @property
    def manifest(self) -> Manifest:
        return self.artifact.manifest

    @property
    def buckets(self) -> list[BucketSpec]:
        """The traced shapes, in the manifest's order."""
        return self.artifact.manifest.buckets

    @property
    def tp_degree(self) -> int:
        return self.artifact.manifest.tp_degree

    def bucket_table(self) -> str:
        """The buckets as text."""
        return bucket_table(self.buckets)

    def extra_repr(self) -> str:
        return f"backend={self.manifest.backend}, tp_degree={self.tp_degree}, buckets=\n{self.bucket_table()}"

    # --- life ---

    def start(self) -> TensorParallelModel:
        """Start the ranks unless they run; returns the model. Raises what kept a rank from starting."""
        with self._turn():
            self._started()
        return self

    def close(self) -> None:
        """End the ranks. Calls afterwards raise ModelClosedError; ``restart`` starts them again."""
        if os.getpid() != self._owner:
            return
        self._closed = True
        ranks = self._ranks
        if ranks is None:
            return  # or about to start: that looks again once they run
        if self.in_process:
            with self._lock:  # a graph that runs here keeps its memory until it returns
                if not self._busy:  # else a signal handler closes amid a call, which ends the rank as it returns
                    ranks.close()
        else:
            ranks.close()  # without the lock: it must end a call that is stuck

    def restart(self) -> TensorParallelModel:
        """Start the ranks anew, whatever state they are in. States begin as traced; updated weights are kept."""
        self.close()
        with self._turn():
            self._ranks = None
            self._closed = False
            self._started()
        return self

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time. Who would wait for itself, or for a thread that a fork left behind, is refused."""
        if os.getpid() != self._owner:
            raise ModelClosedError(
                f"the ranks of this model belong to process {self._owner}; "
                "a forked process must load the artifact itself"
            )
        with self._lock:
            if self._busy:
                raise ModelClosedError("the model was used by a signal handler in the middle of one of its calls")
            try:
                self._busy = True
                yield
            finally:
                self._busy = False
                if self._closed and self.in_process and self._ranks is not None:
                    self._ranks.close()

    def __enter__(self) -> TensorParallelModel:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> Ranks:
        """The running ranks; the caller holds the lock."""
        if self._ranks is not None:
            self._ranks.check()
            return self._ranks
        if self._closed:
            raise ModelClosedError("the model was closed; call restart() to start its ranks again")
        ranks: Ranks
        if self.in_process:
            ranks = LocalRank(self.artifact, threads=self.threads_per_rank)
        else:
            ranks = Supervisor(
                self.artifact,
                threads=self.threads_per_rank,
                call_timeout=self.call_timeout,
                start_timeout=self.start_timeout,
            )
        self._ranks = ranks
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, ranks.close)
        try:
            if self._closed:  # close() came before there was anything to close
                raise ModelClosedError("the model was closed; call restart() to start its ranks again")
            ranks.start()
            self._swaps.replay(ranks)
        except BaseException:
            ranks.close()
            self._ranks = None  # nothing of it is left; the next call tries again
            raise
        return ranks

    # --- calls ---

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Run the bucket that the inputs route to. See the class for inputs, result and errors."""
        route = self._router.route(inputs, named)
        outputs = self._run(route, None)
        return _returned(self.buckets[route.bucket], outputs)

    def run_bucket(self, name: str, inputs: Mapping[str, Tensor], *, timeout: float | None = None) -> dict[str, Tensor]:
        """Run bucket ``name`` with inputs of exactly its shapes; no routing, no padding. Outputs by name.

        Inputs with a default may be left out. ``timeout`` overrides ``call_timeout`` for this call.
        """
        if timeout is not None:
            _check_seconds("timeout", timeout)
        index = self._index.get(name)
        if index is None:
            raise BucketError(f"there is no bucket {name!r}. The buckets:\n{self.bucket_table()}")
        outputs = self._run(self._router.exact(index, inputs), timeout)
        return {spec.name: output for spec, output in zip(self.buckets[index].outputs, outputs, strict=True)}

    def warmup(self) -> dict[str, float]:
        """Run every bucket once on its defaults or zeros, then reset the states; seconds by bucket name.

        The first run of a graph loads code and reads weights, so it may take up to ``start_timeout``.
        """
        seconds = {}
        for index, bucket in enumerate(self.buckets):
            inputs = {spec.name: lawful(spec) for spec in bucket.inputs if spec.default is None}
            begin = time.perf_counter()
            self._run(Route(index, inputs), self.start_timeout)
            seconds[bucket.name] = time.perf_counter() - begin
        self.reset_states()
        return seconds

    def _run(self, route: Route, timeout: float | None) -> list[Tensor]:
        bucket = self.buckets[route.bucket]
        with self._turn():
            ranks = self._started()
            ranks.settle()
            views = ranks.arena.inputs[route.bucket]
            for spec, view in zip(bucket.inputs, views, strict=True):
                fill(view, spec, route.inputs.get(spec.name))
            ranks.exchange(Kind.STEP, route.bucket, timeout=timeout)
            # Copies, made while the lock is held: the next call overwrites the arena.
            return [output.clone() for output in cut(bucket, route.inputs, ranks.arena.outputs[route.bucket])]

    def reset_states(self) -> None:
        """Put every state of every rank back to its traced value."""
        with self._turn():
            if self._ranks is not None:
                self._ranks.check()
                self._ranks.exchange(Kind.RESET)

    def cut_weights(self, weights: Weights, *, strict: bool = True, tag: str | None = None) -> NewWeights:
        """What :meth:`update_weights` does first and takes longest for: check weights and cut them for every rank.

        Nothing changes yet, and the ranks go on meanwhile. Who does not hand the result on closes it.
        """
        return NewWeights(WeightUpdate(self.manifest, weights, strict=strict, tag=tag))

    def update_weights(self, weights: Weights | NewWeights, *, strict: bool = True, tag: str | None = None) -> None:
        """Swap the weights of every rank in place, between two calls, without compiling anything.

        ``weights`` holds logical (unsharded) tensors by name: a mapping, a WeightSource, the path of a safetensors
        file or directory, a folder that ``save_checkpoint`` wrote into at any degree (``tag``: which checkpoint;
        default: the newest complete one), a model in training of degree 1, or what :meth:`cut_weights` returned.
        They are cut for each rank through the manifest's layout and converted to the traced floating-point type.
        ``strict`` wants all of them and no other; without it, any part of them.
        States stay as they are. ``restart`` keeps the new weights; the artifact on disk keeps the old.

        Raises WeightSchemaError listing what differs, or when the weights are inlined; CheckpointError for files that
        cannot be read. Nothing has changed then. RankFailedError when a rank failed with only some of them replaced:
        the ranks have been ended, and ``restart`` starts them with the old weights.
        """
        new = weights if isinstance(weights, NewWeights) else self.cut_weights(weights, strict=strict, tag=tag)
        with self._turn():
            self._swaps.swap(self._started(), new)

    def load_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> None:
        """Put a LoRA adapter into ``slot`` (1 to the slots that were traced), between two calls; nothing is compiled.

        ``folder`` holds PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``; None empties the slot. Rows
        of a batch pick their slot by the input ``adapter``. ``restart`` keeps the adapter.

        Raises AdapterError when the adapter or the slot does not fit; nothing has changed then.
        """
        self.update_weights(self.cut_adapter(slot, folder))

    def cut_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> NewWeights:
        """What :meth:`load_adapter` does first, as :meth:`cut_weights` for weights: the ranks go on meanwhile."""
        from nxd_infer.trace.adapters import AdapterUpdate

        return NewWeights(AdapterUpdate(self.manifest, slot, folder))

    def updated_weights(self, rank: int) -> dict[str, Tensor]:
        """A rank's weights that differ from the artifact's since ``update_weights``, memory-mapped, by name."""
        with self._turn():
            return self._swaps.tensors(rank)

    def health(self) -> list[RankHealth]:
        """Every rank: pid, alive, steps, collectives, age of the last step. Takes no lock; empty before the start."""
        ranks = self._ranks
        return ranks.health() if ranks is not None else []

    # --- what a model of processes cannot do ---

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise ArtifactError("a TensorParallelModel owns processes and cannot be copied; load the artifact again")

    def __reduce__(self) -> NoReturn:
        raise ArtifactError("a TensorParallelModel cannot be pickled; use parallel_model_save and parallel_model_load")


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputMismatchError(f"{name} is a positive number of seconds, got {value!r}")


TensorParallelNeuronModel = TensorParallelModel
"""The name that existing code imports."""


def _load_kernel(artifact: LoadedArtifact) -> Any:
    """The user's bucket kernel (TorchScript), or None."""
    file = artifact.bucket_kernel_file
    if file is None:
        return None
    try:
        return torch.jit.load(str(file))
    except RuntimeError as error:
        raise ArtifactCorruptError(f"{file.name} is not a TorchScript bucket kernel: {error}") from error


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
