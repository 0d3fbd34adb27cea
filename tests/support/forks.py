"""Start the same program as a fork and in a new interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping

import pytest

from nxd_infer.util import fork_server as module
from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.fork_server import ForkServer, fork_server
from nxd_infer.util.forked_process import ForkedProcess
from nxd_infer.util.python_command import child_environment, python_code
from tests.support.processes import parent_of

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


def forget() -> None:
    for _, server in module._kept.values():
        server.end()
    module._kept.clear()


def kept(imports: str = "json") -> ForkServer | None:
    """The server that this process keeps, if there is one."""
    return module._kept.get(imports, (None, None))[1]


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
