"""Start, watch and end the processes of a model's ranks.

A thread of this module starts the ranks and lives as long as they do. That matters, because PDEATHSIG is sent when the
*thread* that started a process ends. The thread also reads the ranks' output, keeps its end for error messages, and
notices a rank that ends between calls.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends import registry
from nxd_infer.comm.shm import collectives_passed, create_segment
from nxd_infer.errors import BackendUnavailableError, ModelClosedError, RankStartError, RankTimeoutError
from nxd_infer.processes.child import ChildProcess
from nxd_infer.processes.command import child_environment, python_module
from nxd_infer.processes.start import start
from nxd_infer.processes.state import process_state
from nxd_infer.runtime.ipc import HANDOVER_FLAGS, Arena, ArenaLayout, Channel, create_arena
from nxd_infer.runtime.rank_process.config import RankConfig, with_crew
from nxd_infer.runtime.supervisor.cores import choose_cores, release_cores
from nxd_infer.runtime.time_bounds import until_ended

log = logging.getLogger(__name__)

_TAIL = 16 << 10
_COUNTER_BYTES = 64 << 10
"""Size of the counters in a collectives segment."""
_MAIN = "nxd_infer.runtime.rank_process.main"
_IMPORTS = "nxd_infer.runtime.rank_process.rank"
"""What a rank imports, with torch."""

MOST_THREADS = 64
"""Maximum threads of a crew (``csrc/operators/machine/crew.h``); ranks with more use torch's threads."""


