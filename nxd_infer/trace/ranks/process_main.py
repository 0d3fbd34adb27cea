"""A rank process of func mode: ``main(descriptor)``. Imports the caller's script, runs func, exports, writes, reports.

Any error here, including one in importing the script, becomes a message to the parent, which raises it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import traceback
from dataclasses import dataclass
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
from nxd_infer.processes.command import import_script
from nxd_infer.processes.own import die_with_parent, leave
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.ranks.traced import (
    RefusingCollectives,
    TracedRank,
    initial_states,
    tracing_context,
    write_rank,
)
from nxd_infer.trace.request import TraceRequest

REQUEST_FILE = "request.pickle"
"""File with the request in the trace's private directory. Read late enough for a rank to report unpickling errors."""


@dataclass
class RankSettings:
    """The settings of a rank process besides the request."""

    rank: int
    degree: int
    pp_degree: int
    together: bool
    """Whether all ranks run at once, joined by gloo."""
    build: str
    rendezvous: str
    port: int
    parent: int
    preparation: dict[str, Any]
    """The caller's script, arguments and directory, for ``import_script``."""
    compat: bool
    """Whether the caller's script imports this package as ``neuronx_distributed``."""
    threads: int
    timeout: float


def main(descriptor: int) -> None:
    """Run the rank described by the settings on the connection. Does not return."""
    connection = Connection(descriptor)
    settings: RankSettings = connection.recv()
    die_with_parent(settings.parent)
    try:
        if settings.compat:
            compat.install(force=True)  # the caller has already decided what to hide
        import_script(settings.preparation)
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
        leave(1)
    leave(0)  # exit handlers of torch.distributed can wait for peers that are gone


def _about_groups(error: BaseException) -> bool:
    return isinstance(error, (CollectiveError, NotInitializedError)) or "process group" in str(error).lower()


def _trace_here(connection: Connection, settings: RankSettings) -> None:
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
    connection.send(["place", "func"])
    built = one_rank.build(request, one_rank.require_values)
    stages = one_rank.trace_buckets(
        request, built, lambda index: connection.send(["bucket", request.buckets[index].name])
    )
    for stage in stages:

        def value(spec: WeightSpec, stage: TracedRank = stage) -> Tensor:
            return stage.value(*stage.origin[spec.name])

        write_rank(request, stage, settings.rank, initial_states(request, stage), value, Path(settings.build))


def _connect(settings: RankSettings) -> None:
    """Turn this process into its rank: a default context, and a transport, or one that raises."""
    own = make_context(settings.degree, settings.rank, tp=settings.degree)  # the first stage's ranks trace all stages
    transport = RefusingCollectives("a collective was called while the ranks are traced in turns")
    if settings.together:
        try:
            transport = join_on_this_host(own, settings.rendezvous, settings.timeout)
        except Exception as error:  # perhaps because another rank has failed meanwhile
            raise CollectiveError(f"the ranks could not meet: {error}") from error
    register_collectives(TRACE_COLLECTIVES, transport)
    set_default_context(tracing_context(settings.degree, settings.pp_degree, settings.rank, TRACE_COLLECTIVES))
