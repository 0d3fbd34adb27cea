"""``python -m tests.fuzz``: look for examples that break a parser; status 1 where one was found. They are kept."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from hypothesis import Phase

from tests.fuzz import TARGETS
from tests.fuzz.target import Target

EXAMPLES = 500
"""Of one round, which begins with another seed."""
SECONDS = 20
"""Of one example; whoever takes longer is stalled."""


def _stalled(*_: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s")


def fuzz(target: Target, seconds: float, number: int) -> str:
    """Try mutations for so long, or until one breaks the target; what was found, smaller if that could be, or ""."""
    end, tried, taken, last = time.monotonic() + seconds, 0, 0, b""

    def attempt(example: bytes) -> None:
        nonlocal tried, taken, last
        if time.monotonic() > end and not last:
            return
        last = example
        signal.alarm(SECONDS)
        try:
            taken += target.check(example)
        finally:
            signal.alarm(0)
        tried, last = tried + 1, b""

    while time.monotonic() < end:
        try:
            target.try_mutations(number, EXAMPLES, attempt, Phase.generate, Phase.shrink)
        except Exception:
            return f"{traceback.format_exc()}\n{target.name}: kept as {target.keep(last)}"
        number += 1
    print(f"{target.name}: {tried} examples, {taken} of them taken, none broke it", flush=True)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each target, default: %(default)g")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"there is no target {sorted(unknown)[0]!r}; there are {', '.join(TARGETS)}")
    number = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    signal.signal(signal.SIGALRM, _stalled)
    warnings.simplefilter("ignore")  # of libraries, about files that nobody would write
    broken = 0
    with tempfile.TemporaryDirectory(prefix="nxd-fuzz-") as folder:
        for name in given.targets or TARGETS:
            place = Path(folder) / name
            place.mkdir()
            print(f"{name}: {given.minutes:g} minutes, --seed {number}", flush=True)
            found = fuzz(TARGETS[name](place), given.minutes * 60, number)
            broken += bool(found)
            print(found, end="\n" if found else "", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
