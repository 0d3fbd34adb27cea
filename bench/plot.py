"""Plots for the documentation, from the last records: tokens per second by batch, step time by context, and figures
that grow with the bytes of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from bench import report
from bench.options import Options
from bench.stats import Summary, summary
from nxd_infer.cli.console import console

FOLDER = Path(__file__).parents[1] / "docs" / "images"
Lines = Mapping[str, Mapping[float, Summary]]
"""Name of a line -> x -> y with its range."""


def run(options: Options) -> None:
    folder = report.RESULTS if options.quick else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"decode": _decode, "sizes": _sizes}
    records = {name: record for name in drawn if (record := report.read(name, options.quick)) is not None}
    if not records:
        raise SystemExit("there is nothing to plot yet: run `python -m bench decode` or `python -m bench sizes` first")
    for name, record in records.items():
        drawn[name](folder, record)


def _subtitle(record: report.Record) -> str:
    return f"{record.machine['cpu']}, {record.settings['threads']} threads, bfloat16, {record.finished[:10]}"


def _decode(folder: Path, record: report.Record) -> None:
    subtitle = _subtitle(record)
    rates: dict[str, dict[float, Summary]] = {}
    for batch, found in record.figures["rates"].items():
        for name, values in found.items():
            rates.setdefault(name, {})[int(batch)] = summary(values)
    draw(folder / "decode.svg", "Decoding", subtitle, "batch", "tokens/s", rates)
    steps: dict[str, dict[float, Summary]] = {
        f"{name}, batch {batch}": {int(c): summary([1e3 * v for v in values]) for c, values in cells.items()}
        for name, batches in record.figures["contexts"].items()
        for batch, cells in batches.items()
    }
    draw(folder / "context.svg", "A decoding step", subtitle, "context, tokens", "milliseconds", steps)


def _sizes(folder: Path, record: report.Record) -> None:
    gib = 2**-30
    seconds: dict[str, dict[float, Summary]] = defaultdict(dict)
    memory: dict[str, dict[float, Summary]] = defaultdict(dict)
    for name, found in record.figures.items():
        form, x = name.partition(" ")[2], round(found["bytes"] * gib, 2)
        seconds[f"{form}, start to ready"][x] = summary(found["start_seconds"])
        seconds[f"{form}, a rank's death to ready again"][x] = summary(found["recovery_seconds"])
        memory[f"{form}, serving (PSS)"][x] = summary([v * gib for v in found["memory"]])
        memory[f"{form}, tracing"][x] = summary([found["trace"]["held"] * gib])
    x_label = "weights in bfloat16, GiB"
    draw(folder / "sizes.svg", "Start and recovery", _subtitle(record), x_label, "seconds", seconds)
    draw(folder / "sizes-memory.svg", "Memory", _subtitle(record), x_label, "GiB", memory)


def draw(path: Path, title: str, subtitle: str, x: str, y: str, lines: Lines) -> None:
    """Write ``lines`` as an SVG; bars show the range of the rounds."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots need matplotlib: pip install 'nxd-infer[bench]'") from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    # Equal figures give equal files, and text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
        for name, points in lines.items():
            places = sorted(points)
            middle = [points[place].median for place in places]
            below = [points[place].median - points[place].low for place in places]
            above = [points[place].high - points[place].median for place in places]
            ours = name.startswith("ours")
            style = {"linewidth": 2.2 if ours else 1.2, "linestyle": "-" if ours else "--", "marker": "o"}
            axes.errorbar(places, middle, yerr=[below, above], label=name, capsize=2, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({place for points in lines.values() for place in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(f"{title}\n", loc="left")
        axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
        pyplot.close(figure)
    console.print(f"wrote {path}", style="dim", markup=False, soft_wrap=True)