class RankProcesses:
    """The processes of all ranks of ``artifact``, and the resources that they share with the caller.

    ``on_exit(rank, how, output)`` is called from the watching thread for every rank that ends: how it ended, and the
    end of what it printed.
    """

    def __init__(
        self,
        artifact: LoadedArtifact,
        *,
        threads: int,
        collective_timeout: float,
        on_exit: Callable[[int, str, str], None],
    ):
        self.artifact = artifact
        self.degree = artifact.manifest.world_size
        self.together = registry.get(artifact.manifest.backend).one_process
        self.count = 1 if self.together else self.degree
        """Number of processes: one per rank, or one that runs all."""
        self.threads = threads
        self.arena: Arena | None = None
        self.channels: list[Channel] = []
        self.ended = threading.Event()
        """Set once all ranks have ended and their output has been read."""
        self._collective_timeout = collective_timeout
        self._on_exit = on_exit
        self._processes: list[ChildProcess] = []
        self._counters: list[list[mmap.mmap]] = [[] for _ in range(artifact.manifest.pp_degree)]
        """The counters of each stage's segments."""
        self._tails = [collections.deque[bytes](maxlen=256) for _ in range(self.count)]
        self._cores: list[list[int]] = []
        self._directory: str | None = None
        self._mutex = threading.RLock()  # reentrant: a signal handler may end the ranks while its thread does
        self._stopped = False
        self._following: threading.Thread | None = None
        self._spawned: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once all have been started, or one could not be."""

    @property
    def lead_cores(self) -> list[int]:
        """The first core of each rank that has a crew."""
        return [cores[0] for cores in self._cores if self._has_crew(cores)]

    def _has_crew(self, cores: list[int]) -> bool:
        return 1 < len(cores) <= MOST_THREADS and bool(self.artifact.manifest.ops)

    def start(self) -> None:
        """Begin to start the ranks. Raises RankStartError if the system does not let a thread start."""
        own = child_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(self.threads))
        environment = registry.with_import_path(own, self.artifact.manifest.backend)

        def live() -> None:
            try:
                self._spawn(environment)
            except BaseException as error:
                self._spawned.set_exception(error)
            else:
                self._spawned.set_result(None)
            self._follow()
            self.ended.set()
            self._on_exit = _nothing  # breaks a cycle that would keep the channels and the shared memory open

        thread = self._following = threading.Thread(target=live, name="nxd-ranks", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._following = None
            raise not_let_start(error) from error

    def wait_started(self, seconds: float) -> None:
        """Wait until the processes of all ranks have been started. Raises what kept one from starting, RankStartError
        if that is the system, and RankTimeoutError after ``seconds``; processes that did start are left to ``kill``."""
        if not concurrent.futures.wait([self._spawned], seconds).done:
            started = len(self._processes)
            raise RankTimeoutError(
                f"rank {started} did not finish its start within {seconds:g} s: {started} of {self.count} processes "
                "run; importing torch takes longer: raise start_timeout, or call restart()",
                started,
            )
        try:
            self._spawned.result()
        except OSError as error:
            raise not_let_start(error) from error

    def kill(self) -> None:
        """End every rank, and wait until it has, as long as its memory may take to be freed, and, at most five seconds,
        for the watching thread; no rank starts afterwards.

        Uses SIGKILL, because a rank in native code runs no Python handlers. The thread may be the last holder of the
        arena: if it frees the arena's tensors while the interpreter exits, the process aborts (SIGABRT).
        """
        with self._mutex:
            self._stopped = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        end = time.monotonic() + until_ended(self.artifact.weight_bytes)
        for process in processes:
            if not process.wait(end - time.monotonic()):  # it is inside the kernel, in a system call
                log.warning("process %d, of a rank, was killed and has not ended", process.pid)
        with self._mutex:
            cores, self._cores = self._cores, []
            directory, self._directory = self._directory, None
        release_cores(cores)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        thread = self._following
        if thread is not None and thread.ident != threading.get_ident():
            with contextlib.suppress(RuntimeError):  # its start was interrupted
                thread.join(5.0)
            self._following = None  # never wait twice

    # --- state of the ranks ---

    def pid(self, rank: int) -> int | None:
        return self._processes[rank].pid if rank < len(self._processes) else None

    def state(self, rank: int) -> str:
        """``running``, ``stopped`` or ``ended``."""
        if rank >= len(self._processes) or not self._processes[rank].running:
            return "ended"
        return process_state(self._processes[rank].pid)

    def collectives(self, rank: int) -> int:
        """Collectives that the rank has passed, over all native libraries; counted natively, also inside graphs."""
        stage, place = divmod(rank, self.artifact.manifest.tp_degree)
        return sum(collectives_passed(segment, place) for segment in self._counters[stage])

    def output(self, rank: int) -> str:
        """Return the end of what the rank has printed."""
        return b"".join(tuple(self._tails[rank]))[-_TAIL:].decode("utf-8", "replace").strip()

    # --- the thread that starts and watches ---

    def _spawn(self, environment: Mapping[str, str]) -> None:
        manifest = self.artifact.manifest
        fds: list[int] = []
        try:
            fds.append(create_arena(ArenaLayout(manifest)))
            self.arena = Arena(fds[0], manifest, writable_inputs=True)
            tp = manifest.tp_degree
            libraries: list[list[tuple[str, int]]] = [[] for _ in self._counters]
            for path in [] if self.together else _libraries(self.artifact):
                for own, counters in zip(libraries, self._counters, strict=True):
                    segment = create_segment(tp)
                    fds.append(segment)
                    own.append((path, segment))
                    size = min(_COUNTER_BYTES, os.fstat(segment).st_size)
                    counters.append(mmap.mmap(segment, size, prot=mmap.PROT_READ))
            handovers: list[int] = []
            for _ in range(self.degree - tp):  # rank r counts its steps in the r-th, rank r + tp waits for them
                handovers.append(os.eventfd(0, HANDOVER_FLAGS))
                fds.append(handovers[-1])
            with self._mutex:
                self._check_going()
                # Without a rendezvous file if they meet in shared memory, so a killed caller leaves nothing behind.
                if self.count > 1 and tp > 1 and not libraries[0]:
                    self._directory = tempfile.mkdtemp(prefix="nxd-ranks-")
                directory = self._directory or ""
                cores = self._cores = choose_cores(self.count, self.threads * self.degree // self.count)
            for rank in range(self.count):  # use local variables: kill() may clear the fields at any moment
                after = handovers[rank - tp] if rank >= tp else None
                before = handovers[rank] if rank < len(handovers) else None
                ours, remote = Channel.pair()
                self.channels.append(ours)
                config = RankConfig(
                    artifact=str(self.artifact.path),
                    digest=self.artifact.digest,
                    rank=rank,
                    degree=self.degree,
                    together=self.together,
                    parent=os.getpid(),
                    socket=remote.fileno(),
                    arena=fds[0],
                    threads=self.threads,
                    cores=cores[rank],
                    crew=self._has_crew(cores[rank]),
                    timeout=self._collective_timeout,
                    libraries=libraries[rank // tp],
                    after=after,
                    before=before,
                    rendezvous=f"{directory}/rendezvous",
                )
                try:
                    self._spawn_rank(config, (remote.fileno(), *fds), environment)
                finally:
                    remote.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn_rank(self, config: RankConfig, inherit: Sequence[int], environment: Mapping[str, str]) -> None:
        self._check_going()
        cores = config.cores if config.crew else ()
        environment = with_crew(environment, cores) if cores else environment
        process = start(
            python_module(_MAIN, "rank", str(config.rank), "--config", config.to_json()),
            imports=_IMPORTS,
            importing=environment,
            bound=cores,
            environment=environment,
            inherit=inherit,
            output=subprocess.PIPE,
            check=self._check_going,
        )
        with self._mutex:
            if not self._stopped:
                self._processes.append(process)
                return
        process.end()  # ``kill`` has not seen it
        self._check_going()

    def _check_going(self) -> None:
        """Raise ModelClosedError after ``kill``."""
        if self._stopped:
            raise ModelClosedError("the model was closed while its ranks were starting")

    def _follow(self) -> None:
        """Read the ranks' output and report their ends, until all have ended."""
        outputs: dict[Any, int] = {}
        ends: dict[Any, int] = {}
        """The rank of each output that is open, and of each that runs, by its descriptor."""
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            outputs[process.stdout.fileno()] = ends[process.sentinel] = rank
        while ends:
            for fd in wait([*outputs, *ends]):
                if fd in outputs:
                    if not self._drain(fd, outputs[fd]):
                        del outputs[fd]
                else:
                    rank = ends.pop(fd)
                    process = self._processes[rank]
                    assert process.stdout is not None
                    self._drain(process.stdout.fileno(), rank)
                    how = process.explain()
                    if process.returncode == -signal.SIGBUS:
                        how += " (a file that it has mapped was cut short or cannot be read)"
                    self._on_exit(rank, how, self.output(rank))
        for process in self._processes:
            process.end()

    def _drain(self, fd: Any, rank: int) -> bool:
        """Keep the rank's output; False at its end."""
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tails[rank].append(data[-_TAIL:])


def _nothing(rank: int, how: str, output: str) -> None:
    """Ignore a rank's end, once nobody waits for one any more."""


def not_let_start(error: Exception) -> RankStartError:
    """Return the error for ranks that the system, which raised ``error``, does not let start."""
    return RankStartError(
        f"the system does not let the ranks start ({error}): see its limits, of memory and of open files"
    )


def _libraries(artifact: LoadedArtifact) -> list[str]:
    """Return the native libraries that the ranks connect: the artifact's own, else this package's if it can be built.

    Empty at degree 1 (nothing to connect), and if there is neither: then the ranks use gloo, which is slower.
    """
    manifest = artifact.manifest
    if manifest.tp_degree == 1:
        return []
    if manifest.ops:
        return [str(artifact.op_file(digest)) for digest in manifest.ops]
    from nxd_infer import native  # slow: torch, which nothing else here needs

    try:
        return [str(native.load().path)]
    except BackendUnavailableError:
        return []
