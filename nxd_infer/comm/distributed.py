"""Collectives over ``torch.distributed`` process groups (gloo on CPU, nccl on CUDA), with a timeout on every wait.

Ranks of a gloo group on one host can use shared memory instead of sockets: the group's first rank creates the segment,
and the others open it through its ``/proc/PID/fd``. Either all ranks of the group connect, or none does.

:func:`nxd_infer.parallel_state.initialize_model_parallel` creates the groups. A failed operation leaves a group
unusable, so the first failure is remembered and every later call raises it again at once.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  (documented, not in __all__)

from nxd_infer.comm.protocol import Collectives, NativeOperators
from nxd_infer.comm.shm import MAX_DEGREE, ShmCollectives, create_segment
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError, CollectiveTimeoutError
from nxd_infer.processes.state import process_start, process_state

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
HALF = (torch.bfloat16, torch.float16)
EXIT_GRACE = 3.0
"""Seconds between a peer's closed connection and the end of its process."""
LEAVE_SECONDS = 5.0
"""Seconds that a process waits for gloo's threads when it ends."""
UNKNOWN_HOST = -1


def join_on_this_host(context: ParallelContext, file: str, timeout: float) -> DistributedCollectives:
    """Start gloo among the ranks of this host, which meet in ``file``, and return their transport.

    ``timeout`` bounds the meeting and every collective, in seconds.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=FileStore(file, context.world_size),
        rank=context.rank,
        world_size=context.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return DistributedCollectives(context, {"tp": dist.distributed_c10d._get_default_group()}, timeout)


def new_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | int | None:
    """Call ``dist.new_group()``: torch_xla's takes fewer options, but its own groups need it."""
    if dist.get_backend() != "xla":
        return dist.distributed_c10d.new_group(list(ranks), **options)
    return dist.new_group(list(ranks), timeout=options.get("timeout"))


