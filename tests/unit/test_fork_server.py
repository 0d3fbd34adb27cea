"""A process that is forked from one with torch is what a new interpreter would be, and ends like one."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import ChildProcess, wait_for_an_end
from nxd_infer.util.fork_server import CannotForkError, ForkedProcess, fork_server
from nxd_infer.util.python_command import child_environment, python_code, python_module
from tests.processes import gone, parent_of, wait_until

LIMIT = 300.0
SLEEP = "import time; time.sleep(600)"
RANK = "nxd_infer.runtime.rank_process.loop"
PROBE = """
import gc, json, os, resource, signal, tempfile, threading
descriptors = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)  # not the one of this list
        descriptors.append(number)
    except OSError:
        pass
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith('RLIMIT_')}
rights = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Sig", "Mems_allowed", "Threads")
def annotated(x: int): pass
print(json.dumps({
    "annotations": str(annotated.__annotations__), "oom": open("/proc/self/oom_score_adj").read(),
    "program": __name__, "argv": sys.argv, "path": sys.path, "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},  # an interpreter adds it
    "C library": os.popen("echo $MARK; echo $NXD_OTHER").read(), "temporary": tempfile.gettempdir(),
    "directory": os.getcwd(), "mask": os.umask(0), "limits": limits, "cores": sorted(os.sched_getaffinity(0)),
    "descriptors": sorted(descriptors), "read": sys.stdin.read(), "nice": os.nice(0),
    "session": os.getsid(0) == os.getpid() == os.getpgid(0), "collects": gc.isenabled(),
    "threads": threading.active_count(), "thread": threading.current_thread().name,
    "rights": [line for line in open("/proc/self/status") if line.startswith(rights)],
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)},
    "encoding": sys.stdout.encoding, "flags": str(sys.flags), "stdout": type(sys.stdout.buffer).__name__,
}))
if "torch" in sys.argv:
    import torch
    torch.set_num_threads(2)
    torch.manual_seed(1)
    print(torch.rand(3), torch.get_num_threads(), torch.ones(300, 300) @ torch.ones(300, 300))
    print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.randn(200000, requires_grad=True).sum().backward())
