"""How the caller's process and its ranks talk: fixed binary records over a socket, tensors in shared memory.

A *record* starts one thing on one rank (a step in a bucket, a reset, ...) or answers it. Records travel over a
``SOCK_SEQPACKET`` Unix socket pair: boundaries are kept, a peer's end is noticed, and file descriptors can be passed.

The *arena* is one memfd, laid out from the manifest alone, so that both sides compute the same offsets:

====================  ============================================================================
a counter page        per rank: steps begun, steps finished, clock of the last begin (nanoseconds)
the input region      every bucket's inputs, each aligned to 64 bytes; buckets overlay each other
the output region     every bucket's outputs, likewise; written by rank 0
====================  ============================================================================

Regions start on page boundaries; a rank maps the input region read-only, so a graph that wrote to its inputs, which
all ranks share, would fault rather than corrupt them silently.
"""

from __future__ import annotations

import array
import enum
import fcntl
import math
import mmap
import os
import select
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nxd_infer.trace.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import torch

ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_MAGIC = 0x4E584431
_REQUEST = struct.Struct("<IHHQ")
_RESPONSE = struct.Struct("<IHHQQI")
_MAX_TEXT = 48 << 10
_COUNTERS = 8
"""Eight 64-bit counters a rank: one cache line."""
AWAKE_SECONDS = 0.005
"""How long a rank that has answered stays awake for the next request; between steps of decoding pass 0.1 to 0.4 ms."""


class Kind(enum.IntEnum):
    """What a record asks for."""

    START = 0
    STEP = 1
    RESET = 2
    PREPARE_WEIGHTS = 3
    COMMIT_WEIGHTS = 4
    ABORT_WEIGHTS = 5
    STOP = 6


@dataclass(frozen=True)
class Request:
    kind: Kind
    bucket: int
    sequence: int


@dataclass(frozen=True)
class Response:
    """``ok`` or the text of what went wrong; ``nanoseconds`` is how long the rank worked on it."""

    ok: bool
    kind: Kind
    sequence: int
    nanoseconds: int
    text: str


class ChannelClosed(Exception):
    """The peer's end is gone."""


