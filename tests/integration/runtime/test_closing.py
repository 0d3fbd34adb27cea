"""Closing a model at any moment and from anywhere: no orphan, no thread, no abort."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nxd_infer.errors import ModelClosedError
from nxd_infer.runtime.model import parallel_model_load
from tests.support.processes import descendants, gone, wait_until
from tests.support.runtime.rank_processes import LIMIT, X, call_in_thread, pids_of, raising, started, until_busy


def test_close_ends_a_call_that_is_stuck(path):
    model = started(path)
    pids = pids_of(model)
    os.kill(pids[1], signal.SIGSTOP)
    thread, result = call_in_thread(model, X)
    until_busy(model, 0)
    model.close()
    thread.join(60)
    assert isinstance(result[0], ModelClosedError)
    assert all(gone(pid, 60) for pid in pids)


PARENT = """
    import json, os, sys, threading, time, torch
    from nxd_infer.runtime.load import load_artifact
    from nxd_infer.runtime.model import TensorParallelModel
    model = TensorParallelModel(load_artifact(sys.argv[1], temporary=True), call_timeout=60, start_timeout=600)
    thread = threading.Thread(target=model.start)
    thread.start()
    thread.join()                     # a thread that ends must not take the ranks with it
    time.sleep(0.5)
    model(torch.zeros(1, 1, 8))
    if os.fork() == 0:
        sys.exit(0)                   # what is temporary is its owner's
    os.wait()
    print(json.dumps([os.path.isdir(sys.argv[1]), *(rank.pid for rank in model.health())]), flush=True)
    if sys.stdin.read() == "exit":
        sys.exit(3)                   # without close()
"""


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_parent_that_ends_takes_its_ranks_along(tmp_path, path, how):
    """Also a rank that is stopped, and so could not notice by itself."""
    copy = shutil.copytree(path, tmp_path / "copy")
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(copy)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        line = parent.stdout.readline()
        assert line, parent.communicate(timeout=60)[1]
        there, *pids = json.loads(line)
        assert there and len(pids) == 2 and not any(gone(pid) for pid in pids)
        if how == "kill":
            os.kill(pids[0], signal.SIGSTOP)
            parent.kill()
        else:
            parent.communicate("exit", timeout=60)
        assert parent.wait(60) == (3 if how == "exit" else -signal.SIGKILL)
    assert all(gone(pid, 60) for pid in pids)
    assert copy.exists() == (how == "kill")


@pytest.mark.parametrize(("how", "delay"), [("closed", 0.0), ("closed", 0.01), ("interrupted", 0.01)])
def test_what_ends_a_start_leaves_no_rank(path, delay, how):
    before = descendants(os.getpid())
    model = parallel_model_load(path, call_timeout=LIMIT, start_timeout=600)
    closing = threading.Timer(delay, model.close)
    with raising(signal.SIGALRM):
        try:
            closing.start() if how == "closed" else signal.setitimer(signal.ITIMER_REAL, delay + 1e-3)
            model.start()
        except (ModelClosedError, KeyboardInterrupt):
            pass
        else:  # it was faster, or the interrupt came within a callback of Python's own, which ignores it
            model.close()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if how == "closed":
        closing.join(60)
        with pytest.raises(ModelClosedError):
            model(X)
    wait_until(lambda: descendants(os.getpid()) <= before)


def in_a_fork(run) -> int:
    """The status that a forked child ends with after ``run``; SIGALRM when that takes a minute."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            run()
            os._exit(0)
        except ModelClosedError as error:
            os._exit(7 if "forked" in str(error) else 1)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_forked_during_a_call_neither_waits_nor_calls_nor_ends_the_ranks(model):
    """The thread that holds the lock does not exist in the child."""
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with model._lock.take():
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    assert in_a_fork(lambda: model(X)) == 7
    assert in_a_fork(model.close) == 0
    over.set()
    thread.join(60)
    assert in_a_fork(lambda: model(X)) == 7
    assert model(X)["count"].item() == 1


class Before(TorchDispatchMode):
    """Stands for a signal handler: runs in the calling thread, between two operators of the graph."""

    def __init__(self, operator, handler):
        super().__init__()
        self.operator, self.handler = operator, handler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.operator:
            self.handler()
        return func(*args, **(kwargs or {}))


def test_a_signal_handler_may_close_a_model_in_the_middle_of_a_call_in_process(artifacts):
    model = started(artifacts[1])

    def handler() -> None:
        with pytest.raises(ModelClosedError, match="middle of one of its calls"):
            model(X)
        model.close()

    faulthandler.dump_traceback_later(60, exit=True)
    try:
        with Before(torch.ops.aten.add_.Tensor, handler):
            assert model(X)["count"].item() == 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    with pytest.raises(ModelClosedError, match="closed"):
        model(X)
    assert model.restart()(X)["count"].item() == 1


def test_ctrl_c_in_the_middle_of_a_graph_in_process_closes_a_model_with_states(artifacts):
    model = started(artifacts[1])

    def handler() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Before(torch.ops.aten.clone.default, handler):  # the states have changed
        model(X)
    with pytest.raises(ModelClosedError, match=r"KeyboardInterrupt; call restart\(\)"):
        model(X)
    assert model.restart()(X)["count"].item() == 1


def test_no_descriptor_or_thread_is_left_behind(path):
    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    model = started(path)
    model.close()
    before = open_now()
    for _ in range(2):
        model.restart()
        model(X)
        model.close()
    wait_until(lambda: open_now()[0] <= before[0] + 1 and open_now()[1] <= before[1])
