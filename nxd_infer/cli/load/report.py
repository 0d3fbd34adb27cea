"""The figures of a load: as a table, JSON, and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nxd_infer.cli.console import aside, console, table
from nxd_infer.cli.load.options import LoadOptions
from nxd_infer.cli.load.streams import Stream
from nxd_infer.errors import NxdError
from nxd_infer.layout.files.atomic import replacing

SHARES = (50, 90, 99)
MEASURES = {
    "ttft": "time to first token, ms",
    "tpot": "time per further token, ms",
    "itl": "between two chunks, ms",
    "e2el": "whole answer, ms",
}


def times(stream: Stream) -> dict[str, float]:
    """Milliseconds of one whole answer."""
    parts = {"ttft": stream.first_token, "tpot": stream.seconds_per_token, "e2el": stream.seconds}
    return {name: 1000 * seconds for name, seconds in parts.items()}


def figures(streams: Sequence[Stream], seconds: float, options: LoadOptions) -> dict[str, Any]:
    """Return rates over ``seconds``, and percentiles of what whole answers took."""
    good = [stream for stream in streams if stream.done and not stream.error and stream.times]
    values = {name: [times(stream)[name] for stream in good] for name in ("ttft", "tpot", "e2el")}
    values["itl"] = [1000 * gap for stream in good for gap in stream.gaps]
    kept = [one for one in map(times, good) if all(one[name] <= most for name, most in options.goodput.items())]
    return {
        "requests": options.requests,
        "failed": options.requests - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens_per_second": sum(stream.prompt_tokens for stream in good) / seconds,
        "tokens_per_second": sum(stream.tokens for stream in good) / seconds,
        **({"goodput_per_second": len(kept) / seconds} if options.goodput else {}),
        **{name: summary(values[name]) for name in MEASURES},
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """The mean and percentiles; empty if there is nothing."""
    if not values:
        return {}
    return {"mean": float(np.mean(values)), **{f"p{share}": float(np.percentile(values, share)) for share in SHARES}}


def show(target: str, found: dict[str, Any], streams: Sequence[Stream], options: LoadOptions) -> None:
    """Print the figures and write the files."""
    rates = [
        (name.replace("_per_second", "/s").replace("_", " "), f"{found[name]:.2f}") for name in found if "_per_" in name
    ]
    table(
        target, ("rate", "figure"), [("requests, of which failed", f"{found['requests']}, {found['failed']}"), *rates]
    )
    columns = ("mean", *(f"p{share}" for share in SHARES))
    rows = [(MEASURES[name], *(f"{found[name][column]:.1f}" for column in columns)) for name in MEASURES if found[name]]
    table("", ("latency", *columns), rows)
    for error in dict.fromkeys(stream.error for stream in streams if stream.error):
        aside.print(f"failed: {error}", style="red", markup=False)
    if options.json is not None:
        each = [{**asdict(stream), **(times(stream) if stream.times else {})} for stream in streams]
        settings = {name: value for name, value in asdict(options).items() if name not in ("api_key", "json", "plot")}
        with replacing(options.json) as file:
            file.write_text(json.dumps({"target": target, "options": settings, **found, "streams": each}))
        console.print(f"wrote {options.json}", markup=False)
    if options.plot is not None:
        draw(options.plot, target, streams)
        console.print(f"wrote {options.plot}", markup=False)


def check_drawable(path: Path) -> None:
    """Raise NxdError if no plot can be drawn into a file of this name: before the load, which may take long."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise NxdError("--plot needs matplotlib: pip install 'nxd-infer[bench]'") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise NxdError(f"--plot draws no file such as {str(path)!r}: let its name end in .{', .'.join(sorted(kinds))}")


def draw(path: Path, title: str, streams: Sequence[Stream]) -> None:
    """Tokens a second over time, and the shares of answers that took no longer."""
    from matplotlib.figure import Figure

    good = [stream for stream in streams if stream.done and stream.times]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title)
    rate, latency = figure.subplots(1, 2)
    arrived = np.sort([moment for stream in good for moment in stream.times]) - min((s.sent for s in good), default=0.0)
    if len(arrived):
        counts, edges = np.histogram(arrived, bins=min(60, max(1, len(arrived) // 8)))
        rate.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)
    rate.set(xlabel="seconds", ylabel="chunks/s", ylim=(0, None))
    for name in ("ttft", "tpot", "e2el"):
        values = sorted(times(stream)[name] for stream in good)
        latency.step(
            values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=MEASURES[name][:-4]
        )
    latency.set(xlabel="milliseconds", ylabel="share of answers", xscale="log", ylim=(0, 1))
    latency.legend(fontsize="small")
    for axes in (rate, latency):
        axes.grid(alpha=0.3)
    figure.savefig(path)
