"""A child process: started, waited for, ended with what it started, explained."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from nxd_infer.processes.child import ChildProcess, end_all, wait_for_an_end
from nxd_infer.processes.command import python_code
from nxd_infer.processes.state import process_start, process_state
from tests.support.processes import gone, wait_until

SLEEP = "import time; time.sleep(600)"


def test_how_it_ended_is_said():
    ends, killed = ChildProcess(python_code("sys.exit(3)")), ChildProcess(python_code(SLEEP))
    assert killed.explain() == "is still running"
    assert ends.wait(60) and ends.explain() == "ended with status 3"
    killed.kill()
    assert killed.wait(60) and killed.explain() == "was ended by SIGKILL" and killed.returncode == -9
    assert not Path(f"/proc/{killed.pid}").exists(), "once its end has been seen, its number is free"
    killed.end()
    killed.end()  # twice is once
    assert killed.explain() == "was ended by SIGKILL"


@pytest.mark.parametrize("last", ["time.sleep(600)", "sys.exit(1)"])
def test_what_it_started_ends_with_it(tmp_path: Path, last: str):
    """A compiler whose starter has died holds the machine's memory."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, pathlib, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(other.pid))\n"
        f"{last}"
    )
    child = ChildProcess(python_code(code))
    wait_until(lambda: file.exists() and file.read_text() and (child.running == ("sleep" in last)))
    child.end()
    assert not child.running and gone(int(file.read_text()), 60)


def test_those_that_are_asked_may_put_things_in_order(tmp_path: Path):
    """And one that does not listen is killed after the same time, not after its own."""
    file = tmp_path / "order"
    polite = (
        "import signal, time, pathlib\n"
        f"file = pathlib.Path({str(file)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (file.write_text('done'), sys.exit(0)))\n"
        "file.write_text('ready')\n"
        "time.sleep(600)"
    )
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}"
    children = [ChildProcess(python_code(polite)), ChildProcess(python_code(deaf), stdout=subprocess.PIPE)]
    assert children[1].stdout is not None and children[1].stdout.readline()
    wait_until(lambda: file.exists() and file.read_text() == "ready")
    end_all(children, patience=3.0)
    assert file.read_text() == "done"
    assert [child.explain() for child in children] == ["ended with status 0", "was ended by SIGKILL"]


def test_the_first_end_is_noticed():
    long, short = ChildProcess(python_code(SLEEP)), ChildProcess(python_code("import time; time.sleep(0.3)"))
    try:
        assert wait_for_an_end([long, short], 60) == [short]
        assert wait_for_an_end([long], 0.2) == []
    finally:
        end_all([long, short])


def test_the_state_of_a_process():
    assert process_state(os.getpid(), process_start(os.getpid())) == "running"
    assert process_state(os.getpid(), 1) == "ended", "the process id belongs to another process now"
    child = os.fork()
    if child == 0:
        os._exit(0)
    start = process_start(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process_state(child, start) == "ended", "a zombie does nothing any more"
    os.waitpid(child, 0)
    assert process_state(child, start) == "ended"


def test_a_process_has_not_ended_because_no_file_can_be_opened():
    """A server whose connections use all descriptors does not restart its ranks for it."""
    limits, child = resource.getrlimit(resource.RLIMIT_NOFILE), ChildProcess(python_code(SLEEP))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        state = process_state(child.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        child.end()
    assert state == "running"
