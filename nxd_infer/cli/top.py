"""``nxd-infer top``: what a server is doing, from two looks at its metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nxd_infer.cli.console import console
from nxd_infer.cli.load.streams import Server, ServerError

LINE = re.compile(r"^(nxd_\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+|NaN|[+-]Inf)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Labels = frozenset[tuple[str, str]]
Values = tuple[str, ...]
WAIT_SECONDS = 10.0
"""For an answer."""
HEADS = {"model_name": "model", "copy": "copy"}
"""What says whose a rank is, and the heads of its columns."""


class Look:
    """The metrics of one moment."""

    def __init__(self, text: str):
        self.time = time.monotonic()
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        for name, labels, value in LINE.findall(text):
            self._values[name][frozenset(LABEL.findall(labels))] = float(value)

    def total(self, name: str) -> float:
        return sum(self._values[name].values())

    def by(self, name: str, labels: Sequence[str]) -> dict[tuple[str, ...], float]:
        """Sums by the values of ``labels``; "" where there is none."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for found, value in self._values[name].items():
            sums[tuple(dict(found).get(label, "") for label in labels)] += value
        return sums


def view(before: Look, now: Look, title: str) -> RenderableType:
    """A picture of what happened between two looks."""
    seconds = max(1e-9, now.time - before.time)

    def more(name: str) -> float:
        return now.total(name) - before.total(name)

    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.0f} %" if whole else "-"

    def mean(name: str) -> str:
        return f"{1000 * more(f'{name}_sum') / count:.1f} ms" if (count := more(f"{name}_count")) else "-"

    prompts = more("nxd_prompt_tokens")
    idle = "" if prompts or more("nxd_generation_tokens") or more("nxd_request_success") else ", without a request"
    said = Text(f"{title}: speeds and times of the last {seconds:.1f} s{idle}")
    summary = Table(show_header=False)
    for name, figure in (
        ("state", "ready" if now.total("nxd_ready") else "not ready"),
        ("tokens/s, generated", f"{more('nxd_generation_tokens') / seconds:.1f}"),
        (
            "tokens/s, prompts (from the cache)",
            f"{prompts / seconds:.1f} ({share(more('nxd_prefix_cache_hits'), prompts)})",
        ),
        (
            "running, waiting",
            f"{now.total('nxd_num_requests_running'):.0f}, {now.total('nxd_num_requests_waiting'):.0f}",
        ),
        ("slots in use", f"{now.total('nxd_slots') - now.total('nxd_slots_free'):.0f} of {now.total('nxd_slots'):.0f}"),
        (
            "first token; between tokens",
            f"{mean('nxd_time_to_first_token_seconds')}; {mean('nxd_inter_token_latency_seconds')}",
        ),
        ("answers; refused", f"{more('nxd_request_success'):.0f}; {more('nxd_admission_rejections'):.0f}"),
        ("connections; restarts", f"{now.total('nxd_connections'):.0f}; {now.total('nxd_engine_restarts'):.0f}"),
    ):
        summary.add_row(name, figure)

    def grown(name: str, labels: Sequence[str]) -> Callable[[Values], float]:
        late, early = now.by(name, labels), before.by(name, labels)
        return lambda values: late.get(values, 0.0) - early.get(values, 0.0)

    def time_of(seconds_of: Callable[[Values], float], steps: float, one: Values) -> str:
        return f"{1000 * seconds_of(one) / steps:.1f}" if steps else "-"

    several = [label for label in HEADS if len(now.by("nxd_rank_alive", [label])) > 1]
    which = [label for label in several if label != "copy"] + ["graph"]  # the copies' are counted together
    graphs = Table(*(HEADS.get(label, label) for label in which), "steps/s", "ms a step", "padding")
    steps, spent = grown("nxd_bucket_executions", which), grown("nxd_bucket_seconds", which)
    useful, padding = grown("nxd_bucket_useful_tokens", which), grown("nxd_bucket_padding_tokens", which)
    for graph in now.by("nxd_bucket_executions", which):
        if count := steps(graph):
            filled = share(padding(graph), useful(graph) + padding(graph))
            graphs.add_row(*map(Text, graph), f"{count / seconds:.1f}", time_of(spent, count, graph), filled)
    which = [*several, "rank"]
    ranks = Table(*(HEADS.get(label, label) for label in which), "alive", "steps/s", "ms a step")
    steps, spent = grown("nxd_rank_steps", which), grown("nxd_rank_seconds", which)
    for rank, alive in now.by("nxd_rank_alive", which).items():
        state = "yes" if alive else "NO"
        ranks.add_row(*map(Text, rank), state, f"{steps(rank) / seconds:.1f}", time_of(spent, steps(rank), rank))
    return Group(said, summary, graphs, ranks)


def run(url: str, api_key: str | None, every: float, once: bool) -> None:
    """Draw a picture every so many seconds until Ctrl-C; ``once``: one, after that time. Raises ServerError at first;
    later it says that the server does not answer."""
    server, title = Server(url, api_key), urlsplit(url).netloc

    def look() -> Look:
        try:
            return Look(asyncio.run(asyncio.wait_for(server.get("/metrics"), WAIT_SECONDS)).decode())
        except asyncio.TimeoutError:
            raise ServerError(f"{url} did not answer within {WAIT_SECONDS:g} s") from None

    before = look()
    if once:
        time.sleep(every)
        console.print(view(before, look(), title))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(every)
            try:
                now = look()
                live.update(view(before, now, title), refresh=True)
                before = now
            except ServerError as error:
                live.update(Text(f"{title}: {error}"), refresh=True)
