"""What holds of the native operators' own threads, in a process that has none yet: ``check_all``, ``check_sizes``."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nxd_infer import native
from tests.support.ops.packed_products import linear

torch.set_num_threads(2)
library = native.load()
linears = library.op("packed_linears")
attention, embed = library.op("cache_attention"), library.op("packed_embedding")
generator = torch.Generator().manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


DTYPES = (torch.bfloat16, torch.float32)
WEIGHTS = {dtype: [draw(n, 384, dtype=dtype) for n in (1, 79, 640, 2047)] for dtype in DTYPES}
INPUTS = {(rows, dtype): draw(rows, 384, dtype=dtype) for rows in (1, 3, 16, 200) for dtype in DTYPES}
QUERIES = [draw(4, 1, 8, 64), draw(4, 1, 2, 64), draw(4, 1, 2, 64)]
CACHES = [draw(4, 2, 1024, 64) for _ in "kv"]


def digest() -> str:
    found = hashlib.sha256()

    def take(*tensors: Tensor) -> None:
        for tensor in tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    for (_, dtype), x in INPUTS.items():
        for weight in WEIGHTS[dtype]:
            take(linear(linears, x, weight))
        take(*linears(x, WEIGHTS[dtype], False))
    starts, rows = torch.tensor([0, 130, 700, 1023]), torch.ones(4, dtype=torch.int64)
    take(attention(*QUERIES, *CACHES, torch.arange(4).view(-1, 1), starts, rows, 0.125))
    take(embed(WEIGHTS[torch.float32][3], torch.arange(2047), False))
    return found.hexdigest()


def tasks() -> list[str]:
    return os.listdir("/proc/self/task")


def has_threads(count: int) -> bool:
    """One that was joined may be listed for a moment more."""
    deadline = time.monotonic() + 60
    while len(tasks()) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(tasks()) == count


def until_joined(work: Callable[[], object]) -> None:
    """Where cores are busy, all may be done before another thread gets its turn."""
    joins, deadline = library.crew_joins(), time.monotonic() + 300
    work()
    while library.crew_joins() == joins:
        assert time.monotonic() < deadline, "nobody came to share the work"
        work()


digest()  # torch's own threads exist from here on
BEFORE, ALONE = digest(), len(tasks())


def check_sizes() -> None:
    """A crew of any size changes no bit."""
    for size in (2, 3, 5):
        library.engage_crew(size)
        assert has_threads(ALONE + size - 1), (len(tasks()), ALONE, size)
        for _ in range(4):  # what came behind what is known from the second time on
            assert digest() == BEFORE, size
    library.engage_crew(1)
    assert has_threads(ALONE) and digest() == BEFORE


def check_that_threads_come_for_a_step_and_for_a_prompt() -> None:
    library.engage_crew(2)
    weight = draw(8192, 2048)
    for rows in (1, 33):
        x = draw(rows, 2048)
        until_joined(lambda x=x: linear(linears, x, weight))


def check_that_work_is_done_without_those_who_do_not_come() -> None:
    """Its other threads may run on one core only, at the lowest priority, where two processes are busy."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in "ab"]
    try:
        known = tasks()
        library.engage_crew(3, [core] * 3)
        for task in set(tasks()) - set(known):
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
        assert digest() == BEFORE
    finally:
        for process in busy:
            process.kill()
            process.wait()


def check_that_threads_may_call_at_once() -> None:
    """One of them has the crew; the others share their work among torch's threads."""
    library.engage_crew(3)
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(lambda _: digest(), range(12))} == {BEFORE}


def check_that_threads_sleep_and_wake() -> None:
    known = set(tasks())
    library.engage_crew(4)
    crew = set(tasks()) - known

    def asleep(task: str) -> bool:
        with open(f"/proc/self/task/{task}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"

    assert digest() == BEFORE
    deadline = time.monotonic() + 300
    while not all(map(asleep, crew)):
        assert time.monotonic() < deadline, "without work they do not sleep"
        time.sleep(0.01)
    assert digest() == BEFORE


def check_that_what_is_fetched_ahead_may_be_gone() -> None:
    """The weights that followed these last time have since been released to the system."""
    library.engage_crew(2)
    x, weight = INPUTS[1, torch.bfloat16], WEIGHTS[torch.bfloat16][3]
    for _ in range(10):
        held = mmap.mmap(-1, 8 << 20)
        other = torch.frombuffer(held, dtype=torch.bfloat16)[: 384 * 8192].view(8192, 384)
        for _ in range(3):
            linear(linears, x, weight)
            linear(linears, x, other)
        del other
        held.close()
        linear(linears, x, weight)
        assert digest() == BEFORE


def check_more_weights_than_are_remembered() -> None:
    """Old entries are forgotten; results stay right, in turns and in another order."""
    x, table = draw(1, 32), draw(32 * 4200 + 1024, 32)
    shifted = [table[32 * i : 32 * i + 1024] for i in range(4200)]  # enough work for two threads
    expected = [linear(linears, x, weight) for weight in shifted]
    library.engage_crew(2)

    def follow(order: Iterable[int]) -> None:
        assert all(torch.equal(linear(linears, x, shifted[i]), expected[i]) for i in order)

    for order in (range(4200), range(4200), range(4199, -1, -1), [0, 4199, 0, 7, 4100] * 50):
        until_joined(lambda order=order: follow(order))
    assert digest() == BEFORE


def check_that_a_forked_process_works_alone() -> None:
    library.engage_crew(3)
    assert digest() == BEFORE
    child = os.fork()
    if child == 0:
        library.engage_crew(2)  # a crew of its own, while its parent keeps one
        torch.set_num_threads(1)  # OpenMP's do not outlive a fork either, and are waited for
        os._exit(0 if digest() == BEFORE else 1)
    assert os.waitpid(child, 0)[1] == 0


def check_all() -> None:
    """Leaves a crew, which must not keep its process from ending."""
    for check in (
        check_that_threads_come_for_a_step_and_for_a_prompt,
        check_that_work_is_done_without_those_who_do_not_come,
        check_that_threads_may_call_at_once,
        check_that_threads_sleep_and_wake,
        check_that_what_is_fetched_ahead_may_be_gone,
        check_more_weights_than_are_remembered,
        check_that_a_forked_process_works_alone,
    ):
        check()
        library.engage_crew(1)
    library.engage_crew(4)
