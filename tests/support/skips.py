"""A pytest plugin: why a test may be skipped. A skip for any other reason fails the run."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from importlib.metadata import version

import pytest

OF_A_MACHINE = (
    r"needs two cores, and the time of all that there are",
    r"ranks of two threads do not keep to cores here",
    r"this machine's best instructions are ",
    r"needs root, to make network namespaces",
    r"needs ip and unshare ",
    r"kubectl is not installed",
)
OF_AN_OLDER_TORCH = (r"the native operators need torch 2\.13 or newer",)
WITH_XLA = (r"torch_xla is installed, which compat never hides",)
WITHOUT_XLA = (r"torch_xla is not installed", r"it lacks .*\btorch_xla 2\.9")
ON_NEURON = (
    r"it asks the stand-in",
    r"it needs a machine that can be described as one likes",
)


def allowed() -> Iterator[str]:
    """Yield patterns for how the reasons begin that hold here."""
    yield from OF_A_MACHINE
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        yield from OF_AN_OLDER_TORCH
    yield from WITHOUT_XLA if importlib.util.find_spec("torch_xla") is None else WITH_XLA
    if os.environ.get("NXD_INFER_REAL_NEURON") == "1":
        yield from ON_NEURON


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test, or a module, was skipped."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    # the second form is of a test that ran in a process of its own
    return re.sub(r"^(Skipped: |SKIPPED \[\d+\] \S+ )", "", told)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:  # one of several processes: the first has all reports
        return
    patterns = [re.compile(pattern) for pattern in allowed()]
    skipped = [report for report in reporter.stats.get("skipped", []) if not hasattr(report, "wasxfail")]
    found = {reason_of(report) for report in skipped}
    wrong = sorted(reason for reason in found if not any(pattern.match(reason) for pattern in patterns))
    if wrong:
        reporter.section("skipped for a reason that tests/support/skips.py does not have here", red=True)
        for reason in wrong:
            reporter.line(reason)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