"""


@pytest.fixture(autouse=True)
def without_a_server() -> Iterator[None]:
    """A test begins with no server, and leaves none."""
    forget()
    yield
    forget()


def forget() -> None:
    if module._kept is not None:
        module._kept[1].end()
        module._kept = None


def children_of(pid: int) -> set[int]:
    return {int(other) for other in os.listdir("/proc") if other.isdigit() and parent_of(int(other)) == pid}


def start(
    code: str = SLEEP,
    *arguments: str,
    imports: str = "json",
    environment: Mapping[str, str] | None = None,
    inherit: Iterable[int] = (),
    stdout: int | None = None,
) -> ForkedProcess:
    own = child_environment(PYTHONUNBUFFERED="1") if environment is None else environment
    command = python_code(code, *arguments)
    return fork_server(imports, own).fork(command, environment=own, inherit=inherit, stdout=stdout)


def spawn(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, inherit: Iterable[int] = (), **_: str
) -> ChildProcess:
    own = child_environment(PYTHONUNBUFFERED="1") if environment is None else environment
    return ChildProcess(
        python_code(code, *arguments),
        environment=own,
        inherit=inherit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def output_of(child: ChildProcess) -> str:
    """What a child prints, and how it ends."""
    assert child.stdout is not None
    output = child.stdout.read().decode()
    child.end(patience=LIMIT)
    return f"{output}({child.explain()})"


def both(code: str, *arguments: str, imports: str = "json", **options) -> str:
    """The output and the end of a program, which are the same in a new interpreter."""
    expected = output_of(spawn(code, *arguments, **options))
    assert output_of(start(code, *arguments, imports=imports, stdout=subprocess.PIPE, **options)) == expected
    return expected


@pytest.mark.parametrize("imports", ["json", RANK])
def test_it_is_what_a_new_interpreter_would_be(imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, second = os.pipe()
    high = fcntl.fcntl(second, fcntl.F_DUPFD_CLOEXEC, 300)
    extra = ["torch"] if imports == RANK else []
    changed = child_environment(MARK="é = x\ny", TMPDIR=str(tmp_path), NXD_OTHER="1", PYTHONUNBUFFERED="1")
    changed.pop("PWD", None)
    before = os.umask(0o027)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        found = both(PROBE, "a", "b c", "ü", *extra, imports=imports, inherit=[high, first])
        assert json.loads(found.splitlines()[0])["descriptors"] == sorted([0, 1, 2, first, high])
        found = both(PROBE, "", *extra, imports=imports, environment=changed)
        assert json.loads(found.splitlines()[0])["C library"] == "é = x y\n1\n"
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.umask(before)
        for descriptor in (first, second, high):
            os.close(descriptor)


def test_modules_are_found_where_the_environment_says(tmp_path: Path):
    (tmp_path / "mine.py").write_text("if __name__ == '__main__': import sys; print(sys.argv[1:], __file__)\n")
    environment = child_environment(PYTHONUNBUFFERED="1")
    environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    command = python_module("mine", "y")
    child = fork_server("json", environment).fork(command, environment=environment, inherit=[], stdout=subprocess.PIPE)
    assert output_of(child) == f"['y'] {tmp_path}/mine.py\n(ended with status 0)"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("sys.exit(3)", "(ended with status 3)"),
        ("sys.exit()", "(ended with status 0)"),
        ("print('first', end=''); sys.exit('why')", "firstwhy\n(ended with status 1)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "(was ended by SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 15)", "(was ended by SIGTERM)"),
        ("import atexit; atexit.register(print, 'at the end'); sys.exit(2)", "at the end\n(ended with status 2)"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('later'))).start()",
            "later\n(ended with status 0)",
        ),
        ("kept = open(sys.argv[1], 'w'); kept.write('x' * 10)", "(ended with status 0)"),
    ],
)
def test_it_ends_as_a_program_ends(code: str, end: str, tmp_path: Path):
    file = tmp_path / "file"
    assert both(code, str(file)) == end
    assert not file.exists() or file.read_text() == "x" * 10


def test_an_error_shows_its_traceback():
    found = output_of(start("raise ValueError('what is wrong')", stdout=subprocess.PIPE))
    assert found.startswith("Traceback") and found.endswith("ValueError: what is wrong\n(ended with status 1)")


def test_every_descriptor_gets_its_number():
    """They arrive with any numbers, also with those of others, and near the limit."""
    pipes = [os.pipe() for _ in range(40)]
    readers, writers = [a for a, _ in pipes], [b for _, b in pipes]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    high = fcntl.fcntl(writers[0], fcntl.F_DUPFD_CLOEXEC, 511)  # the last one
    code = "import os\nfor n in map(int, sys.argv[1:]): os.write(n, b'%d;' % n)"
    try:
        for seed in range(5):
            order = random.Random(seed).sample([*writers, high], 41)
            child = start(code, *map(str, sorted(order)), inherit=order, stdout=subprocess.PIPE)
            assert output_of(child) == "(ended with status 0)"
        for reader, writer in pipes[1:]:
            assert os.read(reader, 1000) == b"%d;" % writer * 5
        assert os.read(readers[0], 1000) == b"%d;511;" % writers[0] * 5
    finally:
        for descriptor in [*readers, *writers, high]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_threads_fork_at_once():
    def one(number: int) -> str:
        return output_of(start("print(sys.argv[1])", str(number), stdout=subprocess.PIPE))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [f"{number}\n(ended with status 0)" for number in range(40)]


def test_random_numbers_differ_in_each():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    found = [output_of(start(code, imports=RANK, stdout=subprocess.PIPE)).split()[:3] for _ in range(3)]
    assert len({value for three in found for value in three}) == 9


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
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.5)
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    time.sleep(1.5)
    assert not gone(server)  # it has a child
    child.end()
    assert gone(server, LIMIT)
    wait_until(lambda: module._kept is None or not module._kept[1].usable)
    child = start()
    assert parent_of(child.pid) not in (server, os.getpid())


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


def test_a_server_that_stops_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    child = start()
    server = parent_of(child.pid)
    assert server is not None
    monkeypatch.setattr(module, "_IMPORT_SECONDS", 0.3)
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(CannotForkError, match=r"not answered for 0\.3 s"):
        start()
    assert child.running
    os.kill(server, signal.SIGCONT)
    child.end()
    assert child.returncode == -signal.SIGKILL


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
    (tmp_path / "some.py").write_text("import time; time.sleep(0.5)")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    file = tmp_path / "pid"
    code = f"import os; open({str(file)!r}, 'a').write(f'{{os.getpid()}} ')\n" + SLEEP
    for _ in range(5):
        server = fork_server("some", environment)
        with pytest.raises(CannotForkError, match="wants"):
            server.fork(python_code(code), environment=environment, inherit=[], stopped=lambda: True)
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
