"""``python -m tests.soak``: the real server under random traffic, swaps and faults; status 1 at the first violation."""

from __future__ import annotations

import argparse
import random
import signal
import sys

from tests.soak.run import soak
from tests.soak.state import GRACE

OVERHEAD_SECONDS = 500
"""For the trace, the known answers and the end."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic, default: %(default)g")
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--clients", type=int, default=12, help="at once, default: %(default)s")
    help_of_grace = "%(default)g s beyond its deadline an answer may take"
    parser.add_argument("--grace", type=float, default=GRACE, help=help_of_grace)
    given = parser.parse_args()
    limit = round(given.minutes * 120) + OVERHEAD_SECONDS
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not over after {limit} s"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: the server is ended
    signal.alarm(limit)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    return soak(given.minutes, seed, given.clients, given.grace)


if __name__ == "__main__":
    sys.exit(main())
