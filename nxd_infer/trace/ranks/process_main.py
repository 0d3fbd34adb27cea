"""A rank process of func mode: ``main(descriptor)``. Imports the caller's script, runs func, exports, writes, reports.

Any error here, including one in importing the script, becomes a message to the parent, which raises it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer import compat
from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.comm import register_collectives
from nxd_infer.comm.distributed import join_on_this_host
from nxd_infer.context import make_context, set_default_context
from nxd_infer.errors import CollectiveError, NotInitializedError
from nxd_infer.parallel_state import TRACE_COLLECTIVES
from nxd_infer.trace.ranks import files as rank_files
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.request import TracedRank, TraceRequest, rank_directory
from nxd_infer.util.processes import die_with_parent

importing_script = False
"""Whether this process is a rank that is importing its caller's script."""


REQUEST_FILE = "request.pickle"
"""File with the request in the trace's private directory. Read late enough for a rank to report unpickling errors."""


@dataclass
class RankSettings:
    """The settings of a rank process besides the request."""

    rank: int
    degree: int
    together: bool
    """Whether all ranks run at once, joined by gloo."""
    build: str
    rendezvous: str
    port: int
    parent: int
    preparation: dict[str, Any]
    """The argument of ``multiprocessing.spawn.prepare``: the caller's script, arguments and directory."""
    compat: bool
    """Whether the caller's script imports this package as ``neuronx_distributed``."""
    threads: int
    timeout: float


def main(descriptor: int) -> None:
    """Run the rank described by the settings on the connection. Does not return."""
    global importing_script
    connection = Connection(descriptor)
    settings: RankSettings = connection.recv()
    die_with_parent(settings.parent)
    try:
        if settings.compat:
            compat.install(force=True)  # the caller has already decided what to hide
        importing_script = True
        spawn.prepare(settings.preparation)
        importing_script = False
        _trace_here(connection, settings)
        connection.send(["done"])
        connection.close()
    except BaseException as error:
        text = str(error)
        if not settings.together and _about_groups(error):
            text += (
                f" (a collective, or a process group, was used in func while max_parallel_compilations is below "
                f"tp_degree={settings.degree}: the ranks run in turns and cannot communicate; leave "
                "max_parallel_compilations out, or keep collectives out of func)"
            )
        remote = io.StringIO()
        traceback.print_exc(file=remote)
        with contextlib.suppress(OSError):
            connection.send(["error", type(error).__name__, text, remote.getvalue()])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of torch.distributed can wait for peers that are gone


def _about_groups(error: BaseException) -> bool:
    return isinstance(error, (CollectiveError, NotInitializedError)) or "process group" in str(error).lower()


def _trace_here(connection: Connection, settings: RankSettings) -> None:
    start = time.monotonic()
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.degree),
        LOCAL_WORLD_SIZE=str(settings.degree),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings.port),
        NXD_SKIP_RENDEZVOUS="1",
    )
    torch.set_num_threads(settings.threads)
    _connect(settings)
    packed = (Path(settings.build) / REQUEST_FILE).read_bytes()
    request: TraceRequest = pickle.loads(packed)  # nosec B301  # from our parent, in its private directory (0700)
    out = rank_directory(Path(settings.build), settings.rank)
    connection.send(["place", "func"])
    built = one_rank.build(request, one_rank.require_values)
    graphs = one_rank.trace_buckets(
        request, built, lambda index: connection.send(["bucket", request.buckets[index].name])
    )
    rank_files.write_graphs(graphs, out)

    def value(spec: WeightSpec) -> Tensor:
        return one_rank.value_of(graphs, *graphs.origin[spec.name])

    rank_files.write_weights(graphs, rank_files.initial_states(request, graphs), value, out / rank_files.WEIGHTS_FILE)
    result = TracedRank(
        rank=settings.rank,
        buckets=graphs.buckets,
        states=[graphs.states[name] for name in sorted(graphs.states)],
        weights=[graphs.weights[name] for name in sorted(graphs.weights)],
        layout=rank_files.described_layout(graphs, rank_files.layouts(graphs), settings.degree)
        if settings.rank == 0
        else {},
        seconds=time.monotonic() - start,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    (out / "result.json").write_text(result.model_dump_json(), encoding="utf-8")


def _connect(settings: RankSettings) -> None:
    """Turn this process into its rank: a default context, and a transport, or one that raises."""
    context = make_context(settings.degree, settings.rank, tp=settings.degree, collectives=TRACE_COLLECTIVES)
    together = settings.together
    transport = join_on_this_host(context, settings.rendezvous, settings.timeout) if together else RefusingCollectives()
    register_collectives(TRACE_COLLECTIVES, transport)
    set_default_context(context)


class RefusingCollectives:
    """The transport of ranks that run in turns: every call raises an error with the reason."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CollectiveError("a collective was called while the ranks are traced in turns")

    all_reduce = all_gather = reduce_scatter = broadcast = send = recv = barrier = _refuse

    def close(self) -> None:
        """Do nothing."""
