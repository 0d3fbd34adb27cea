"""The native operators' own threads (``csrc/crew.h``): they change no bit, and no thread waits for a missing one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nxd_infer import native
from tests.support.needs import needs_native
from tests.support.ops.levels import run_at

pytestmark = needs_native

WORK = """
import ctypes, hashlib, os, time, torch
from nxd_infer import native
lib = native.load()
linear, linears, attention = lib.op("packed_linear"), lib.op("packed_linears"), lib.op("cache_attention")
embed = lib.op("packed_embedding")
generator = torch.Generator().manual_seed(0)
draw = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, generator=generator).to(dtype)
weights = {dtype: [draw(n, 384, dtype=dtype) for n in (1, 79, 640, 2047)] for dtype in (torch.bfloat16, torch.float32)}
inputs = {(rows, dtype): draw(rows, 384, dtype=dtype) for rows in (1, 3, 16, 200) for dtype in weights}
queries = [draw(4, 1, 8, 64), draw(4, 1, 2, 64), draw(4, 1, 2, 64)]
caches = [draw(4, 2, 1024, 64) for _ in "kv"]
starts, rows = torch.tensor([0, 130, 700, 1023]), torch.ones(4, dtype=torch.int64)

def digest():
    found = hashlib.sha256()
    def take(*tensors):
        for tensor in tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    for (count, dtype), x in inputs.items():
        for weight in weights[dtype]:
            take(linear(x, weight, None))
        take(*linears(x, weights[dtype], False))
    take(attention(*queries, *caches, torch.arange(4).view(-1, 1), starts, rows, 0.125))
    take(embed(weights[torch.float32][3], torch.arange(2047)))
    return found.hexdigest()

def threads():
    return len(os.listdir("/proc/self/task"))

def has_threads(count):  # one that was joined may be listed for a moment more
    deadline = time.monotonic() + 60
    while threads() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() == count

def until_joined(work):  # where cores are busy, all may be done before another thread gets its turn
    joins, deadline = lib.crew_joins(), time.monotonic() + 300
    work()
    while lib.crew_joins() == joins:
        assert time.monotonic() < deadline, "nobody came to share the work"
        work()

digest()  # torch's own threads exist from here on
before, alone = digest(), threads()
"""


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512_bf16"])
def test_a_crew_of_any_size_changes_no_bit(level):
    code = """
for size in (2, 3, 5):
    lib.engage_crew(size)
    assert has_threads(alone + size - 1), (threads(), alone, size)
    for _ in range(4):  # what came behind what is known from the second time on
        assert digest() == before, size
lib.engage_crew(1)
assert has_threads(alone) and digest() == before
"""
    run_at(native.load(), level, WORK + code)


def test_its_threads_come_for_a_step_of_decoding_and_not_for_a_prompt():
    """Torch's do the loops of a prompt's graph, so its operators are theirs too."""
    code = """
lib.engage_crew(2)
many, few = torch.randn(33, 2048, generator=generator).bfloat16(), draw(32, 2048)
weight = draw(8192, 2048)
for _ in range(20):
    linear(many, weight, None)
    embed(weight, torch.arange(33))
assert lib.crew_joins() == 0
until_joined(lambda: linear(few, weight, None))
"""
    run_at(native.load(), "avx2", WORK + code)


def test_work_is_done_without_those_who_do_not_come():
    """Its other threads may run on one core only, at the lowest priority, where two processes are busy."""
    code = """
import subprocess, sys
core = min(os.sched_getaffinity(0))
busy = [subprocess.Popen([sys.executable, "-c", f"import os\\nos.sched_setaffinity(0, [{core}])\\nwhile True: pass"])
        for _ in "ab"]
try:
    lib.engage_crew(3, [core] * 3)
    for task in os.listdir("/proc/self/task")[alone:]:
        os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    assert digest() == before
finally:
    for process in busy:
        process.kill()
        process.wait()
"""
    run_at(native.load(), "avx2", WORK + code)


def test_threads_that_call_at_once_get_their_results():
    """One of them has the crew; the others share their work among torch's threads."""
    code = """
from concurrent.futures import ThreadPoolExecutor
lib.engage_crew(3)
with ThreadPoolExecutor(4) as pool:
    assert {*pool.map(lambda _: digest(), range(24))} == {before}
"""
    run_at(native.load(), "avx2", WORK + code)


def test_threads_sleep_and_wake():
    code = """
known = set(os.listdir("/proc/self/task"))
lib.engage_crew(4)
crew = set(os.listdir("/proc/self/task")) - known

def asleep(task):
    with open(f"/proc/self/task/{task}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"

for _ in range(3):
    assert digest() == before
    deadline = time.monotonic() + 300
    while not all(map(asleep, crew)):
        assert time.monotonic() < deadline, "without work they do not sleep"
        time.sleep(0.01)
    assert digest() == before
"""
    run_at(native.load(), "avx2", WORK + code)


def test_what_is_fetched_ahead_may_be_gone():
    """The weights that followed these last time have since been released to the system."""
    code = """
import mmap
lib.engage_crew(2)
for _ in range(20):
    held = mmap.mmap(-1, 8 << 20)
    other = torch.frombuffer(held, dtype=torch.bfloat16)[: 384 * 8192].view(8192, 384)
    x = inputs[1, torch.bfloat16]
    for _ in range(3):
        linear(x, weights[torch.bfloat16][3], None)
        linear(x, other, None)
    del other
    held.close()
    linear(x, weights[torch.bfloat16][3], None)
    assert digest() == before
"""
    run_at(native.load(), "avx2", WORK + code)


def test_more_weights_than_are_remembered():
    """Old entries are forgotten; results stay right, in turns and in another order."""
    code = """
x, table = draw(1, 32), draw(32 * 4200 + 1024, 32)
shifted = [table[32 * i : 32 * i + 1024] for i in range(4200)]  # enough work for two threads
expected = [linear(x, weight, None) for weight in shifted]
lib.engage_crew(2)
def follow(order):
    assert all(torch.equal(linear(x, shifted[i], None), expected[i]) for i in order)
for order in (range(4200), range(4200), range(4199, -1, -1), [0, 4199, 0, 7, 4100] * 50):
    until_joined(lambda: follow(order))
assert digest() == before
"""
    run_at(native.load(), "avx2", WORK + code)


def test_a_forked_process_works_alone():
    code = """
lib.engage_crew(3)
assert digest() == before
child = os.fork()
if child == 0:
    lib.engage_crew(2)  # a crew of its own, while its parent keeps one
    torch.set_num_threads(1)  # OpenMP's do not outlive a fork either, and are waited for
    os._exit(0 if digest() == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    run_at(native.load(), "avx2", WORK + code)


def test_every_thread_needs_a_core():
    with pytest.raises(ValueError, match=r"3 threads need a core each, got \[0, 1\]"):
        native.load().engage_crew(3, [0, 1])


def test_a_crew_ends_with_its_process():
    code = "from nxd_infer import native\nnative.load().engage_crew(4)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
