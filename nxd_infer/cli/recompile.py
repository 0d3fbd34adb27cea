"""``nxd-infer recompile``: compile an artifact's stored graphs for another machine or backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer.cli.console import bar, console, duration
from nxd_infer.cli.trace import TraceProgress, note_ignored
from nxd_infer.trace import load_artifact, parallel_model_recompile
from nxd_infer.trace.options import RecompileOptions
from nxd_infer.util.options import from_command


def run(artifact: Path, out: Path, given: dict[str, Any]) -> None:
    """Write ``out``; print what was compiled and for which target. ``given``: RecompileOptions by name, or None."""
    with bar(drawn=console.is_terminal) as display:
        arguments = from_command(RecompileOptions, given)
        report = parallel_model_recompile(artifact, out, **arguments, progress=TraceProgress(display))
    note_ignored(report)
    manifest = load_artifact(out, verify=False, runs_here=False).manifest
    made_for = ", ".join([manifest.backend, *(value for value in manifest.target.values() if isinstance(value, str))])
    console.print(
        f"wrote {out}: {report['graphs']} graphs ({report['compiled']} compiled now) for {made_for}, "
        f"in {duration(report['seconds'])}",
        markup=False,
    )
