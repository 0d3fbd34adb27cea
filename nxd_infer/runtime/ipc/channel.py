"""The protocol between the caller's process and its ranks: fixed binary records over a socket. Tensors use the arena.

A *record* starts one operation on one rank (a step in a bucket, a reset, ...) or answers it. Records travel over a
``SOCK_SEQPACKET`` Unix socket pair: boundaries are kept, a peer's end is noticed, and file descriptors can be passed.
A rank handles requests in order, so the next record may be sent before the last one is answered.
"""

from __future__ import annotations

import array
import enum
import os
import select
import socket
import struct
import time
from typing import NamedTuple

from nxd_infer.errors import CollectiveTimeoutError

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
