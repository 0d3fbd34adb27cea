"""A process that is forked from one with torch is what a new interpreter would be, and ends like one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.forked_process import ForkedProcess
from nxd_infer.util.python_command import child_environment, python_code
from tests.support.forks import forget, kept
from tests.support.processes import gone, parent_of, stopped, wait_until

LIMIT = 300.0
SLEEP = "import time; time.sleep(600)"
RANK = "nxd_infer.runtime.rank_process.loop"


@pytest.fixture(autouse=True)
def without_a_server() -> Iterator[None]:
    """A test begins with no server, and leaves none. A server that a busy machine makes late is waited for, where the
    product would go on without it."""
    forget()
    with pytest.MonkeyPatch.context() as patch:
        for bound in ("_ANSWER_SECONDS", "_STOPPED_SECONDS", "_START_SECONDS"):
            patch.setattr(module, bound, LIMIT)
        yield
    forget()


def start(code: str = SLEEP, *arguments: str, imports: str = "json", **options) -> ForkedProcess:
    options.setdefault("environment", child_environment(PYTHONUNBUFFERED="1"))
    server = fork_server(imports, options["environment"])
    return server.fork(python_code(code, *arguments), **{"inherit": (), **options})


def output_of(child: ChildProcess) -> str:
    """What a child prints, and how it ends."""
    assert child.stdout is not None
    output = child.stdout.read().decode()
    child.end(patience=LIMIT)
    return f"{output}({child.explain()})"


def both(code: str, *arguments: str, imports: str = "json", **options) -> str:
    """The output and the end of a program, which are the same in a new interpreter."""
    options.setdefault("environment", child_environment(PYTHONUNBUFFERED="1"))
    expected = output_of(
        ChildProcess(python_code(code, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    )
    assert output_of(start(code, *arguments, imports=imports, stdout=subprocess.PIPE, **options)) == expected
    return expected


PROBE = """
import json, os, resource, signal, tempfile, threading
with open("/proc/self/status") as status:
    rights = [line for line in status if line.startswith(("Uid", "Groups", "Cap", "NoNewPrivs", "Threads", "Sig"))]
