"""Memory that other threads have freed."""

from __future__ import annotations

import subprocess
import sys

FREED_IN_A_THREAD = """
import ctypes, threading
from nxd_infer.util.memory import give_back, held_memory, keep_little
keep_little()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def work():
    sizes = [40 << 20, 20 << 20, *[1 << 19] * 40]  # the first one teaches the library to keep the others
    for size in sizes[:2]:
        place = libc.malloc(size)
        ctypes.memset(place, 1, size)
        libc.free(place)
    places = [libc.malloc(size) for size in sizes]
    for place, size in zip(places, sizes):
        ctypes.memset(place, 1, size)
    for place in reversed(places):
        libc.free(place)
    freed.set()
    end.wait(60)

before, freed, end = held_memory(), threading.Event(), threading.Event()
threading.Thread(target=work, daemon=True).start()
assert freed.wait(60)
give_back()
print((held_memory() - before) >> 20)
end.set()
"""


def test_what_a_thread_has_freed_goes_back():
    """Of what weights take to be cut, some 60 MiB stayed in the thread that did it."""
    done = subprocess.run([sys.executable, "-c", FREED_IN_A_THREAD], check=True, capture_output=True)
    assert int(done.stdout) <= 4
