"""What a fork server is for, when it ends, and that nothing outlives it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import ChildProcess, wait_for_an_end
from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.forked_process import ForkedProcess
from nxd_infer.util.python_command import child_environment, python_code
from tests.support.forks import LIMIT, SLEEP, forget, kept, output_of, start
from tests.support.forks import without_a_server as without_a_server
from tests.support.processes import gone, parent_of, wait_until


def test_what_differs_in_an_import_has_another_server(monkeypatch: pytest.MonkeyPatch):
    def server(**changes: str) -> int | None:
        child = start(environment=child_environment(**changes))
        kept.append(child)
        return parent_of(child.pid)

    kept: list[ForkedProcess] = []
    first = server()
    assert server() == server(NXD_INFER_CACHE="/elsewhere", PYTEST_CURRENT_TEST="x") == first
    others = {server(OMP_WAIT_POLICY="ACTIVE"), server(TMPDIR="/elsewhere")}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        others.add(server())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    before = os.umask(0o077)
    try:
        others.add(server())
    finally:
        os.umask(before)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        others.add(server())
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert len(others - {first, os.getpid()}) == 5
    for child in kept:
        assert child.running
        child.end()
        assert child.explain() == "was ended by SIGKILL" and gone(child.pid)


def test_what_it_started_ends_with_it(tmp_path: Path):
    file = tmp_path / "pid"
    code = (
        "import subprocess, pathlib\n"
        f"pathlib.Path({str(file)!r}).write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    )
    for rest in ("", SLEEP):
        file.unlink(missing_ok=True)
        child = start(code + rest)
        wait_until(lambda: file.exists() and file.read_text())
        child.end(patience=0 if rest else LIMIT)
        assert gone(int(file.read_text()), LIMIT) and gone(child.pid, LIMIT)


def test_it_can_be_killed_from_the_first_moment():
    for _ in range(100):
        child = start()
        child.kill()
        assert child.wait(LIMIT) and child.explain() == "was ended by SIGKILL" and gone(child.pid)
        child.end()


def test_waiting_for_the_first_end():
    long, short = start(), start("import time; time.sleep(0.3)")
    assert wait_for_an_end([long, short], LIMIT) == [short]
    assert wait_for_an_end([long], 0.1) == [] and long.running
    long.terminate()
    assert wait_for_an_end([short, long], LIMIT) and long.wait(LIMIT) and long.explain() == "was ended by SIGTERM"


def test_what_nobody_keeps_ends():
    child = start()
    pid = child.pid
    del child
    assert gone(pid, LIMIT)


def test_children_end_with_their_server_and_the_next_gets_a_new_one(tmp_path: Path):
    file = tmp_path / "pid"
    code = f"import subprocess; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
    child = start(code + SLEEP)
    wait_until(lambda: file.exists() and file.read_text())
    server = parent_of(child.pid)
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert child.wait(LIMIT) and gone(child.pid, LIMIT)
    assert child.explain() == "was ended by SIGKILL, with the process that it was forked from"
    child.end()
    assert gone(int(file.read_text()), LIMIT)
    wait_until(lambda: (last := kept()) is None or not last.usable)
    other = start()
    assert parent_of(other.pid) not in (server, os.getpid())


def test_a_signal_to_all_processes_does_not_end_the_server():
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(server, number)
    other = start()
    assert parent_of(other.pid) == server
    other.terminate()
    assert other.wait(LIMIT) and other.explain() == "was ended by SIGTERM"


def test_how_children_end_is_known_also_if_the_caller_ignores_its_own():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        other, child = start(), start("sys.exit(3)")
        assert child.wait(LIMIT) and child.explain() == "ended with status 3" and other.running
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_server_without_work_ends_and_its_next_job_is_done_by_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 3.0)
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    time.sleep(4.5)
    assert not gone(server)  # it has a child
    child.end()
    assert gone(server, LIMIT)
    wait_until(lambda: (last := kept()) is None or not last.usable)
    child = start()
    assert parent_of(child.pid) not in (server, os.getpid())


def test_a_server_that_ended_before_its_first_job_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.1)
    environment = child_environment()
    server = fork_server("json", environment)
    assert server._running.ended.wait(LIMIT)
    with pytest.raises(CannotForkError, match="it takes no job"):
        server.fork(python_code(SLEEP), environment=environment, inherit=[])
    monkeypatch.undo()
    assert fork_server("json", environment) is not server
    assert start(environment=environment).running


def test_children_that_are_kept_to_the_end_of_the_program_are_let_go_quietly():
    """By then the modules' names are gone."""
    code = (
        "import torch\n"
        "from nxd_infer.util import fork_server\n"
        "import os\n"
        "from nxd_infer.util.python_command import python_code\n"
        "server = fork_server.fork_server('json', os.environ)\n"
        "model = torch.nn.Linear(1, 1)\n"  # PyTorch keeps it longer
        "model.child = server.fork(python_code('import time; time.sleep(600)'), environment=os.environ, inherit=[])\n"
    )
    done = subprocess.run(
        python_code(code), env=child_environment(), capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()", "1 / 0"])
def test_nothing_outlives_the_caller(end: str):
    code = (
        "import os, time\nfrom nxd_infer.util.fork_server import fork_server\n"
        "from nxd_infer.util.python_command import python_code\n"
        "server = fork_server('json', os.environ)\n"
        "child = server.fork(python_code('import time; time.sleep(600)'), environment=os.environ, inherit=[])\n"
        f"print(child.pid, flush=True)\nsys.stdin.read()\n{end}"
    )
    caller = ChildProcess(
        python_code(code), environment=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert caller.stdin is not None and caller.stdout is not None
    pid = int(caller.stdout.readline())
    server = parent_of(pid)
    assert server not in (caller.pid, None)
    caller.stdin.close()
    assert caller.wait(LIMIT)
    assert gone(pid, LIMIT) and gone(server or 0, LIMIT)
    caller.end()


MODULES = {
    "not there": "",
    "raises": "raise OSError(12, 'no memory')",
    "has threads": "import threading; threading.Thread(target=threading.Event().wait).start()",
    "ends": "import os; os._exit(0)",
}


@pytest.mark.parametrize("why", ["turned off", "cores", *MODULES])
def test_where_it_cannot_fork_that_is_said_at_once_from_then_on(why: str, tmp_path: Path):
    if MODULES.get(why):
        (tmp_path / "strange.py").write_text(MODULES[why])
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    if why == "turned off":
        environment["NXD_INFER_FORK"] = "0"
    if why == "cores":
        environment["OMP_PROC_BIND"] = "true"
    says = {"turned off": "off", "cores": "cores", "not there": "No module", "raises": "no memory", "ends": "ended"}
    servers = set()
    for _ in range(2):
        with pytest.raises(CannotForkError, match=says.get(why, "threads")):
            start(imports="strange", environment=environment)
        servers.add(kept("strange"))
    assert len(servers) == 1


def test_a_kernel_without_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef no(*_): raise OSError(38, 'Function not implemented')\nos.pidfd_open = no\n"
    )
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    with pytest.raises(CannotForkError, match="not implemented"):
        start(environment=environment)


def test_a_forked_copy_of_the_caller_has_its_own_server():
    child = start()
    pid = os.fork()
    if not pid:
        signal.alarm(60)  # the fork of a process with threads might hang
        code = 1
        try:
            own = start()
            code = int(parent_of(own.pid) == parent_of(child.pid))
            forget()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert child.running


def test_nothing_is_left_open():
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    start().end()
    before = opened()
    for number in range(5):
        output_of(start(stdout=subprocess.PIPE, code="print()", environment=child_environment(NUMBER=str(number))))
    assert opened() <= before
