"""A timeline of a step in the format that a browser's trace viewer opens: one row a stage, bubbles visible."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from nxd_infer.comm.texts import gather_texts
from nxd_infer.context import ParallelContext
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.pipeline.schedule import Action, Span, bubble


def write_timeline(path: str | os.PathLike[str], spans: Sequence[Span], context: ParallelContext) -> None:
    """Write the passes of all stages into one file, from the first rank of the pipeline. A collective.

    Clocks of several hosts are not compared: each host's times are its own. Only the first tensor- and data-parallel
    ranks write.
    """
    mine = [[s.action.stage, s.action.microbatch, s.action.backward, s.action.late, s.start, s.end] for s in spans]
    rows = [json.loads(text) for text in gather_texts(json.dumps(mine), context)]
    if context.rank:
        return
    tables = [[Span(Action(*action), start, end) for *action, start, end in row] for row in rows]
    text = json.dumps(chrome_trace(tables))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def chrome_trace(tables: Sequence[Sequence[Span]]) -> dict[str, object]:
    """Return the trace of a timetable in seconds: rows are ranks, passes are named F0, B0, W0, ... by microbatch."""
    first = min((span.start for table in tables for span in table), default=0.0)
    events: list[dict[str, object]] = []
    for rank, table in enumerate(tables):
        stages = sorted({span.action.stage for span in table})
        name = f"rank {rank}: stage {', '.join(map(str, stages))}"
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}})
        for span in table:
            action = span.action
            events.append(
                {
                    "ph": "X",
                    "name": action.name,
                    "cat": "weights" if action.late else "backward" if action.backward else "forward",
                    "pid": 0,
                    "tid": rank,
                    "ts": (span.start - first) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"bubble": round(bubble(tables), 4)}}