read = sys.stdin.read()
numbers = sorted(int(number) for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}"))
print(json.dumps({
    "program": __name__, "argv": sys.argv, "path": sys.path, "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},  # an interpreter adds it
    "C library": os.popen("echo $MARK; echo $NXD_OTHER").read(), "temporary": tempfile.gettempdir(),
    "directory": os.getcwd(), "mask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "descriptors": numbers, "read": read, "nice": os.nice(0), "rights": rights,
    "cores": sorted(os.sched_getaffinity(0)), "session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": threading.active_count(), "flags": str(sys.flags), "stdout": type(sys.stdout.buffer).__name__,
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)},
}))
import torch
torch.set_num_threads(2)
torch.manual_seed(1)
print(torch.rand(3), torch.get_num_threads(), torch.ones(300, 300) @ torch.ones(300, 300))
print(torch.is_grad_enabled(), torch.randn(200000, requires_grad=True).sum().backward())
"""


def test_it_is_what_a_new_interpreter_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, second = os.pipe()
    environment = child_environment(MARK="é = x\ny", TMPDIR=str(tmp_path), NXD_OTHER="1", PYTHONUNBUFFERED="1")
    environment.pop("PWD", None)
    before = os.umask(0o027)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        found = both(PROBE, "a", "ü", imports=RANK, environment=environment, inherit=[second, first])
        told = json.loads(found.splitlines()[0])
        assert told["descriptors"] == sorted([0, 1, 2, first, second]) and told["C library"] == "é = x y\n1\n"
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.umask(before)
        for descriptor in (first, second):
            os.close(descriptor)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print('first', end=''); sys.exit('why')", "firstwhy\n(ended with status 1)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "(was ended by SIGSEGV)"),
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


def test_many_threads_fork_at_once_and_random_numbers_differ_in_each():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: output_of(start(code, imports=RANK, stdout=subprocess.PIPE))) for _ in range(4)]
        found = [job.result().split()[:3] for job in jobs]
    assert len({value for three in found for value in three}) == 12
    assert len(module._kept) == 1


@pytest.mark.parametrize("victim", ["child", "server"])
def test_what_it_started_ends_with_it_and_with_its_server(tmp_path: Path, victim: str):
    """The next one gets a server that works."""
    file = tmp_path / "pid"
    code = f"import subprocess; open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
    child, other = start(code + SLEEP), start()
    wait_until(lambda: file.exists() and file.read_text())
    server = parent_of(child.pid)
    assert server is not None
    if victim == "server":
        os.kill(server, signal.SIGKILL)
        assert child.wait(LIMIT) and child.explain() == "was ended by SIGKILL, with the process that it was forked from"
        wait_until(lambda: (last := kept("json")) is None or not last.usable)
    child.end()
    assert gone(int(file.read_text()), LIMIT) and gone(child.pid, LIMIT)
    assert other.wait(LIMIT) if victim == "server" else other.running
    assert (parent_of(start().pid) == server) == (victim == "child")


def test_nothing_outlives_a_caller_that_is_killed():
    code = (
        "import os\nfrom nxd_infer.util.fork_server import fork_server\n"
        "from nxd_infer.util.python_command import python_code\n"
        "server = fork_server('json', os.environ)\n"
        "child = server.fork(python_code('import time; time.sleep(600)'), environment=os.environ, inherit=[])\n"
        "print(child.pid, flush=True)\nsys.stdin.read()\nos.kill(os.getpid(), 9)"
    )
    caller = ChildProcess(
        python_code(code), environment=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert caller.stdin is not None and caller.stdout is not None
    pid = int(caller.stdout.readline())
    server = parent_of(pid)
    caller.stdin.close()
    assert caller.wait(LIMIT) and gone(pid, LIMIT) and gone(server or 0, LIMIT)
    caller.end()


@pytest.mark.parametrize("why", ["off", "No module"])
def test_where_it_cannot_fork_that_is_said_at_once_from_then_on(why: str):
    environment = child_environment(NXD_INFER_FORK="0" if why == "off" else "1")
    servers = set()
    for _ in range(2):
        with pytest.raises(CannotForkError, match=why):
            start(imports="no_such_module", environment=environment)
        servers.add(kept("no_such_module"))
    assert len(servers) == 1


def test_a_server_that_stops_is_left_to_its_children_and_the_next_gets_a_new_one(monkeypatch: pytest.MonkeyPatch):
    child, ends = start(), start("sys.stdin.read(); import time; time.sleep(0.5); sys.exit(3)")
    server = parent_of(child.pid)
    assert server is not None
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    with stopped(server):
        with pytest.raises(CannotForkError, match=r"has not forked for \d+ s"):
            start()
        monkeypatch.undo()
        assert child.running, "it does not need its server"
        assert ends.wait(LIMIT) and ends.explain() == "ended with status 3"
        assert parent_of(start().pid) not in (server, os.getpid())
        child.end()
    assert child.returncode == -signal.SIGKILL


def test_waiting_ends_when_nobody_wants_the_child_any_more(tmp_path: Path):
    """And nobody else waits meanwhile."""
    (tmp_path / "slow.py").write_text(SLEEP)
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    stop, asked = threading.Event(), threading.Event()

    def unwanted() -> bool:
        asked.set()
        return stop.is_set()

    slow = fork_server("slow", environment)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(slow.fork, python_code(SLEEP), environment=environment, inherit=[], stopped=unwanted)
        assert asked.wait(LIMIT)
        assert output_of(start("print('done')", stdout=subprocess.PIPE)) == "done\n(ended with status 0)"
        assert not job.done()
        stop.set()
        with pytest.raises(CannotForkError, match="wants"):
            job.result(LIMIT)
    slow.end()


def test_a_server_without_work_ends_and_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    child = start()
    server = parent_of(child.pid)
    assert server is not None and not gone(server, 0.5)  # it has a child
    child.end()
    del child
    assert gone(server, LIMIT)
    wait_until(lambda: (last := kept("json")) is None or not last.usable)
    assert parent_of(start().pid) not in (server, os.getpid())
    forget()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
