"""What a benchmark leaves behind: a record that is checked, and plots made from it."""

from __future__ import annotations

import json
import os
import signal
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from pydantic import ValidationError

from bench import plot, report, sizes
from bench.__main__ import main
from bench.options import Options
from bench.stats import Verdict, summary


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


def test_a_trial_that_failed_loses_no_figures_and_what_is_missed_is_named(results, tmp_path, monkeypatch):
    """`bench sizes` with measurements that are made up."""

    def trials(path, model, found):
        found["swap"] = 2.0
        raise SystemExit("a swap was answered 500")

    made = {"bytes": 1, "memory": [1], "start_seconds": [9.0], "recovery_seconds": [1.0]}
    for name, function in {
        "_model": lambda *_: None,
        "_artifact": lambda *_: None,
        "_record": lambda *_: {"planned": 1.0, "held": 1.0, "with_files": 1.0},
        "measure": lambda *_: made,
        "trials": trials,
    }.items():
        monkeypatch.setattr(sizes, name, function)
    with pytest.raises(SystemExit, match="a swap was answered 500"):
        sizes.run(Options(sizes=("3.0B",), folder=tmp_path))
    record = report.read("sizes")
    assert record is not None and record.figures["3.0B"]["trials"] == {"swap": 2.0}
    assert record.figures["3.0B"]["start_seconds"] == [9.0]
    monkeypatch.setattr(sizes, "run", lambda options: None)
    for module, name in ((signal, "signal"), (signal, "alarm"), (os, "sched_setaffinity")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setenv("COLUMNS", "80")  # which it sets where nothing has
    monkeypatch.setattr(sys, "argv", ["bench", "sizes", "--sizes", "3.0B"])
    with pytest.raises(SystemExit, match=r"(?s)short of .*  sizes: 3\.0B, start to ready$"):
        main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--quick"])
    main()


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
