"""What a benchmark leaves behind: a record that is checked, and plots made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench import plot, report, sizes
from bench.options import Options
from bench.stats import Verdict, summary

ROOT = Path(__file__).parents[3]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_a_record_is_read_back_as_it_was_written(results):
    verdicts = [Verdict("decode", summary([2.0, 3.0, 4.0]), 2.5, 3.5, note="a against b")]
    written = report.write(
        *("decode", "Decoding", ("who", "tokens/s"), [("ours", "3.0")], {"rates": {"1": {"ours": [2.0, 3.0]}}}),
        verdicts=verdicts,
        skipped={"vllm": "not installed"},
        settings={"threads": 2},
    )
    assert report.read("decode") == written
    on_disk = json.loads((results / "decode.json").read_text())
    assert on_disk["verdicts"][0]["result"] == "must" and not on_disk["verdicts"][0]["certain"]
    assert on_disk["verdicts"][0]["measured"] == {"median": 3.0, "low": 2.0, "high": 4.0, "count": 3}
    assert on_disk["machine"]["cores"] >= 1 and on_disk["skipped"] == {"vllm": "not installed"}
    assert report.read("prefill") is None


def test_a_quick_record_does_not_replace_a_real_one(results):
    real = report.write("decode", "", ("who",), [], {"rate": 1.0}, settings={"quick": False})
    quick = report.write("decode", "", ("who",), [], {"rate": 9.0}, settings={"quick": True})
    assert report.read("decode") == real and report.read("decode", quick=True) == quick


def test_a_record_with_other_fields_is_refused(results):
    report.write("decode", "", ("who",), [], {})
    path = results / "decode.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "surprise": 1}))
    with pytest.raises(ValidationError, match="surprise"):
        report.read("decode")


def test_plots_hold_every_line_and_are_equal_for_equal_figures(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "FOLDER", tmp_path / "images")
    with pytest.raises(SystemExit, match="nothing to plot"):
        plot.run(Options())
    rates = {"1": {"ours tp1": [80.0, 90.0], "hf": [30.0, 31.0]}, "4": {"ours tp1": [300.0, 310.0], "hf": [99.0, 98.0]}}
    contexts = {"ours tp1": {"4": {"128": [0.012, 0.013], "4096": [0.02, 0.03]}}}
    report.write("decode", "", ("who",), [], {"rates": rates, "contexts": contexts}, settings={"threads": 2})
    plot.run(Options())
    first = [(tmp_path / "images" / name).read_bytes() for name in ("decode.svg", "context.svg")]
    words = ["".join(ElementTree.fromstring(content).itertext()) for content in first]
    for word in ("ours tp1", "hf", "tokens/s", "batch", "Decoding"):
        assert word in words[0]
    for word in ("ours tp1, batch 4", "milliseconds", "4096"):
        assert word in words[1]
    plot.run(Options())
    assert first == [(tmp_path / "images" / name).read_bytes() for name in ("decode.svg", "context.svg")]


MEASURED = """
import sys
from pathlib import Path
from bench import __main__, report, sizes

seconds, failed = float(sys.argv.pop()), sys.argv.pop()

def trials(path, model, found):
    found["swap"] = 2.0
    if failed:
        sys.exit(failed)

sizes._model = sizes._artifact = lambda *_: None
sizes._record = lambda *_: {"planned": 1.0, "held": 1.0, "with_files": 1.0}
sizes.measure = lambda *_: {"bytes": 1, "memory": [1], "start_seconds": [seconds], "recovery_seconds": [1.0]}
sizes.trials, report.RESULTS = trials, Path("results")
__main__.main()
"""


def _sizes(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`bench sizes` with measurements that are made up: why a trial failed, and the seconds of a start."""
    command = [sys.executable, "-c", MEASURED, "sizes", "--sizes", "3.0B", "--folder", folder, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_trial_that_failed_loses_no_figures(tmp_path):
    done = _sizes(tmp_path, "a swap was answered 500", "7")
    assert done.returncode == 1 and "a swap was answered 500" in done.stderr
    figures = json.loads((tmp_path / "results" / "sizes.json").read_text())["figures"]["3.0B"]
    assert figures["start_seconds"] == [7.0] and figures["trials"] == {"swap": 2.0}


@pytest.mark.parametrize(
    ("seconds", "more", "status"), [("7", [], 0), ("9", [], 1), ("9", ["--quick"], 0)], ids=["kept", "missed", "quick"]
)
def test_a_requirement_that_is_missed_is_the_status_and_named(tmp_path, seconds, more, status):
    done = _sizes(tmp_path, *more, "", seconds)
    assert done.returncode == status, done.stderr
    assert ("  sizes: 3.0B, start to ready\n" in done.stderr) == (status == 1)
    assert "killed to ready again" not in done.stderr


def test_what_grows_with_a_model_is_plotted_against_its_bytes(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "FOLDER", tmp_path / "images")
    figures = {
        name: {
            "bytes": gib * 2**30,
            "start_seconds": [gib, gib + 1.0],
            "recovery_seconds": [2.0 * gib],
            "memory": [3 * gib * 2**30],
            "trace": {"seconds": 1.0, "planned": 2**30, "held": 2**30, "with_files": 2**31},
            "trials": {"swap": 1.0},
        }
        for name, gib in (("254M", 0.5), ("3.0B", 5.5))
    }
    sizes.write(Options(), figures)
    record = report.read("sizes")
    assert record is not None
    short = {verdict.row: verdict.result for verdict in record.verdicts}
    assert short["3.0B, start to ready"] == "must" and short["3.0B, rank killed to ready again"] == "short"
    assert short["254M, plan of tracing's memory, off by"] == "aim"
    plot.run(Options())
    words = "".join(ElementTree.parse(tmp_path / "images" / "sizes.svg").getroot().itertext())
    assert all(word in words for word in ("start to ready", "weights, GiB", "0.5", "5.5"))
    assert "its plan" in "".join(ElementTree.parse(tmp_path / "images" / "sizes-memory.svg").getroot().itertext())


def test_the_planned_peak_is_read_from_what_a_trace_prints():
    assert sizes.planned("  peak memory, tracing    about 3.05 GiB\n") == int(3.05 * 2**30)
    assert sizes.planned("peak memory, tracing  about 812 MiB") == 812 << 20
    with pytest.raises(SystemExit, match="announced no peak"):
        sizes.planned("graphs to compile  6")