class Channel:
    """One end of the socket between the caller's process and one rank."""

    def __init__(self, end: socket.socket):
        self.socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    # --- the caller's end ---

    def send_request(self, request: Request, fds: tuple[int, ...] = ()) -> None:
        data = _REQUEST.pack(_MAGIC, request.kind, request.bucket, request.sequence)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive_response(self) -> Response:
        """The next answer; call it when ``poll`` says there is one. Raises ChannelClosed at the peer's end."""
        try:
            data = self.socket.recv(_RESPONSE.size + _MAX_TEXT)
        except ConnectionResetError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        magic, ok, kind, sequence, nanoseconds, length = _RESPONSE.unpack_from(data)
        if magic != _MAGIC or len(data) != _RESPONSE.size + length:
            raise ChannelClosed
        text = data[_RESPONSE.size :].decode("utf-8", "replace")
        return Response(bool(ok), Kind(kind), sequence, nanoseconds, text)

    # --- the rank's end ---

    def receive_request(self) -> tuple[Request, list[int]] | None:
        """Wait for the next request and the descriptors sent with it; None when the caller is gone.

        For a moment it is awaited awake: a model that decodes is asked again at once, and a core that has gone to sleep
        wakes late. The host of a virtual machine, besides, puts a core that another one wakes next to that one, where
        the two share one way to memory.
        """
        awake = time.monotonic() + AWAKE_SECONDS
        while not self._poll.poll(0) and time.monotonic() < awake:
            os.sched_yield()  # the caller may need this core to ask
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_REQUEST.size, socket.CMSG_SPACE(4 * 4))
        except ConnectionResetError:
            return None
        if len(data) != _REQUEST.size:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
        magic, kind, bucket, sequence = _REQUEST.unpack(data)
        if magic != _MAGIC:
            return None
        return Request(Kind(kind), bucket, sequence), list(fds)

    def send_response(self, request: Request, nanoseconds: int, error: str | None = None) -> None:
        text = (error or "").encode("utf-8", "replace")
        if len(text) > _MAX_TEXT:
            text = text[: _MAX_TEXT // 2] + b"\n...\n" + text[-_MAX_TEXT // 2 + 16 :]
        head = _RESPONSE.pack(_MAGIC, error is None, request.kind, request.sequence, nanoseconds, len(text))
        self.socket.sendmsg([head + text], [], socket.MSG_NOSIGNAL)


def wait_readable(fds: list[int], seconds: float) -> list[int]:
    """Which of ``fds`` can be read or are at their end, waiting at most ``seconds``. Other threads run meanwhile."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(min(max(0.0, seconds), 1e6) * 1000)]


@dataclass(frozen=True)
class ArenaLayout:
    """Where everything lies in the arena; a pure function of the manifest."""

    inputs: list[list[int]]
    """``inputs[bucket][input]``: offset in the input region."""
    outputs: list[list[int]]
    input_start: int
    input_size: int
    output_start: int
    output_size: int

    @property
    def size(self) -> int:
        return self.output_start + self.output_size


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _offsets(specs: list[TensorSpec]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _round_up(spec.nbytes, ALIGNMENT)
    return offsets, end


def arena_layout(manifest: Manifest) -> ArenaLayout:
    inputs = [_offsets(list(bucket.inputs)) for bucket in manifest.buckets]
    outputs = [_offsets(list(bucket.outputs)) for bucket in manifest.buckets]
    counters = _round_up(manifest.tp_degree * _COUNTERS * 8, _PAGE)
    input_size = _round_up(max([end for _, end in inputs] + [1]), _PAGE)
    output_size = _round_up(max([end for _, end in outputs] + [1]), _PAGE)
    return ArenaLayout(
        inputs=[offsets for offsets, _ in inputs],
        outputs=[offsets for offsets, _ in outputs],
        input_start=counters,
        input_size=input_size,
        output_start=counters + input_size,
        output_size=output_size,
    )


def create_arena(layout: ArenaLayout) -> int:
    """A memfd of the arena's size that nobody can resize. It has no name and ends with its last holder."""
    fd = os.memfd_create("nxd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Arena:
    """The arena mapped into this process, and its tensors.

    ``writable_inputs`` belongs to the caller's process; ranks map the inputs read-only.
    """

    def __init__(self, fd: int, manifest: Manifest, *, writable_inputs: bool):
        self.layout = layout = arena_layout(manifest)
        self._buckets = manifest.buckets
        self._counters = mmap.mmap(fd, layout.input_start)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable_inputs else 0)
        self._inputs = mmap.mmap(fd, layout.input_size, mmap.MAP_SHARED, protection, offset=layout.input_start)
        self._outputs = mmap.mmap(fd, layout.output_size, offset=layout.output_start)
        self._words = memoryview(self._counters).cast("Q")

    @cached_property
    def inputs(self) -> list[list[torch.Tensor]]:
        """Every bucket's inputs, as tensors over the shared memory."""
        return self._laid_out(_view, self._inputs, self.layout.inputs, [bucket.inputs for bucket in self._buckets])

    @cached_property
    def outputs(self) -> list[list[torch.Tensor]]:
        return self._laid_out(_view, self._outputs, self.layout.outputs, [bucket.outputs for bucket in self._buckets])

    @cached_property
    def input_arrays(self) -> list[list[np.ndarray]]:
        """As ``inputs``, for a process without torch. TypeError where NumPy lacks a type."""
        return self._laid_out(_array, self._inputs, self.layout.inputs, [bucket.inputs for bucket in self._buckets])

    @cached_property
    def output_arrays(self) -> list[list[np.ndarray]]:
        return self._laid_out(_array, self._outputs, self.layout.outputs, [bucket.outputs for bucket in self._buckets])

    @staticmethod
    def _laid_out(view: Any, memory: mmap.mmap, places: Sequence[Sequence[int]], specs: Sequence[Sequence[Any]]) -> Any:
        """What ``view`` makes of every bucket's pieces of ``memory``."""
        return [
            [view(memory, place, spec) for place, spec in zip(row, bucket, strict=True)]
            for row, bucket in zip(places, specs, strict=True)
        ]

    def begin(self, rank: int, clock: int) -> None:
        """Rank ``rank`` starts a step at ``clock`` (monotonic nanoseconds)."""
        place = rank * _COUNTERS
        self._words[place + 2] = clock
        self._words[place] += 1

    def finish(self, rank: int) -> None:
        self._words[rank * _COUNTERS + 1] += 1

    def progress(self, rank: int) -> tuple[int, int, int]:
        """Steps begun, steps finished, and the clock of the last begin (0 before the first)."""
        place = rank * _COUNTERS
        return self._words[place], self._words[place + 1], self._words[place + 2]


def _view(buffer: mmap.mmap, offset: int, spec: TensorSpec) -> torch.Tensor:
    """A contiguous tensor over shared memory; the tensor keeps the mapping alive."""
    import torch

    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable": that is what the input region is for
        flat = torch.frombuffer(buffer, dtype=spec.torch_dtype, count=math.prod(spec.shape), offset=offset)
    return flat.view(spec.shape)


def _array(buffer: mmap.mmap, offset: int, spec: TensorSpec) -> np.ndarray:
    """As ``_view``, an array."""
    import numpy as np

    return np.ndarray(spec.shape, np.dtype(spec.dtype), buffer, offset if spec.nbytes else 0)
