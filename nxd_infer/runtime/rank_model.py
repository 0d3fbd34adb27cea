"""RankModel: start, call and end an artifact's ranks, from a process without torch.

Importing torch takes a second and 200 MB, and starting ranks needs no arithmetic. So a server that generates uses this
model, whose inputs and outputs are NumPy arrays. :class:`~nxd_infer.runtime.model.TensorParallelModel` adds what a
user's program needs: tensors, routing, and degree 1 in its own process.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nxd_infer.artifact.manifest import WEIGHTS_LATER_REQUIREMENT, BucketSpec, InputSpec, Manifest
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.errors import BucketError, InputMismatchError, ModelClosedError, WeightSchemaError
from nxd_infer.runtime.ipc import InputBlock, Kind
from nxd_infer.runtime.ranks import CallLock, PendingStep, RankHealth, Ranks, free_side
from nxd_infer.runtime.supervisor.cores import default_threads
from nxd_infer.runtime.supervisor.supervisor import Supervisor
from nxd_infer.runtime.time_bounds import Bounds, check_seconds
from nxd_infer.runtime.updates.swap import WeightSwaps
from nxd_infer.util.machine import check_degree, processors
from nxd_infer.util.options import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.checkpoint.source import Weights
    from nxd_infer.runtime.updates.weights import NewWeights


_Model = TypeVar("_Model", bound="RankModel")


class RankModel:
    """The ranks of ``artifact`` in separate processes; for arguments, calls and errors see TensorParallelModel.

    ``before_load`` is called at the first start, while a process imports torch for the ranks. No rank reads the
    artifact before it returns, so it can verify the files.
    """

    arrays = True
    """Whether ``run_bucket`` accepts NumPy arrays, and then returns them."""

    def __init__(
        self,
        artifact: LoadedArtifact,
        *,
        call_timeout: float | None = None,
        start_timeout: float | None = None,
        threads_per_rank: int | None = None,
        before_load: Callable[[], None] | None = None,
    ):
        if threads_per_rank is not None:
            whole_number("threads_per_rank", threads_per_rank, InputMismatchError, minimum=1)
        degree = artifact.manifest.world_size
        check_degree(degree)
        self.artifact = artifact
        self.bounds = Bounds(
            artifact.manifest.buckets, artifact.weight_bytes, call_timeout, start_timeout, artifact.manifest.pp_degree
        )
        self.in_process = False
        self.threads_per_rank = threads_per_rank or default_threads(degree, artifact.manifest.target.get("threads"))
        self._before_load = before_load
        self._index = {bucket.name: i for i, bucket in enumerate(artifact.manifest.buckets)}
        self._lock = CallLock()
        self._ranks: Ranks | None = None
        self._closed = False
        self._longest_start = 0.0
        self._finalizer: weakref.finalize | None = None
        self._swaps = WeightSwaps(artifact.manifest, self.bounds)

    # --- properties ---

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

    @property
    def pp_degree(self) -> int:
        return self.artifact.manifest.pp_degree

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.artifact.manifest.world_size

    @property
    def spare_cores(self) -> int:
        """Number of cores that this process may use and that the ranks' threads leave free."""
        return processors() - self.world_size * self.threads_per_rank

    @property
    def lead_cores(self) -> list[int]:
        """The cores of the first threads of pinned ranks with several threads: delaying that thread delays its whole
        rank, whereas the others can take over one another's work."""
        return getattr(self._ranks, "lead_cores", [])

    def bucket_table(self) -> str:
        """Return the buckets as text."""
        return bucket_table(self.buckets)

    # --- lifecycle ---

    def start(self: _Model) -> _Model:
        """Start the ranks unless they run; return the model. Raises the error that kept a rank from starting."""
        with self._lock.take():
            self._started()
        return self

    def close(self) -> None:
        """End the ranks. Later calls raise ModelClosedError; ``restart`` starts them again."""
        if os.getpid() != self._lock.owner:
            return
        self._closed = True
        ranks = self._ranks
        if ranks is None:
            return  # or about to start: ``_started`` checks again afterwards
        if self.in_process:
            with self._lock.lock:  # a graph running in this process keeps its memory until it returns
                ranks.close()
        else:
            ranks.close()  # without the lock, because it must end a call that is stuck

    def restart(self: _Model) -> _Model:
        """Restart the ranks, whatever their state. States begin as traced; updated weights are kept."""
        self.close()
        with self._lock.take():
            self._ranks = None
            self._closed = False
            self._started()
        return self

    def __enter__(self: _Model) -> _Model:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self, given: Collection[str] = ()) -> Ranks:
        """Return the running ranks; the caller holds the lock and, if weights are missing, has ``given`` ones."""
        missing = self.missing_weights().difference(given)
        if missing:
            raise WeightSchemaError(
                f"the model was saved without its weights, and {len(missing)} are still missing "
                f"({', '.join(sorted(missing)[:4])}): give them with update_weights(), or set_weights() of an NxDModel"
            )
        if self._ranks is not None:
            self._ranks.check()
            return self._ranks
        if self._closed:
            raise ModelClosedError("the model was closed; call restart() to start its ranks again")
        ranks = self._new_ranks()
        try:
            self._ranks = ranks
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, ranks.close)
            if self._closed:  # close() was called before there was anything to close
                raise ModelClosedError("the model was closed; call restart() to start its ranks again")
            begin = time.monotonic()
            ranks.start()
            # A later start may find torch imported, and the one after it may not.
            self._longest_start = max(self._longest_start, time.monotonic() - begin)
            self.bounds.loaded(self._longest_start)
            self._before_load = None
            self._swaps.replay(ranks)
        except BaseException:
            ranks.close()
            self._ranks = None  # everything was cleaned up; the next call tries again
            raise
        return ranks

    def _new_ranks(self) -> Ranks:
        return Supervisor(
            self.artifact,
            threads=self.threads_per_rank,
            bounds=self.bounds,
            before_load=self._before_load,
        )

    def missing_weights(self) -> set[str]:
        """Return the names of the weights that the artifact does not hold and nobody has given yet."""
        if WEIGHTS_LATER_REQUIREMENT not in self.manifest.requires:
            return set()
        return {spec.name for spec in self.manifest.weights if spec.kind == "parameter"} - self._swaps.names

    # --- calls ---

    def run_bucket(
        self, name: str, inputs: Mapping[str, np.ndarray], *, timeout: float | None = None
    ) -> dict[str, np.ndarray]:
        """Run bucket ``name`` with arrays of exactly its shapes. Returns outputs by name.

        Inputs with a default may be omitted; an :class:`InputBlock` of the bucket is cheapest. ``timeout``: seconds for
        this call, overriding the derived limit.
        """
        index = self._bucket_index(name, timeout)
        block = InputBlock.of(self.buckets[index], inputs)
        block.check()
        with self._lock.take():
            return self._begin(index, block, timeout).take(copy=True)

    def begin_bucket(
        self, name: str, inputs: Mapping[str, np.ndarray], *, timeout: float | None = None, checked: bool = False
    ) -> PendingStep:
        """Like :meth:`run_bucket`, without waiting for the outputs: call ``result()`` of the returned object.

        The ranks run steps in the order in which they begin. At most ``pp_degree + 1`` may be begun and not taken;
        another one raises StepsPendingError, as do calls. ``inputs`` may be changed once this returns. ``checked``: the
        caller guarantees that every value of an InputBlock is within its input's limits.
        """
        index = self._bucket_index(name, timeout)
        block = InputBlock.of(self.buckets[index], inputs)
        if not (checked and block is inputs):
            block.check()
        with self._lock.take():
            return self._begin(index, block, timeout)

    def _begin(self, index: int, block: InputBlock, timeout: float | None) -> PendingStep:
        ranks = self._started()
        number, side = free_side(ranks)
        side.input_bytes[index][:] = block.bytes
        side.last = ranks.begin(Kind.STEP, index, number, timeout=self._limit(index, timeout))
        return PendingStep(ranks, self._lock, side, index, self.bounds)

    def _limit(self, index: int, timeout: float | None) -> float:
        return self.bounds.call(index) if timeout is None else timeout

    def _bucket_index(self, name: str, timeout: float | None) -> int:
        if timeout is not None:
            check_seconds("timeout", timeout)
        index = self._index.get(name)
        if index is None:
            raise BucketError(f"there is no bucket {name!r}. The buckets:\n{self.bucket_table()}")
        return index

    def reset_states(self) -> None:
        """Reset every state of every rank to its traced value."""
        with self._lock.take():
            if self._ranks is not None:
                self._ranks.check()
                self._ranks.exchange(Kind.RESET)

    def cut_weights(self, weights: Weights, *, strict: bool = True, tag: str | None = None) -> NewWeights:
        """Do the first and slowest part of :meth:`update_weights`: check weights and shard them for every rank.

        Nothing changes yet, and the ranks continue meanwhile. The caller must close the result or pass it on.
        """
        from nxd_infer.runtime.updates.weights import NewWeights, WeightUpdate  # slow: torch

        return NewWeights(WeightUpdate(self.manifest, weights, strict=strict, tag=tag))

    def update_weights(self, weights: Weights | NewWeights, *, strict: bool = True, tag: str | None = None) -> None:
        """Swap the weights of every rank in place, between two calls, without compiling anything.

        ``weights`` holds logical (unsharded) tensors by name: a mapping, a WeightSource, the path of a safetensors
        file or directory, a folder of ``save_checkpoint`` at any degree (``tag``: the checkpoint; default: the newest
        complete one), a model in training of degree 1, or the result of :meth:`cut_weights`.
        They are sharded for each rank using the manifest's layout and converted to the traced floating-point dtype.
        ``strict`` requires all of them and no others; without it, any subset is accepted.
        States stay as they are. ``restart`` keeps the new weights; the artifact on disk keeps the old ones.

        Raises WeightSchemaError listing what differs, or if the weights are inlined; CheckpointError for files that
        cannot be read. Then nothing has changed. RankFailedError if a rank failed with only some weights replaced: the
        ranks have been ended, and ``restart`` starts them with the old weights.
        """
        from nxd_infer.runtime.updates.weights import NewWeights  # slow: torch

        new = weights if isinstance(weights, NewWeights) else self.cut_weights(weights, strict=strict, tag=tag)
        with self._lock.take():
            ranks = self._started(new.names)
            ranks.settle()  # so that a failing step is not blamed on the weights
            self._swaps.swap(ranks, new)

    def load_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> None:
        """Load a LoRA adapter into ``slot`` (1 to the number of traced slots), between two calls; compiles nothing.

        ``folder`` holds PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``; None empties the slot. Rows
        of a batch choose their slot by the input ``adapter``. ``restart`` keeps the adapter.

        Raises AdapterError if the adapter or the slot does not fit; then nothing has changed.
        """
        self.update_weights(self.cut_adapter(slot, folder))

    def cut_adapter(self, slot: int, folder: str | os.PathLike[str] | None) -> NewWeights:
        """Do the first part of :meth:`load_adapter`, like :meth:`cut_weights`; the ranks continue meanwhile."""
        from nxd_infer.runtime.updates.adapters import AdapterUpdate  # slow: torch
        from nxd_infer.runtime.updates.weights import NewWeights

        return NewWeights(AdapterUpdate(self.manifest, slot, folder))

    def updated_weights(self) -> list[dict[str, Tensor]]:
        """Return each rank's weights that ``update_weights`` has changed, memory-mapped, by name: all of one moment."""
        with self._lock.take():
            return [self._swaps.tensors(rank) for rank in range(self.world_size)]

    def health(self) -> list[RankHealth]:
        """Return pid, alive, steps, collectives and last step's age per rank. Takes no lock; empty before the start."""
        ranks = self._ranks
        return ranks.health() if ranks is not None else []

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the ranks: that of the first rank that failed, until ``restart``; None if there is none.
        Takes no lock."""
        ranks = self._ranks
        return ranks.failure if ranks is not None else None


def takes_arrays(manifest: Manifest) -> bool:
    """Whether NumPy arrays suffice for an artifact's calls: for example, only torch has bfloat16."""
    specs = [spec for bucket in manifest.buckets for spec in (*bucket.inputs, *bucket.outputs)]
    return all(hasattr(np, dtype) for dtype in {spec.dtype for spec in specs})


def bucket_table(buckets: Sequence[BucketSpec]) -> str:
    """Format the buckets, one per line; dimensions that may be smaller are marked ``<=``."""
    width = max((len(bucket.name) for bucket in buckets), default=0)
    lines = []
    for bucket in buckets:
        inputs = ", ".join(f"{spec.name}: {spec.dtype}{shape_text(spec)}" for spec in bucket.inputs)
        lines.append(f"  {bucket.name:<{width}}  {inputs}")
    return "\n".join(lines)


def shape_text(spec: InputSpec) -> str:
    """Return the allowed shape of an input: ``[1, <=128]``."""
    return "[" + ", ".join(f"<={size}" if dim in spec.pad else str(size) for dim, size in enumerate(spec.shape)) + "]"
