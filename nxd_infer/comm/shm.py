"""Collectives over shared memory, for CPU ranks on one host: the transport of compiled graphs.

The parent creates one segment per group (a memfd: nothing is left behind, and ``/dev/shm`` may be tiny) and passes its
descriptor to the group's ranks. The native operators do the work. The parent watches the same segment: native code
advances every rank's counters, even while a graph runs and holds the GIL.

A rank that waits longer than the timeout, or for a process that has ended, marks the segment as failed. From then on
every call on every rank raises the same message, so no rank continues out of step.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import CollectiveError, CollectiveTimeoutError, ParallelConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.comm.protocol import NativeOperators
    from nxd_infer.context import ParallelContext


DEFAULT_CAPACITY = 1 << 20
"""Bytes of one rank's slot. Larger tensors are sent in pieces of this size."""
DEFAULT_TIMEOUT = 30.0
MAIL_CAPACITY = 1 << 16
MAX_DEGREE = 64

# The layout of csrc/operators/collectives/segment.h.
_MAGIC = 0x31304D485344584E
_PAGE = 4096
_HEADER = struct.Struct("<QIIQQ")
_HEADER_BYTES = 512
_BLOCK_BYTES = 256
_COUNTER = struct.Struct("<Q")
_COUNTERS_AT = 128
_MAILBOX_BYTES = 128

_MISSING = re.compile(r"nxd: rank\(s\) \[([\d, ]*)\] did not reach")


def create_segment(degree: int, capacity: int = DEFAULT_CAPACITY) -> int:
    """Create the shared memory of a group of ``degree`` ranks and return its descriptor; the caller closes it.

    ``capacity`` is in bytes and rounded up to pages; untouched memory costs nothing. Pass the descriptor to the ranks'
    processes (``subprocess`` with ``pass_fds``); each passes it to :class:`ShmCollectives` or ``comm_init``.
    """
    if not 1 <= degree <= MAX_DEGREE:
        raise ParallelConfigError(f"shared memory connects 1 to {MAX_DEGREE} ranks, got {degree}")
    capacity = _pages(max(capacity, degree * 64))
    fd = os.memfd_create(f"nxd-collectives-{degree}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _segment_bytes(degree, capacity))
        os.pwrite(fd, _HEADER.pack(_MAGIC, degree, 0, capacity, MAIL_CAPACITY), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def collectives_passed(segment: mmap.mmap, place: int) -> int:
    """Return how many collectives the rank at ``place`` of the group has passed, from a mapping of its segment."""
    return _COUNTER.unpack_from(segment, _HEADER_BYTES + place * _BLOCK_BYTES + _COUNTERS_AT)[0]


class ShmCollectives:
    """:class:`~nxd_infer.comm.protocol.Collectives` over one segment per axis, through a native library."""

    def __init__(
        self,
        library: NativeOperators,
        context: ParallelContext,
        segments: Mapping[str, int],
        *,
        timeout: float = DEFAULT_TIMEOUT,
        scope: str = "",
    ):
        """Connect this rank to its group on each axis in ``segments`` (axis name to descriptor, which the caller still
        owns). ``timeout``: seconds that a collective waits for its peers. ``scope`` separates groups of the same axis
        in one process; those of compiled graphs have none.

        Raises CollectiveError if a descriptor is not a segment of that degree, or an axis is already connected.
        """
        self._library = library
        self._context = context
        self._scope = scope
        self._degrees = {axis: context.axis(axis).degree for axis in segments}
        self._ops = {name: library.op(name) for name in library.ops}
        self._connected: list[str] = []
        try:
            for axis, fd in segments.items():
                here = context.axis(axis)
                with self._typed_errors(axis):
                    self._ops["comm_init"](axis + scope, fd, here.rank, here.degree, 0, timeout)
                self._connected.append(axis)
        except BaseException:
            self.close()
            raise

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        return self._run("all_reduce", axis, x, op, self._degree(axis))

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("all_gather", axis, x, dim, self._degree(axis))

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("reduce_scatter", axis, x, dim, self._degree(axis))

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        here = self._context.axis(axis)
        return self.all_gather(x[None], axis, 0).unflatten(1, (here.degree, -1))[:, here.rank].flatten(0, 1)

    def broadcast(self, x: Tensor, axis: str, src: int = 0) -> Tensor:
        return self._run("broadcast", axis, x, src, self._degree(axis))

    def send(self, x: Tensor, axis: str, dst: int) -> None:
        self._run("send", axis, x, dst)

    def recv(self, x: Tensor, axis: str, src: int) -> Tensor:
        return self._run("recv", axis, x, src)

    def barrier(self, axis: str) -> None:
        with self._typed_errors(axis):
            self._ops["barrier"](axis + self._scope)

    def _run(self, name: str, axis: str, x: Tensor, *arguments: Any) -> Any:
        with self._typed_errors(axis):
            return self._ops[name](x.detach(), axis + self._scope, *arguments)

    def close(self) -> None:
        """Disconnect this process; the memory is freed once every process has disconnected."""
        while self._connected:
            self._ops["comm_close"](self._connected.pop() + self._scope)

    def _degree(self, axis: str) -> int:
        return self._degrees.get(axis, 0) or self._context.axis(axis).degree

    @contextmanager
    def _typed_errors(self, axis: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            typed = _typed_error(str(error).replace(f"{axis}{self._scope}'", f"{axis}'"))
            if isinstance(typed, CollectiveTimeoutError):
                group = self._context.axis(axis).ranks
                typed.ranks = tuple(group[place] for place in typed.ranks if place < len(group))
            raise typed from error


def _typed_error(text: str) -> CollectiveError:
    """Return the typed error for a native operator's message: CollectiveTimeoutError if ranks are missing.

    ``ranks`` of the result are indices on the axis, as in the message.
    """
    start = text.find("nxd: ")
    message = text[start:].splitlines()[0] if start >= 0 else text
    missing = _MISSING.search(message)
    if missing is None:
        return CollectiveError(message)
    return CollectiveTimeoutError(message, tuple(int(part) for part in missing.group(1).split(",") if part.strip()))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _segment_bytes(degree: int, capacity: int) -> int:
    signals = _pages(_HEADER_BYTES + degree * _BLOCK_BYTES)
    mail = _pages(signals + degree * degree * _MAILBOX_BYTES)
    return _pages(mail + degree * degree * MAIL_CAPACITY) + 2 * degree * capacity