class DistributedCollectives:
    """:class:`~nxd_infer.comm.protocol.Collectives` over one process group per axis.

    bfloat16 and float16 sums are accumulated in float32. Every rank gets bit-equal results of ``all_reduce``.
    """

    def __init__(self, context: ParallelContext, groups: Mapping[str, dist.ProcessGroup], timeout: float):
        """``groups`` has this rank's group for every axis of a degree above 1; ``timeout`` is theirs, in seconds."""
        self._context = context
        self._groups = dict(groups)
        self._timeout = timeout
        self._failure: CollectiveError | None = None
        self._peers: list[list[int]] = []
        self._shared: dict[str, ShmCollectives] = {}

    def exchange_identities(self, device: torch.device | None = None) -> None:
        """Exchange process identities with every rank of the world, so that errors can name a dead peer."""
        with contextlib.suppress(Exception):  # of earlier groups of these processes
            dist.distributed_c10d._get_default_store().delete_key(self._failed_key(self._context.rank))
        own = torch.tensor([_host_key(), os.getpid(), process_start(os.getpid())], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(own) for _ in range(self._context.world_size)]
        dist.all_gather(everyone, own)
        self._peers = [identity.tolist() for identity in everyone]

    def share_memory(self, library: NativeOperators | None) -> None:
        """Switch gloo groups whose ranks share this host to shared memory. All ranks call it.

        ``library`` is None on a rank without one. A group uses shared memory only if all of its ranks can.
        """
        for axis in self._groups:
            ranks = self._context.axis(axis).ranks
            hosts = {self._peers[rank][0] for rank in ranks}
            if self.backend(axis) == "gloo" and len(hosts) == 1 and UNKNOWN_HOST not in hosts:
                pid = self._peers[ranks[0]][1]
                shared = connect(self, self._context, axis, pid, library, self._timeout)
                if shared is not None:
                    self._shared[axis] = shared

    def shared(self, axis: str, x: Tensor) -> ShmCollectives | None:
        """Return the shared memory to use for ``x``, or None if it goes through the process group."""
        shared = self._shared.get(axis)
        return shared if shared is not None and x.device.type == "cpu" and x.dtype in DTYPES else None

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return the torch group of ``axis``; at degree 1, create a group of this rank alone."""
        group = self._groups.get(axis)
        if group is None:
            group = cast(dist.ProcessGroup, new_group([self._context.rank], use_local_synchronization=True))
            self._groups[axis] = group
        return group

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        if op not in REDUCTIONS:
            raise CollectiveError(f"all_reduce: operation {op!r} is not one of {sorted(REDUCTIONS)}")
        if x.dtype == torch.bool:
            if op == "sum":
                raise CollectiveError("all_reduce: booleans have no sum; use 'max' (any) or 'min' (all), or convert")
            return self.all_reduce(x.to(torch.uint8), axis, op).to(torch.bool)
        if (shared := self.shared(axis, x)) is not None:
            return self._remembering(lambda: shared.all_reduce(x, axis, op))
        if x.dtype in HALF and op == "sum":
            return self.all_reduce(x.float(), axis, op).to(x.dtype)
        y = x.clone(memory_format=torch.contiguous_format)
        self.run("all_reduce", axis, lambda group: dist.all_reduce(y, REDUCTIONS[op], group=group))
        return y

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        if (shared := self.shared(axis, x)) is not None:
            return self._remembering(lambda: shared.all_gather(x, axis, dim))
        degree = self._context.axis(axis).degree
        flat = as_bytes(x)
        parts = [torch.empty_like(flat) for _ in range(degree)]
        self.run("all_gather", axis, lambda group: dist.all_gather(parts, flat, group=group))
        return torch.cat([part.view(x.dtype).view(x.shape) for part in parts], dim)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        here = self._context.axis(axis)
        if x.shape[dim] % here.degree:
            raise CollectiveError(
                f"reduce_scatter: dimension {dim} of shape {tuple(x.shape)} does not divide by {here.degree} ranks"
            )
        if (shared := self.shared(axis, x)) is not None:
            return self._remembering(lambda: shared.reduce_scatter(x, axis, dim))
        if self.backend(axis) == "gloo":
            return self._gloo_reduce_scatter(x, axis, dim)
        wide = x.float() if x.dtype in HALF else x
        pieces = torch.cat([piece.contiguous().unsqueeze(0) for piece in wide.chunk(here.degree, dim)])
        y = torch.empty_like(pieces[0])
        self.run("reduce_scatter", axis, lambda group: dist.reduce_scatter_tensor(y, pieces, group=group))
        return y.to(x.dtype)

    def _gloo_reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """Send each peer its piece and sum the received pieces, in rank order.

        gloo's reduce-scatter is slower than its all-reduce; this moves half the bytes of an all-reduce.
        """
        degree = self._context.axis(axis).degree
        pieces = torch.stack(x.chunk(degree, dim))
        received = torch.empty_like(pieces)
        outgoing, incoming = as_bytes(pieces), as_bytes(received)
        self.run("reduce_scatter", axis, lambda group: dist.all_to_all_single(incoming, outgoing, group=group))
        return received.sum(0, dtype=torch.float32 if x.dtype in HALF else x.dtype).to(x.dtype)

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        outgoing, incoming = as_bytes(x), as_bytes(received)
        self.run("all_to_all", axis, lambda group: dist.all_to_all_single(incoming, outgoing, group=group))
        return received

    def broadcast(self, x: Tensor, axis: str, src: int = 0) -> Tensor:
        if (shared := self.shared(axis, x)) is not None:
            return self._remembering(lambda: shared.broadcast(x, axis, src))
        here = self._context.axis(axis)
        flat = as_bytes(x).clone()
        self.run("broadcast", axis, lambda group: dist.broadcast(flat, here.ranks[src], group=group))
        return flat.view(x.dtype).view(x.shape)

    def send(self, x: Tensor, axis: str, dst: int) -> None:
        target = self._context.axis(axis).ranks[dst]
        self.run("send", axis, lambda group: dist.send(as_bytes(x), target, group=group))

    def recv(self, x: Tensor, axis: str, src: int) -> Tensor:
        source = self._context.axis(axis).ranks[src]
        flat = torch.empty_like(as_bytes(x))
        self.run("recv", axis, lambda group: dist.recv(flat, source, group=group))
        return flat.view(x.dtype).view(x.shape)

    def barrier(self, axis: str) -> None:
        self.run("barrier", axis, lambda group: dist.barrier(group=group))

    def give_up(self, reason: str) -> None:
        """Leave all groups for ever because this rank failed, so that no peer waits for it, and let peers know why."""
        failure = f"rank {self._context.rank} gave up: {reason.strip().splitlines()[-1] if reason.strip() else reason}"
        self._failure = self._failure or CollectiveError(failure)
        with contextlib.suppress(Exception):  # whoever holds the store may be gone
            dist.distributed_c10d._get_default_store().set(self._failed_key(self._context.rank), reason)
        with contextlib.suppress(Exception):  # a group that a lost peer has broken
            self.close()

    def why_given_up(self) -> dict[int, str]:
        """Return the reason of every rank that gave up, by rank."""
        reasons: dict[int, str] = {}
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            for rank in range(self._context.world_size):
                if store.check([self._failed_key(rank)]):
                    reasons[rank] = store.get(self._failed_key(rank)).decode(errors="replace")
        return reasons

    def _failed_key(self, rank: int) -> str:
        return f"nxd/failed/{rank}"  # the same on all ranks, unlike the name of their collectives

    def close(self) -> None:
        """Destroy the groups, except the default group, which belongs to its creator."""
        while self._shared:
            self._shared.popitem()[1].close()
        groups, self._groups = self._groups, {}
        for group in groups.values():
            if dist.is_initialized() and group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def backend(self, axis: str) -> str:
        """Return the library behind the group of ``axis``: gloo, nccl, ..."""
        return dist.get_backend(self.process_group(axis))

    def run(self, what: str, axis: str, action: Callable[[dist.ProcessGroup], object]) -> None:
        """Call ``action`` with the group of ``axis``, and turn its errors into typed ones."""
        self._raise_remembered()
        try:
            action(self.process_group(axis))
        except (RuntimeError, ValueError) as error:
            self._raise(what, axis, error)

    def _remembering(self, action: Callable[[], Tensor]) -> Tensor:
        """Run a collective over shared memory; if a peer is missing, later calls raise the same error."""
        self._raise_remembered()
        try:
            return action()
        except CollectiveTimeoutError as failure:
            self._failure = failure
            raise

    def _raise_remembered(self) -> None:
        if self._failure is not None:
            ranks = (self._failure.ranks,) if isinstance(self._failure, CollectiveTimeoutError) else ()
            raise type(self._failure)(*self._failure.args, *ranks)

    def _raise(self, what: str, axis: str, error: Exception) -> NoReturn:
        """Turn a transport's error into a typed one; only a lost or late peer makes the transport unusable."""
        text = _plain(error)
        lowered = text.lower()
        lost = any(sign in lowered for sign in ("timed out", "timeout", "connection", "socket", "peer", "aborted"))
        if not lost:
            raise CollectiveError(f"{what} on axis {axis!r} failed: {text}") from error
        # An ending process closes its sockets slightly before it counts as ended.
        deadline = time.monotonic() + EXIT_GRACE
        ranks, states = self._lost_ranks(axis)
        while not ranks and "timed out" not in lowered and time.monotonic() < deadline:
            time.sleep(0.02)
            ranks, states = self._lost_ranks(axis)
        missing = f"rank(s) {list(ranks)} ({'; '.join(states)})" if ranks else "a rank that could not be identified"
        failure = CollectiveTimeoutError(
            f"nxd: {missing} did not reach {what} on axis {axis!r} within {self._timeout:.1f} s: {text}", ranks
        )
        self._failure = failure
        raise failure from error

    def _lost_ranks(self, axis: str) -> tuple[tuple[int, ...], list[str]]:
        """Return the peers on ``axis`` whose process on this host has ended or is stopped."""
        host, lost, states = _host_key(), [], []
        for rank in self._context.axis(axis).ranks:
            if rank >= len(self._peers) or self._peers[rank][0] != host:
                continue
            _, pid, start = self._peers[rank]
            state = process_state(pid, start)
            if state in ("ended", "stopped"):
                lost.append(rank)
                states.append(f"pid {pid} {'has ended' if state == 'ended' else 'is stopped'}")
        return tuple(lost), states


