"""A process that is forked from one with torch is what a new interpreter would be, and ends like one."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.python_command import child_environment, environment_of_caller, python_code, python_module
from tests.support.forks import LIMIT, RANK, both, output_of, start
from tests.support.forks import without_a_server as without_a_server

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
rights = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed", "Threads")
rights += ("SigBlk", "SigIgn", "SigCgt", "SigPnd")
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


def test_it_may_use_the_cores_that_its_caller_may_use():
    start("pass").end(LIMIT)  # the server may use them all
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        assert str([max(cores)]) in both("import os; print(sorted(os.sched_getaffinity(0)))")
    finally:
        os.sched_setaffinity(0, cores)


def test_modules_are_those_of_a_caller_that_has_changed_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendored.py").write_text("")
    code = "import vendored; print(vendored.__file__)"
    for name in ("first", "second"):
        monkeypatch.syspath_prepend(tmp_path / name)
        found = both(code, imports="vendored", environment=environment_of_caller())
        assert f"/{name}/" in found


@pytest.mark.parametrize("number", [1, 2])
def test_a_caller_without_output_starts_an_interpreter(number: int):
    """Its number would be that of something else, and of what is closed on exec a new interpreter has none either."""
    start("pass").end(LIMIT)
    os.set_inheritable(number, False)
    try:
        with pytest.raises(CannotForkError, match=f"descriptor {number} is"):
            start("pass")
    finally:
        os.set_inheritable(number, True)
    start("pass").end(LIMIT)


def test_temporary_files_are_where_its_own_environment_says(tmp_path: Path):
    """Whatever the server has been told, and a module asked for while it was imported."""
    (tmp_path / "asking.py").write_text("import tempfile\ntempfile.gettempdir()\n")
    importing = child_environment()
    importing["PYTHONPATH"] = f"{importing.get('PYTHONPATH', '')}:{tmp_path}"
    own = {**importing, "TMPDIR": str(tmp_path)}
    command = python_code("import tempfile; print(tempfile.gettempdir())")
    server = fork_server("asking", importing)
    child = server.fork(command, environment=own, inherit=[], stdout=subprocess.PIPE)
    assert output_of(child).splitlines()[0] == str(tmp_path)


def test_what_it_prints_goes_into_a_file(tmp_path: Path):
    with open(tmp_path / "log", "wb") as log:
        command = python_code("import os; print(1, flush=True); os.write(2, b'two')")
        server = fork_server("json", child_environment())
        child = server.fork(command, environment=child_environment(), inherit=[], stdout=log)
    assert child.wait(LIMIT) and child.returncode == 0
    assert (tmp_path / "log").read_bytes() == b"1\ntwo"


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
