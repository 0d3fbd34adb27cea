"""What the caller's process and its ranks share: the memory of the tensors, and the records of their socket.

The *arena* holds the tensors: one memfd, laid out from the manifest alone, so that both compute the same offsets.

====================  ============================================================================
a counter page        per rank: steps begun, steps finished, clock of the last begin and
                      time of all finished steps (nanoseconds)
the inputs, twice     every bucket's inputs, each aligned to 64 bytes; buckets overlay each other
the outputs, twice    every bucket's outputs, likewise; written by the first rank of the stage
                      that computes them
what is handed        with a pipeline: per side and tensor parallel rank, the values that every
                      bucket's stages hand to later ones
====================  ============================================================================

There are two *sides* of inputs and outputs, so that a step can be submitted while the previous one runs (with a
pipeline one more than it has stages); each step uses one of them, and untouched pages take no memory. Regions start on
page boundaries. A rank maps what it takes read-only, so a graph that wrote to its inputs, which all ranks share, would
fault instead of silently corrupting them.

A *record* starts one operation on one rank (a step in a bucket, a reset, ...) or answers it. Records are binary, of
fixed size, and travel over a ``SOCK_SEQPACKET`` Unix socket pair: boundaries are kept, a peer's end is noticed, and
file descriptors can be passed. A rank handles requests in order, so the next record may be sent before the last one is
answered.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, TensorSpec
from nxd_infer.errors import CollectiveTimeoutError, InputMismatchError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensors = Sequence[Sequence[torch.Tensor]]


ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_COUNTERS = 8
"""Eight 64-bit counters per rank: one cache line."""


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def _offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += _round_up(spec.nbytes, ALIGNMENT)
    return offsets, end


class Region:
    """Equal ``parts`` of the arena from ``start``; each has a place for every tensor of any one bucket."""

    def __init__(self, start: int, parts: int, specs: Iterable[Sequence[TensorSpec]]):
        """``specs[bucket]``: those of a bucket's tensors, in order."""
        self.specs = [list(row) for row in specs]
        offsets = [_offsets(row) for row in self.specs]
        self._places = [row for row, _ in offsets]
        self._ends = [end for _, end in offsets]
        self._part = _round_up(max(self._ends, default=0), _PAGE)
        self.start, self.end = start, start + parts * self._part

    def map(self, fd: int, *, writable: bool) -> Any:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = self.end - self.start
        return mmap.mmap(fd, size, mmap.MAP_SHARED, protection, offset=self.start) if size else bytearray()

    def views(self, memory: Any, part: int, view: Callable[[Any, int, TensorSpec], Any]) -> Any:
        """Return ``[bucket][tensor]``: ``view`` of each tensor's place in a part of the mapped ``memory``."""
        start = part * self._part
        return tuple(
            tuple(view(memory, start + place, spec) for place, spec in zip(row, specs, strict=True))
            for row, specs in zip(self._places, self.specs, strict=True)
        )

    def whole(self, memory: Any, part: int) -> list[memoryview]:
        """Return each bucket's tensors in a part of the mapped ``memory`` as raw bytes."""
        return [memoryview(memory)[part * self._part :][:end] for end in self._ends]


class ArenaLayout:
    """Where everything in the arena is; a pure function of the manifest."""

    def __init__(self, manifest: Manifest):
        buckets = manifest.buckets
        self.sides = manifest.pp_degree + 1
        """Most steps that may be begun and not taken: one runs in each stage, and one waits."""
        self.counters = _round_up(manifest.world_size * _COUNTERS * 8, _PAGE)
        self.inputs = Region(self.counters, self.sides, (bucket.inputs for bucket in buckets))
        self.outputs = Region(self.inputs.end, self.sides, (bucket.outputs for bucket in buckets))
        self.handing = manifest.tp_degree
        """Number of ranks that hand values on from a stage."""
        self.handed = Region(self.outputs.end, self.sides * self.handing, (bucket.handed for bucket in buckets))
        self.size = self.handed.end