def _plain(error: Exception) -> str:
    """Return the transport's message without its source location and advice."""
    text = str(error).strip().split("\n")[0] or type(error).__name__
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text).split(". This is typically")[0]


def as_bytes(x: Tensor) -> Tensor:
    """Return a flat uint8 view, so that every dtype can be transferred (gloo does not support bool)."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _host_key() -> int:
    """Return a number that is equal for processes that see each other's pids: same boot, same pid namespace."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return UNKNOWN_HOST
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def leave_at_exit() -> None:
    """Destroy gloo's groups when this process ends, so that gloo's threads end before the interpreter. Processes with
    NCCL keep their groups.

    A gloo thread that releases a collective's tensor later aborts the process: in one case of three, SIGABRT replaces
    the program's own error.
    """
    _leave_at_exit(os.getpid())


@functools.cache
def _leave_at_exit(owner: int) -> None:
    asked = threading.Event()

    def leave() -> None:
        asked.wait()
        with contextlib.suppress(Exception):  # the creator of the groups may be destroying them
            if dist.is_initialized() and "nccl" not in dist.get_backend_config():
                dist.destroy_process_group()

    leaving = threading.Thread(target=leave, name="nxd-leave", daemon=True)
    leaving.start()  # now: an ending interpreter cannot start threads (Python 3.12.0 to 3.12.2)

    def at_exit() -> None:
        if os.getpid() == owner:  # a forked child has neither the thread nor gloo's
            asked.set()
            leaving.join(LEAVE_SECONDS)  # a collective that was never awaited may hang on an ended rank

    atexit.register(at_exit)


DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that the native operators can sum."""


def connect(
    transport: Collectives,
    context: ParallelContext,
    axis: str,
    first_pid: int,
    library: NativeOperators | None,
    timeout: float,
) -> ShmCollectives | None:
    """Connect the ranks of ``axis``, which all call this; return None if one of them cannot.

    ``transport`` already connects them. ``first_pid`` is the process of the axis's first rank. ``library`` is None on a
    rank without one. ``timeout``: seconds that a collective waits for its peers.
    """
    here = context.axis(axis)
    if here.degree > MAX_DEGREE:
        return None
    descriptor, shared = -1, None
    if here.rank == 0 and library is not None:
        descriptor = create_segment(here.degree)
    try:
        number = int(transport.broadcast(torch.tensor(descriptor), axis))
        if number >= 0 and library is not None:
            with contextlib.suppress(OSError, CollectiveError):
                if here.rank > 0:
                    descriptor = os.open(f"/proc/{first_pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                scope = f"@{context.collectives}"
                shared = ShmCollectives(library, context, {axis: descriptor}, timeout=timeout, scope=scope)
        all_can = transport.all_reduce(torch.tensor(int(shared is not None)), axis, "min").item()
    finally:
        if descriptor >= 0:  # the others have opened it, or never will
            os.close(descriptor)
    if shared is not None and not all_can:
        shared.close()
        return None
    return shared
