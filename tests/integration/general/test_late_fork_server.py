"""A fork server that is late, or stands still: nobody waits for it without end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import wait_for_an_end
from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.python_command import child_environment, python_code
from tests.support.forks import LIMIT, SLEEP, children_of, kept, output_of, start
from tests.support.forks import without_a_server as without_a_server
from tests.support.processes import gone, parent_of, stopped, wait_until


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
        servers.add(kept("slow"))
    (server,) = servers
    assert server is not None and server._running.ended.is_set()


def test_a_server_that_stops_is_left_to_its_children_and_the_next_gets_a_new_one(monkeypatch: pytest.MonkeyPatch):
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    with stopped(server):
        stuck = kept()
        assert stuck is not None
        for _ in range(2):  # the second one at once
            with pytest.raises(CannotForkError, match=r"has not forked for \d+ s"):
                stuck.fork(python_code(SLEEP), environment=child_environment(), inherit=[])
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
    environment = child_environment(PYTHONUNBUFFERED="1")
    asked: list[float] = []

    def gives_up() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > 1.5

    with stopped(server):
        child.end()
        with pytest.raises(CannotForkError, match="has not forked"):
            fork_server("json", environment).fork(
                python_code(SLEEP), environment=environment, inherit=[], stopped=gives_up
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


def test_a_job_that_nobody_waits_for_any_more_is_never_begun(tmp_path: Path):
    """Its caller may have started the program in another way: both would read what is meant for one. The server's
    look at what has become of the caller is late here."""
    go, file = tmp_path / "go", tmp_path / "pid"
    (tmp_path / "some.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "os.register_at_fork(after_in_parent=lambda: time.sleep(0.5))"
    )
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    server = fork_server("some", environment)
    with pytest.raises(CannotForkError, match="wants"):
        code = f"open({str(file)!r}, 'a').write('begun')\n"
        server.fork(python_code(code), environment=environment, inherit=[], stopped=lambda: True)
    go.touch()
    last = server.fork(python_code("sys.exit(5)"), environment=environment, inherit=[])  # after that one
    assert last.wait(LIMIT) and last.returncode == 5
    assert server._running.process is not None
    left = partial(children_of, server._running.process.pid)
    wait_until(lambda: not left())
    assert not file.exists()


def test_threads_that_asked_while_it_imported_wait_for_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The import takes longer than an answer may take later, and the first thread's child is not the other's."""
    go, passed = tmp_path / "go", [0.0]
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "os.register_at_fork(before=lambda: time.sleep(0.3))"
    )
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    monkeypatch.setattr(module, "_IMPORT_SECONDS", 2 * LIMIT)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    server = fork_server("slow", environment)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(start, "sys.exit(5)", imports="slow", environment=environment) for _ in range(3)]
        wait_until(lambda: server._asking == 3)
        passed[0] = LIMIT + 60  # as if the import took as long
        go.touch()
        children = [job.result(LIMIT) for job in asked]
    assert all(child.wait(LIMIT) and child.returncode == 5 for child in children)


def test_a_thread_that_gives_up_leaves_the_server_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However long it has waited: the other one still wants its child."""
    monkeypatch.setattr(module, "_STOPPED_SECONDS", 0.0)
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    server = fork_server("slow", environment)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.fork, python_code("sys.exit(5)"), environment=environment, inherit=[])
        wait_until(lambda: server._asking)
        with pytest.raises(CannotForkError, match="wants"):
            server.fork(python_code(SLEEP), environment=environment, inherit=[], stopped=lambda: True)
        go.touch()
        child = asked.result(LIMIT)
    assert child.wait(LIMIT) and child.returncode == 5 and not server._asking


def test_a_job_that_was_given_up_is_never_begun_if_a_copy_of_its_caller_lives(monkeypatch: pytest.MonkeyPatch):
    """A fork of the caller's process has the caller's end of the connection, too."""
    monkeypatch.setattr(module, "_UNWANTED_SECONDS", LIMIT)  # the server is to go on
    child = start()
    server, environment = kept(), child_environment(PYTHONUNBUFFERED="1")
    pid = parent_of(child.pid)
    assert server is not None and pid is not None
    asked, copied = threading.Event(), threading.Event()

    def gives_up() -> bool:
        asked.set()
        return copied.is_set()

    with stopped(pid), ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.fork, python_code(SLEEP), environment=environment, inherit=[], stopped=gives_up)
        assert asked.wait(LIMIT)
        copy = os.fork()
        if not copy:
            signal.alarm(300)
            signal.pause()
        copied.set()
        with pytest.raises(CannotForkError):
            job.result(LIMIT)
    try:
        assert output_of(
            server.fork(python_code("print(1)"), environment=environment, inherit=[], stdout=subprocess.PIPE)
        ).startswith("1")
        wait_until(lambda: children_of(pid) == {child.pid}, LIMIT)
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


def test_a_server_whose_start_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch):
    begin, asked = threading.Event(), []

    def popen(*_: object, **__: object) -> None:
        asked.append(True)
        begin.wait(LIMIT)
        raise OSError("too late")

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    monkeypatch.setattr(module, "_START_SECONDS", 0.1)
    try:
        for _ in range(2):  # the second time at once: nobody starts another
            with pytest.raises(CannotForkError, match="it has not started for 0 s"):
                start()
        wait_until(lambda: asked)
    finally:
        begin.set()
    assert len(asked) == 1