def create_arena(layout: ArenaLayout) -> int:
    """Create a memfd of the arena's size that cannot be resized. It has no name and ends with its last holder."""
    fd = os.memfd_create("nxd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Arena:
    """The arena mapped into this process.

    ``writable_inputs`` is for the caller's process; ranks map the inputs read-only.
    """

    def __init__(self, fd: int, manifest: Manifest, *, writable_inputs: bool):
        self.layout = layout = ArenaLayout(manifest)
        self._words = memoryview(mmap.mmap(fd, layout.counters)).cast("Q")
        inputs = layout.inputs.map(fd, writable=writable_inputs)
        outputs = layout.outputs.map(fd, writable=True)
        self.sides = [Side(layout, inputs, outputs, number) for number in range(layout.sides)]
        self._handed = {writable: layout.handed.map(fd, writable=writable) for writable in (False, True)}

    def handed(self, side: int, tp_rank: int, *, writable: bool) -> Tensors:
        """Return ``[bucket][value]``: what ranks in place ``tp_rank`` of their stage hand on in a step on ``side``."""
        return self.layout.handed.views(self._handed[writable], side * self.layout.handing + tp_rank, _view)

    def begin(self, rank: int, clock: int) -> None:
        """Record that rank ``rank`` starts a step at ``clock`` (monotonic nanoseconds)."""
        place = rank * _COUNTERS
        self._words[place + 2] = clock
        self._words[place] += 1

    def finish(self, rank: int, took: int) -> None:
        """Record that rank ``rank`` has finished its step, which took it so many nanoseconds."""
        place = rank * _COUNTERS
        self._words[place + 3] += took
        self._words[place + 1] += 1

    def progress(self, rank: int) -> tuple[int, int, int, int]:
        """Return steps begun, steps finished, the clock of the last begin (0 before the first), and the nanoseconds
        of all finished steps."""
        begun, finished, clock, took = self._words[rank * _COUNTERS :][:4]
        return begun, finished, clock, took


class Side:
    """Inputs and outputs of one step at a time: every bucket's tensors, as torch tensors and, if NumPy has their
    dtypes, as arrays. Both keep the mapping alive."""

    def __init__(self, layout: ArenaLayout, inputs: Any, outputs: Any, number: int):
        self.taken = False
        """Whether a step has begun here whose outputs were not taken yet."""
        self.last: Any = None
        """The exchange of the last step that began here."""
        self._layout, self._inputs, self._outputs, self._number = layout, inputs, outputs, number

    @cached_property
    def inputs(self) -> Tensors:
        return self._layout.inputs.views(self._inputs, self._number, _view)

    @cached_property
    def outputs(self) -> Tensors:
        return self._layout.outputs.views(self._outputs, self._number, _view)

    @cached_property
    def output_arrays(self) -> Sequence[dict[str, np.ndarray]]:
        """Outputs by name."""
        region = self._layout.outputs
        rows = zip(region.specs, region.views(self._outputs, self._number, _array), strict=True)
        return [{spec.name: array for spec, array in zip(specs, row, strict=True)} for specs, row in rows]

    @cached_property
    def input_bytes(self) -> Sequence[memoryview]:
        """Each bucket's inputs as raw bytes."""
        return self._layout.inputs.whole(self._inputs, self._number)


class InputBlock(Mapping[str, "np.ndarray"]):
    """The inputs of ``bucket`` as arrays in one block of memory, laid out as in the arena: checked in one pass and
    passed on in one copy. They start at their defaults, or zero. Raises TypeError if NumPy lacks a dtype."""

    @classmethod
    def of(cls, bucket: BucketSpec, inputs: Mapping[str, Any]) -> InputBlock:
        """Return ``inputs`` as a block; itself if it is one of ``bucket``. Raises InputMismatchError for other arrays
        than the bucket takes; :meth:`check` checks the values."""
        if isinstance(inputs, InputBlock) and inputs.bucket is bucket:
            return inputs
        block = cls(bucket)
        if unknown := sorted(inputs.keys() - block.keys()):
            raise InputMismatchError(f"bucket {bucket.name!r}: there is no input {unknown[0]!r}")
        for spec in bucket.inputs:
            array, view = inputs.get(spec.name), block[spec.name]
            if array is None:
                if spec.default is None:
                    raise InputMismatchError(
                        f"bucket {bucket.name!r}: input {spec.name!r} is missing and has no default"
                    )
            elif not isinstance(array, type(view)):
                raise InputMismatchError(f"input {spec.name!r} is a {type(array).__name__}, expected a numpy.ndarray")
            elif array.dtype != view.dtype or array.shape != view.shape:
                raise InputMismatchError(
                    f"input {spec.name!r} is {array.dtype.name}{list(array.shape)}, bucket {bucket.name!r} takes "
                    f"{spec.dtype}{spec.shape}"
                )
            else:
                view[...] = array
        return block

    def __init__(self, bucket: BucketSpec):
        import numpy as np

        places, size = _offsets(bucket.inputs)
        self.bucket = bucket
        self.memory = np.zeros(size, np.uint8)
        self.bytes = self.memory.data
        self._arrays = {
            spec.name: _array(self.memory, place, spec) for place, spec in zip(places, bucket.inputs, strict=True)
        }
        self._words = self.memory.view(np.int64)
        self._count = np.count_nonzero
        limits = np.iinfo(np.int64)
        self._low, self._high = np.full_like(self._words, limits.min), np.full_like(self._words, limits.max)
        self._limited = [spec for spec in bucket.inputs if spec.minimum is not None or spec.maximum is not None]
        self._others = [spec for spec in self._limited if spec.dtype != "int64"]
        for place, spec in zip(places, bucket.inputs, strict=True):
            if spec.default is not None:
                self[spec.name][...] = spec.default
            if spec.dtype == "int64":
                words = slice(place // 8, (place + spec.nbytes) // 8)
                low, high = spec.minimum, spec.maximum
                self._low[words] = limits.min if low is None or low < limits.min else math.ceil(low)
                self._high[words] = limits.max if high is None or high > limits.max else math.floor(high)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self) -> None:
        """Raise InputMismatchError for a value outside its input's limits."""
        count = self._count
        if count(self._words < self._low) or count(self._words > self._high):
            self._check_each(self._limited)
        if self._others:
            self._check_each(self._others)

    def _check_each(self, specs: Sequence[InputSpec]) -> None:
        for spec in specs:
            array = self._arrays[spec.name]
            if array.size:
                spec.check(array.min().item())
                spec.check(array.max().item())


def _view(buffer: mmap.mmap, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return a contiguous tensor over shared memory."""
    import torch

    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable", which is intended for the inputs
        flat = torch.frombuffer(buffer, dtype=spec.torch_dtype, count=math.prod(spec.shape), offset=offset)
    return flat.view(spec.shape)


def _array(buffer: Any, offset: int, spec: TensorSpec) -> np.ndarray:
    """Like ``_view``, as an array."""
    import numpy as np

    return np.ndarray(spec.shape, np.dtype(spec.dtype), buffer, offset if spec.nbytes else 0)


# --- records ------------------------------------------------------------------------------------------

_REQUEST = struct.Struct("<BHQB")
_RESPONSE = struct.Struct("<?BQQ")
_MAX_TEXT = 48 << 10
_DESCRIPTORS = socket.CMSG_SPACE(4 * 253)
"""Room for as many descriptors as Linux allows per record: a process that runs all ranks gets one for each."""
AWAKE_SECONDS = 0.005
"""How long a rank polls for the next request after an answer; the gap between decode steps is 0.1 to 0.4 ms."""
HANDOVER_FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE


class Kind(enum.IntEnum):
    """The operation that a record requests."""

    START = 0
    STEP = 1
    RESET = 2
    PREPARE_WEIGHTS = 3
    COMMIT_WEIGHTS = 4
    ABORT_WEIGHTS = 5
    ROUTE = 7

    @property
    def words(self) -> str:
        """The name in error messages."""
        return self.name.lower().replace("_", " ")


class Request(NamedTuple):
    """``side`` of the arena holds a step's inputs and outputs."""

    kind: Kind
    bucket: int
    sequence: int
    side: int = 0

    def record(self) -> bytes:
        return _REQUEST.pack(*self)


class Response(NamedTuple):
    """``ok``, or the text of the error; ``nanoseconds`` is how long the rank worked on it."""

    ok: bool
    kind: int
    sequence: int
    nanoseconds: int
    text: str


class ChannelClosed(Exception):
    """The peer has closed its end."""


class Channel:
    """One end of the socket between the caller's process and one rank."""

    def __init__(self, end: socket.socket):
        self.socket = end
        self._answer = bytearray(_RESPONSE.size + _MAX_TEXT)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(first), cls(second)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    # --- the caller's end ---

    def send(self, record: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send an encoded request, with descriptors. Raises ChannelClosed if the peer has ended."""
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                self.socket.sendmsg([record], rights, socket.MSG_NOSIGNAL)
            else:
                self.socket.send(record, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive_response(self) -> Response:
        """Return the next answer; call it when ``poll`` reports one. Raises ChannelClosed if the peer has ended."""
        try:
            size = self.socket.recv_into(self._answer)
        except ConnectionResetError as error:
            raise ChannelClosed from error
        if size < _RESPONSE.size:
            raise ChannelClosed
        text = self._answer[_RESPONSE.size : size].decode("utf-8", "replace")
        return Response._make((*_RESPONSE.unpack_from(self._answer), text))

    # --- the rank's end ---

    def receive_request(self) -> tuple[Request, list[int]] | None:
        """Wait for the next request and the descriptors sent with it; None if the caller is gone.

        It polls for a moment instead of sleeping, because in decoding the next request follows soon and a sleeping core
        wakes up late. Also, the host of a virtual machine moves a core that another one wakes up next to that one,
        where both share one path to memory."""
        _awake_until(self._poll)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_REQUEST.size, _DESCRIPTORS)
        except ConnectionResetError:
            return None
        if len(data) != _REQUEST.size:
            return None
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
        kind, *rest = _REQUEST.unpack(data)
        return Request(Kind(kind), *rest), list(fds)

    def send_response(self, request: Request, nanoseconds: int, error: str | None = None) -> None:
        text = (error or "").encode("utf-8", "replace")
        if len(text) > _MAX_TEXT:
            text = text[: _MAX_TEXT // 2] + b"\n...\n" + text[-_MAX_TEXT // 2 + 16 :]
        head = _RESPONSE.pack(error is None, request.kind, request.sequence, nanoseconds)
        self.socket.send(head + text, socket.MSG_NOSIGNAL)


def _awake_until(poll: select.poll) -> bool:
    """Return whether a descriptor of ``poll`` becomes ready within AWAKE_SECONDS."""
    awake = time.monotonic() + AWAKE_SECONDS
    while not (ready := poll.poll(0)) and time.monotonic() < awake:
        os.sched_yield()  # the one that is waited for may need this core
    return bool(ready)


class Answers:
    """Waits for answers on any of ``channels``. Other threads run meanwhile."""

    def __init__(self, channels: list[Channel]):
        self._poll = select.poll()
        self._ranks = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """Return the ranks whose channels are readable or closed, after at most ``seconds``."""
        return [self._ranks[fd] for fd, _ in self._poll.poll(min(max(0.0, seconds), 1e6) * 1000)]


class Handover:
    """One rank's place in the order of pipeline stages; ``after`` and ``before`` as in RankConfig.

    A rank begins a step when the rank in its place of the stage before is done. Each pair of such ranks shares an
    eventfd that counts finished steps. Every rank runs all steps in the same order, so a count is enough. What is
    handed on is in the arena by then. Nothing flows back: a side of the arena is used again only after all ranks have
    finished the step there.
    """

    def __init__(self, after: int | None, before: int | None, timeout: float):
        """``timeout``: seconds to wait for the stage before."""
        self._after, self._before, self._timeout = after, before, timeout
        self._poll = select.poll()
        if after is not None:
            self._poll.register(after, select.POLLIN)

    def wait(self) -> int:
        """Wait until the stage before has finished its next step; return the nanoseconds that it took.

        Polls for a moment before it sleeps, like a rank that waits for a request. Raises CollectiveTimeoutError.
        """
        if self._after is None:
            return 0
        started = time.monotonic_ns()
        if not _awake_until(self._poll) and not self._poll.poll(self._timeout * 1000):
            raise CollectiveTimeoutError(f"the pipeline stage before has not finished its step in {self._timeout:g} s")
        os.eventfd_read(self._after)
        return time.monotonic_ns() - started

    def done(self) -> None:
        """Let the next stage begin the step that this rank has finished."""
        if self._before is not None:
            os.eventfd_write(self._before, 1)
