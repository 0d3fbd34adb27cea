"""A rank process of func mode: ``main(descriptor)``. Imports the caller's script, runs func, exports, writes, reports.

Any error here, including one in importing the script, becomes a message to the parent, which raises it. Ranks are
forked from a process that has imported this module, and with it what the first export would import.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from multiprocessing.connection import Connection

import torch
import torch._dynamo
import torch.export._trace
import torch.onnx
from torch import Tensor

from nxd_infer import compat
from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.comm.distributed import join_on_this_host
from nxd_infer.comm.protocol import RefusingCollectives, register_collectives
from nxd_infer.context import make_context, set_default_context
from nxd_infer.errors import CollectiveError, NotInitializedError
from nxd_infer.parallel_state import TRACE_COLLECTIVES
from nxd_infer.processes.command import import_script
from nxd_infer.processes.own import die_with_parent, leave
from nxd_infer.trace.ranks import one_rank
from nxd_infer.trace.ranks.from_function import REQUEST_FILE, Failure, RankSettings
from nxd_infer.trace.ranks.traced import (
    TracedRank,
    initial_states,
    write_rank,
)
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.machine import processors


def main(descriptor: int) -> None:
    """Run the rank described by the settings on the connection. Does not return."""
    connection = Connection(descriptor)
    settings: RankSettings = connection.recv()
    die_with_parent(settings.parent)
    try:
        if settings.compat:
            compat.install(force=True)  # the caller has already decided what to hide
        import_script(settings.preparation)
        connection.send(_traced(connection, settings))
    except BaseException as error:
        text = str(error)
        groups = isinstance(error, CollectiveError | NotInitializedError) or "process group" in text.lower()
        if groups and settings.at_once < settings.degree:
            text += (
                f" (a collective, or a process group, was used in func while max_parallel_compilations is below "
                f"tp_degree={settings.degree}: the ranks run in turns and cannot communicate; leave "
                "max_parallel_compilations out, or keep collectives out of func)"
            )
        with contextlib.suppress(OSError):
            connection.send(Failure(settings.rank, type(error).__name__, text, traceback.format_exc()))
        leave(1)
    leave(0)  # exit handlers of torch.distributed can wait for peers that are gone


def _traced(connection: Connection, settings: RankSettings) -> list[TracedRank]:
    """Trace and write the rank; return its pipeline stages."""
    os.environ.update(
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.degree),
        LOCAL_WORLD_SIZE=str(settings.degree),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(settings.port),
        NXD_SKIP_RENDEZVOUS="1",
    )
    torch.set_num_threads(max(1, processors() // settings.at_once))
    _connect(settings)
    packed = (settings.build / REQUEST_FILE).read_bytes()
    request: TraceRequest = pickle.loads(packed)  # nosec B301  # from our parent, in its private directory (0700)
    connection.send("func")
    built = one_rank.build(request, one_rank.require_values)
    written = []
    for stage in one_rank.trace_buckets(request, built, connection.send):

        def value(spec: WeightSpec, stage: TracedRank = stage) -> Tensor:
            return stage.value(*stage.origin[spec.name])

        states = initial_states(request, stage)
        written.append(write_rank(request, stage, settings.rank, states, value, settings.build))
    return written


def _connect(settings: RankSettings) -> None:
    """Turn this process into its rank: a default context, and a transport, or one that raises."""
    own = make_context(settings.degree, settings.rank, tp=settings.degree)  # the first stage's ranks trace all stages
    transport = RefusingCollectives("a collective was called while the ranks are traced in turns")
    if settings.at_once == settings.degree:
        try:
            transport = join_on_this_host(own, str(settings.build / "rendezvous"), settings.timeout)
        except Exception as error:  # perhaps because another rank has failed meanwhile
            raise CollectiveError(f"the ranks could not meet: {error}") from error
    register_collectives(TRACE_COLLECTIVES, transport)
    tp, pp = settings.degree, settings.pp_degree
    set_default_context(make_context(tp * pp, settings.rank, tp=tp, pp=pp, collectives=TRACE_COLLECTIVES))
