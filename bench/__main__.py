"""``python -m bench [NAME ...]``: run benchmarks. ``python -m bench peers install [NAME ...]``: install peers."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from pathlib import Path

from bench import report
from bench.options import PEERS, SIZES, THREADS, USUAL, Options

BENCHMARKS = (
    "start",
    "stream",
    "collectives",
    "decode",
    "prefill",
    "speculate",
    "prefix",
    "server",
    "trace",
    "sizes",
    "train",
    "sft",
    "pipeline",
    "stages",
    "plot",
)
ON_REQUEST = ("attacks", "against", "generic", "mixture", "forms", "perplexity")
"""Benchmarks that run only by name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all), {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--quick", action="store_true", help="little work, few repetitions: ignore the figures")
    parser.add_argument("--peers", default=",".join(PEERS), help="default: %(default)s; pass an empty string for none")
    parser.add_argument("--tp", default="1,2", help="degrees of this project, default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=Options.repetitions, help="default: %(default)s")
    parser.add_argument("--minutes", type=int, default=60, help="stop after this many minutes, default: %(default)s")
    parser.add_argument("--model", choices=("common", "tiny"), default="common", help="default: %(default)s")
    parser.add_argument("--sizes", default=",".join(USUAL), help=f"of {', '.join(SIZES)}; default: %(default)s")
    parser.add_argument("--against", type=Path, metavar="PATH", help="the other checkout for `against`")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where `sizes` and `forms` keep their models (25 GB, with 8.1B 90), default: with the other models",
    )
    given = parser.parse_args()
    if given.names[:1] == ["peers"]:
        from bench.peers.install import install

        if given.names[1:2] != ["install"]:
            parser.error("the command is `peers install [NAME ...]`")
        return install(given.names[2:])
    if unknown := [name for name in given.names if name not in (*BENCHMARKS, *ON_REQUEST)]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join((*BENCHMARKS, *ON_REQUEST))}")
    peers = tuple(name for name in given.peers.split(",") if name)
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    sizes = tuple(given.sizes.split(","))
    if unknown := [name for name in sizes if name not in SIZES]:
        parser.error(f"no size {unknown[0]!r}; there are {', '.join(SIZES)}")
    degrees = tuple(int(tp) for tp in given.tp.split(","))
    options = Options(given.quick, peers, degrees, given.repetitions, given.model, sizes, given.against, given.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # like Ctrl-C, ends all children
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"ended after {given.minutes} minutes (--minutes)"))
    signal.alarm(given.minutes * 60)
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "160")  # tables in a log can be wider than a terminal
    # Inherited by every child: bytecode is cached, as for an installed package, instead of compiled at every start of a
    # server; and all participants get the same cores.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    missed: list[str] = []
    for name in given.names or BENCHMARKS:
        begin = time.monotonic()
        importlib.import_module(f"bench.{name}").run(options)
        print(f"{name} took {time.monotonic() - begin:.0f} s\n", flush=True)
        if not options.quick and (record := report.read(name)) is not None:
            missed += [f"{name}: {verdict.row}" for verdict in record.verdicts if verdict.result == "short"]
    if missed:
        sys.exit("short of what the project's table requires:\n  " + "\n  ".join(missed))


if __name__ == "__main__":
    main()
