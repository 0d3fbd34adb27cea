"""Whose requests these are: what the holder of a key has been given, and how much that may be."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

from nxd_server.errors import RateLimitError


class RateLimit:
    """``limit`` a minute: a bucket, full at first, that fills evenly. What is known only once it was spent may leave it
    in debt."""

    def __init__(self, limit: int):
        self.limit = limit
        self._level, self._at = float(limit), time.monotonic()

    def level(self, take: int = 0) -> float:
        """Return what is left now, after taking ``take``."""
        now = time.monotonic()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60) - take
        self._at = now
        return self._level

    def seconds_to(self, level: float) -> float:
        return max(0.0, level - self.level()) * 60 / self.limit


class Account:
    """What one key's holder has been given. Thread-safe."""

    def __init__(self, name: str = "anonymous"):
        self.name = name
        self.requests = self.running = self.prompt_tokens = self.generated_tokens = 0
        """``running``: requests that are being answered."""
        self.refused: Counter[str] = Counter()
        """Requests by the limit that refused them."""
        self._most_running: int | None = None
        self._rates: dict[str, RateLimit] = {}
        self._lock = threading.Lock()

    def allow(self, requests: int | None, tokens: int | None, running: int | None) -> None:
        """Set the limits: requests and tokens a minute, and requests at a time; None: none."""
        rates = {"requests": requests, "tokens": tokens}
        with self._lock:
            self._most_running = running
            self._rates = {what: RateLimit(limit) for what, limit in rates.items() if limit is not None}

    def begin(self) -> None:
        """Count a request, which :meth:`end` must follow. Raises RateLimitError."""
        with self._lock:
            if self._most_running is not None and self.running >= self._most_running:
                self._refuse("concurrent_requests", f"{self._most_running} requests at a time", 1.0)
            self._check("requests")
            self._check("tokens")
            self._take("requests", 1)
            self.running += 1
            self.requests += 1

    def end(self) -> None:
        with self._lock:
            self.running -= 1

    def check_tokens(self) -> None:
        """Raise RateLimitError if the tokens of this minute are spent."""
        with self._lock:
            self._check("tokens")

    def spend(self, prompt: int = 0, generated: int = 0) -> None:
        with self._lock:
            self.prompt_tokens += prompt
            self.generated_tokens += generated
            self._take("tokens", prompt + generated)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the response headers that say what is left, as OpenAI names them."""
        with self._lock:
            for what, rate in self._rates.items():
                left, reset = max(0, int(rate.level())), f"{rate.seconds_to(rate.limit):.3f}s"
                for part, value in (("limit", rate.limit), ("remaining", left), ("reset", reset)):
                    yield f"x-ratelimit-{part}-{what}".encode(), str(value).encode()

    def _take(self, what: str, count: int) -> None:
        if what in self._rates:
            self._rates[what].level(count)

    def _check(self, what: str) -> None:
        rate = self._rates.get(what)
        if rate is not None and rate.level() < 1:
            self._refuse(f"{what}_per_minute", f"{rate.limit} {what} a minute", rate.seconds_to(1))

    def _refuse(self, limit: str, allowed: str, seconds: float) -> None:
        self.refused[limit] += 1
        raise RateLimitError(f"the key {self.name!r} has {allowed} ({limit}); try again in {seconds:.1f} s", seconds)


ANONYMOUS = Account()
"""Of requests without a key, and of a program's own."""
