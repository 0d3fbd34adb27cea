"""What a fork server is for, when it ends, and that nothing outlives it or waits for it without end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import ChildProcess, wait_for_an_end
from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.forked_process import ForkedProcess
from nxd_infer.util.python_command import child_environment, python_code
from tests.forks import LIMIT, SLEEP, children_of, forget, output_of, start
from tests.forks import without_a_server as without_a_server
from tests.processes import gone, parent_of, stopped, wait_until


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
        assert gone(int(file.read_text()), LIMIT) and not Path(f"/proc/{child.pid}").exists()


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
    wait_until(lambda: module._kept is None or not module._kept[1].usable)
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
    wait_until(lambda: module._kept is None or not module._kept[1].usable)
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
        servers.add(module._kept and module._kept[1])
    assert len(servers) == 1


def test_a_kernel_without_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef no(*_): raise OSError(38, 'Function not implemented')\nos.pidfd_open = no\n"
    )
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    with pytest.raises(CannotForkError, match="not implemented"):
        start(environment=environment)


def test_waiting_ends_when_nobody_wants_the_child_any_more(tmp_path: Path):
    """And nobody else waits meanwhile."""
    (tmp_path / "slow.py").write_text(SLEEP)
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    stop, asked = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def stopped() -> bool:
        asked.set()
        return stop.is_set()

    def ask() -> None:
        try:
            slow.fork(python_code(SLEEP), environment=environment, inherit=[], stopped=stopped)
        except CannotForkError as error:
            errors.append(error)

    slow = fork_server("slow", environment)
    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(LIMIT)
    assert output_of(start("print('done')", stdout=subprocess.PIPE)) == "done\n(ended with status 0)"
    thread.join(0.3)
    assert thread.is_alive()
    stop.set()
    thread.join(LIMIT)
    assert not thread.is_alive() and "wants" in str(errors[0])
    slow.end()


def test_a_late_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_IMPORT_SECONDS", 0.3)
    (tmp_path / "slow.py").write_text(SLEEP)
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    servers = set()
    for _ in range(2):
        with pytest.raises(CannotForkError, match=r"has not forked for \d+ s"):
            start(imports="slow", environment=environment)
        servers.add(module._kept and module._kept[1])
    (server,) = servers
    assert server is not None and server._running.ended.is_set()


def test_a_server_that_stops_is_left_to_its_children_and_the_next_gets_a_new_one(monkeypatch: pytest.MonkeyPatch):
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    with stopped(server):
        kept = module._kept
        assert kept is not None
        for _ in range(2):  # the second one at once
            with pytest.raises(CannotForkError, match="has not forked for 0 s"):
                kept[1].fork(python_code(SLEEP), environment=child_environment(), inherit=[])
        monkeypatch.undo()
        assert child.running, "it does not need its server"
        assert parent_of(start().pid) not in (server, os.getpid())
        child.end()
    assert child.returncode == -signal.SIGKILL


def test_a_server_that_stops_is_ended_when_no_child_runs(monkeypatch: pytest.MonkeyPatch):
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    with stopped(server):
        child.end()
        monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
        with pytest.raises(CannotForkError, match="has not forked"):
            start()
        assert gone(server, LIMIT)
    monkeypatch.undo()
    assert start().running


def test_a_start_that_is_given_up_leaves_no_server_that_stops_to_the_next():
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    begun, environment = time.monotonic(), child_environment(PYTHONUNBUFFERED="1")
    with stopped(server):
        child.end()
        with pytest.raises(CannotForkError, match="has not forked"):
            fork_server("json", environment).fork(
                python_code(SLEEP),
                environment=environment,
                inherit=[],
                stopped=lambda: time.monotonic() - begun > 1.5,
            )
        assert gone(server, LIMIT) and parent_of(start().pid) not in (server, os.getpid())


ENDS = {"sys.exit(3)": "ended with status 3", "os.kill(os.getpid(), 11)": "was ended by SIGSEGV", SLEEP: "SIGKILL"}


@pytest.mark.parametrize("code", ENDS)
def test_how_a_child_ended_is_known_while_its_server_is_stopped_and_later(code: str, tmp_path: Path):
    """And what it left behind is ended."""
    file, go = tmp_path / "pid", tmp_path / "go"
    left = (
        "import os, subprocess, sys, time\n"
        f"open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    child = start(left + code)
    server = parent_of(child.pid)
    assert server is not None
    wait_until(lambda: file.exists() and file.read_text())
    with stopped(server):
        go.touch()
        if code == SLEEP:
            child.kill()
        assert child.wait(LIMIT) and wait_for_an_end([child], LIMIT) == [child]
        assert ENDS[code] in child.explain() and gone(int(file.read_text()), LIMIT)
        os.kill(server, signal.SIGKILL)
    assert gone(server, LIMIT) and ENDS[code] in child.explain()
    child.end()


def test_nobody_waits_again_for_what_somebody_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_STOPPED_SECONDS", 0.0)
    (tmp_path / "slow.py").write_text(SLEEP)
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    server = fork_server("slow", environment)
    with pytest.raises(CannotForkError, match="has not forked"):
        server.fork(python_code(SLEEP), environment=environment, inherit=[], stopped=lambda: True)
    with pytest.raises(CannotForkError, match="has not forked"):
        fork_server("slow", environment)


def test_a_job_that_nobody_waits_for_any_more_leaves_no_child(tmp_path: Path):
    go = tmp_path / "go"
    (tmp_path / "some.py").write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    file = tmp_path / "pid"
    code = f"import os; open({str(file)!r}, 'a').write(f'{{os.getpid()}} ')\n" + SLEEP
    for _ in range(5):
        go.unlink(missing_ok=True)
        server = fork_server("some", environment)
        with pytest.raises(CannotForkError, match="wants"):
            server.fork(python_code(code), environment=environment, inherit=[], stopped=lambda: True)
        go.touch()
        last = server.fork(python_code("sys.exit(5)"), environment=environment, inherit=[])  # after that one
        assert last.wait(LIMIT) and last.returncode == 5
        started = file.read_text().split() if file.exists() else []
        assert all(gone(int(pid), LIMIT) for pid in started)
        assert server._running.process is not None
        left = partial(children_of, server._running.process.pid)
        wait_until(lambda left=left: not left())
        forget()


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
