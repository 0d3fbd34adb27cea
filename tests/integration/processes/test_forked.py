"""A process that is forked from one with torch is what a new interpreter would be, and ends like one."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxd_infer.processes import start as module
from nxd_infer.processes.child import ChildProcess
from nxd_infer.processes.command import child_environment, python_code
from nxd_infer.runtime.rank_process.config import with_crew
from nxd_infer.util.machine import available_cores
from tests.support.processes import gone, parent_of, wait_until

LIMIT = 300.0
SLEEP = "import time; time.sleep(600)"
RANK = "nxd_infer.runtime.rank_process.rank"


@pytest.fixture(autouse=True)
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_servers", {})
    yield
    for server in module._servers.values():
        server.process.end()


def start(code: str = SLEEP, *arguments: str, imports: str = "json", **options) -> ChildProcess:
    environment = options.setdefault("environment", child_environment(PYTHONUNBUFFERED="1"))
    options.setdefault("check", lambda: None)
    return module.start(python_code(code, *arguments), imports=imports, importing=environment, **options)


def output_of(child: ChildProcess) -> str:
    """What a child prints, and how it ends."""
    assert child.stdout is not None
    output = child.stdout.read().decode()
    child.end(patience=LIMIT)
    return f"{output}({child.explain()})"


def both(code: str, *arguments: str, imports: str = "json", **options) -> str:
    """The output and the end of a program, which are the same in a new interpreter."""
    expected, forked = (
        output_of(start(code, *arguments, imports=imports, output=subprocess.PIPE, **options))
        for imports in ("", imports)
    )
    assert forked == expected
    return expected


PROBE = """
import json, os, signal, threading
read = sys.stdin.read()
numbers = sorted(int(number) for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}"))
print(json.dumps({
    "program": __name__, "argv": sys.argv, "path": sys.path, "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},  # an interpreter adds it
    "C library": os.popen("echo $MARK; echo $NXD_OTHER").read(), "directory": os.getcwd(), "descriptors": numbers,
    "read": read, "cores": sorted(os.sched_getaffinity(0)), "threads": threading.active_count(),
    "session": os.getsid(0) == os.getpid() == os.getpgid(0), "flags": str(sys.flags),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)},
}))
import torch
torch.set_num_threads(2)
torch.manual_seed(1)
print(torch.rand(3), torch.get_num_threads(), torch.ones(300, 300) @ torch.ones(300, 300))
print(torch.is_grad_enabled(), torch.randn(200000, requires_grad=True).sum().backward())
"""


def test_it_is_what_a_new_interpreter_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start("").end(LIMIT)  # the server was started elsewhere
    monkeypatch.chdir(tmp_path)
    first, second = os.pipe()
    environment = child_environment(MARK="é = x\ny", NXD_OTHER="1", PYTHONUNBUFFERED="1")
    try:
        printed = both(PROBE, "a", "ü", imports=RANK, environment=environment, inherit=[second, first])
        facts = json.loads(printed.splitlines()[0])
        assert facts["descriptors"] == sorted([0, 1, 2, first, second]) and facts["C library"] == "é = x y\n1\n"
        assert facts["session"] and not facts["read"]  # only the parent gets the terminal's Ctrl-C
    finally:
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


THREADS = """
import json, os
cores = json.loads(sys.argv[1])
os.sched_setaffinity(0, cores[:1])  # as a rank does
import torch
torch.set_num_threads(len(cores))
torch.randn(1 << 20).exp()
status = (open(f"/proc/self/task/{task}/status").read() for task in os.listdir("/proc/self/task"))
print(sorted(text.split("Cpus_allowed_list:")[1].split()[0] for text in status))
"""


def test_its_threads_have_the_cores_that_its_caller_chose():
    cores = available_cores()[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    environment = with_crew(child_environment(OMP_NUM_THREADS="2", PYTHONUNBUFFERED="1"), cores)
    for chosen in (cores, cores[::-1]):
        environment = with_crew(environment, chosen)
        printed = both(THREADS, json.dumps(chosen), imports=RANK, environment=environment, bound=chosen)
        found = ast.literal_eval(printed.splitlines()[0])
        assert set(found) == set(map(str, cores)), "each thread has one"
        own = {**environment, "GOMP_CPU_AFFINITY": str(chosen[0])}  # what a user set may fit no fork
        child = start(imports=RANK, environment=own)
        assert parent_of(child.pid) == os.getpid()
        child.end()
    assert len(module._servers) == 2


def test_many_threads_fork_at_once_and_random_numbers_differ_in_each():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda: output_of(start(code, imports=RANK, output=subprocess.PIPE))) for _ in range(4)]
        numbers = [job.result().split()[:3] for job in jobs]
    assert len({value for three in numbers for value in three}) == 12
    assert len(module._servers) == 1


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
        assert child.wait(LIMIT) and child.explain() == "was ended by SIGKILL"
    child.end()
    assert gone(int(file.read_text()), LIMIT) and gone(child.pid, LIMIT)
    assert other.wait(LIMIT) if victim == "server" else other.running
    assert (parent_of(start().pid) == server) == (victim == "child")


def test_nothing_outlives_a_caller_that_is_killed():
    code = (
        "import os\nfrom nxd_infer.processes.start import start\n"
        "from nxd_infer.processes.command import python_code\n"
        "own = {'imports': 'json', 'importing': os.environ, 'environment': os.environ, 'check': lambda: None}\n"
        f"child = start(python_code({SLEEP!r}), **own)\n"
        "print(child.pid, flush=True)\nsys.stdin.read()\nos.kill(os.getpid(), 9)"
    )
    caller = ChildProcess(
        python_code(code), environment=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert caller.stdin is not None and caller.stdout is not None
    pid = int(caller.stdout.readline())
    server = parent_of(pid)
    os.kill(pid, signal.SIGSTOP)  # so that it could not end by itself
    caller.stdin.close()
    assert caller.wait(LIMIT) and gone(pid, LIMIT) and gone(server or 0, LIMIT)
    caller.end()


def test_an_import_that_fails_is_an_error_of_the_program():
    printed = output_of(start("import no_such_module", imports="no_such_module", output=subprocess.PIPE))
    assert "No module named 'no_such_module'" in printed and printed.endswith("(ended with status 1)")


def test_waiting_for_the_import_ends_when_nobody_wants_the_child_any_more(tmp_path: Path):
    """Nor does it run later."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(2)")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{tmp_path}"
    file = tmp_path / "file"

    def unwanted() -> None:
        raise TimeoutError("too late")

    options = {"imports": "slow", "environment": environment}
    with pytest.raises(TimeoutError, match="too late"):
        start(f"open({str(file)!r}, 'w')", check=unwanted, **options)
    assert output_of(start("print('done')", output=subprocess.PIPE, **options)) == "done\n(ended with status 0)"
    assert not file.exists()


def test_nothing_is_left_open():
    start("").end(LIMIT)
    before = len(os.listdir("/proc/self/fd"))
    for output in (None, subprocess.PIPE):
        start("", output=output).end(LIMIT)
    assert len(os.listdir("/proc/self/fd")) == before
