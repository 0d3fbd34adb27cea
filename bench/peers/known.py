"""All programs that can be measured, and how to start them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.artifacts import artifact
from bench.model import bench_model
from bench.options import THREADS, Options, home
from bench.peers.driver import Peer, PeerError
from bench.placement import Placement
from bench.stats import Turn, interleaved, summary
from bench.stream import read_bandwidth
from nxd_infer.cli.console import console


@dataclass(frozen=True)
class Known:
    """A peer: its module, the environment it needs (None: this one), and what ``start`` tells it."""

    module: str
    environment: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    start_timeout: float = 120.0

    def python(self) -> Path:
        """Return the interpreter. Raises PeerError if the environment does not exist."""
        if self.environment is None:
            return Path(sys.executable)
        python = home() / "peers" / self.environment / "bin" / "python"
        if not (python.parent.parent / INSTALLED).is_file():
            raise PeerError(f"not installed; `python -m bench peers install {self.environment}` installs it")
        return python


INSTALLED = "installed.json"
"""Marks an environment whose installation succeeded."""

KNOWN = {
    "hf": Known("hugging_face", arguments={"cache": "dynamic"}),
    "hf_static": Known("hugging_face", arguments={"cache": "static"}),
    "llama_cpp": Known("llama", "llama_cpp"),
    "openvino": Known("open_vino", "openvino", start_timeout=600),  # converts the model the first time
    "vllm": Known(
        "vllm_cpu",
        "vllm",
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that it can be stopped and ended as a whole
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_DO_NOT_TRACK": "1",
        },
        start_timeout=300,  # it compiles
    ),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


HUGGING_FACE = ("hf", "hf_static")


def ours(tp: int) -> str:
    return f"ours tp{tp}"


def fastest(names: Iterable[str], rates: Mapping[str, list[float]]) -> str | None:
    """Return the name with the highest median rate, or None."""
    return max((name for name in names if name in rates), key=lambda name: summary(rates[name]).median, default=None)


@dataclass
class Field:
    """Participants by name, and those left out, with the reason."""

    peers: dict[str, Peer]
    skipped: dict[str, str]
    placement: Placement = field(default_factory=Placement)

    def rounds(
        self, measure: Callable[[Peer, int], float], count: int, warm: Callable[[Peer], object]
    ) -> dict[str, list[Turn]]:
        """Call ``measure(peer, round)`` for every participant, interleaved.

        ``warm`` runs first for each: new shapes cost more. A peer that fails is left out from then on, and its results
        are dropped.
        """

        def attempt(name: str, work: Callable[[Peer], Any]) -> Any:
            if name not in self.peers:
                return 0.0
            try:
                return work(self.peers[name])
            except PeerError as error:
                self.drop(name, error)
                return 0.0

        for name in list(self.peers):
            attempt(name, warm)
        work = {
            name: lambda number, name=name: self.turn(lambda: attempt(name, lambda peer: measure(peer, number)))
            for name in self.peers
        }
        return {name: turns for name, turns in interleaved(work, count).items() if name in self.peers}

    def turn(self, measure: Callable[[], float]) -> Turn:
        """Call ``measure()`` between two readings of the bandwidth, all in one core placement if possible."""

        def read() -> tuple[float, float, float]:
            before, value = read_bandwidth(), measure()
            return value, before, read_bandwidth()

        (value, before, after), held = self.placement.held(read)
        return Turn(value, before, after, held)

    def mine(self) -> list[str]:
        """This project's degrees."""
        return [name for name in self.peers if name.startswith("ours")]

    def drop(self, name: str, error: PeerError) -> None:
        """Leave a peer out from now on. If it is this project, the error ends the benchmark."""
        if name.startswith("ours"):
            raise SystemExit(f"{name}: {error}")
        self.skipped[name] = str(error).strip().splitlines()[0]
        console.print(f"{name} is left out: {error}", markup=False)
        self.peers.pop(name).close()


@contextlib.contextmanager
def field_of(options: Options, buckets: Sequence[Sequence[int]] = (), **engine: Any) -> Iterator[Field]:
    """Start this project at every degree, and the requested, installed peers; end them after the block.

    ``buckets``: batches and prompts, if not the usual ones. ``engine``: options of this project's engine.
    """
    model = bench_model(options)
    mine = {tp: {"model": str(artifact(options, tp, *buckets)), "threads": THREADS // tp} for tp in options.degrees}
    them = {name: {"model": str(model), "threads": THREADS} for name in options.peers}
    wanted = {ours(tp): (Known("ours"), arguments | engine) for tp, arguments in mine.items()}
    with field_with(wanted | {name: (KNOWN[name], arguments) for name, arguments in them.items()}) as found:
        yield found


@contextlib.contextmanager
def field_with(wanted: Mapping[str, tuple[Known, Mapping[str, Any]]]) -> Iterator[Field]:
    """Start participants by name, each with the arguments of its ``start``; end them after the block."""
    found = Field({}, {})
    try:
        found.placement.look()
        for name, (known, arguments) in wanted.items():
            with console.status(f"starting {name}"):
                _start(found, name, known, **arguments)
        yield found
    finally:
        for peer in found.peers.values():
            peer.close()


def _start(found: Field, name: str, known: Known, **arguments: Any) -> None:
    log = home() / "logs" / f"{name.replace(' ', '-')}.log"
    try:
        python = known.python()
    except PeerError as error:
        found.skipped[name] = str(error)
        return
    env = {**OFFLINE, "OMP_NUM_THREADS": str(arguments["threads"]), **known.env}
    command = [str(python), "-c", f"from bench.peers import {known.module} as peer; peer.main()"]
    found.peers[name] = Peer(name, command, log, env)
    try:
        found.peers[name].start(known.start_timeout, **known.arguments, **arguments)
        found.placement.look()
    except PeerError as error:
        found.drop(name, error)
