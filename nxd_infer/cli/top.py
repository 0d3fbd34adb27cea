"""``nxd-infer top``: what a server is doing, from two looks at its metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable
from urllib.parse import urlsplit

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from nxd_infer.cli.console import console
from nxd_infer.cli.load.streams import Server, ServerError

LINE = re.compile(r"^(nxd_\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+|NaN|[+-]Inf)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Labels = frozenset[tuple[str, str]]


class Look:
    """The metrics of one moment."""

    def __init__(self, text: str):
        self.time = time.monotonic()
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        for name, labels, value in LINE.findall(text):
            self._values[name][frozenset(LABEL.findall(labels))] = float(value)

    def total(self, name: str) -> float:
        return sum(self._values[name].values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by a label's value."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._values[name].items():
            sums[dict(labels).get(label, "")] += value
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

    summary = Table(title=title, title_justify="left", show_header=False)
    prompts = more("nxd_prompt_tokens")
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

    def grown(name: str, label: str) -> Callable[[str], float]:
        late, early = now.by(name, label), before.by(name, label)
        return lambda value: late.get(value, 0.0) - early.get(value, 0.0)

    def time_of(seconds_of: Callable[[str], float], steps: float, one: str) -> str:
        return f"{1000 * seconds_of(one) / steps:.1f}" if steps else "-"

    graphs = Table("graph", "steps/s", "ms a step", "padding")
    steps, spent = grown("nxd_bucket_executions", "graph"), grown("nxd_bucket_seconds", "graph")
    useful, padding = grown("nxd_bucket_useful_tokens", "graph"), grown("nxd_bucket_padding_tokens", "graph")
    for graph in now.by("nxd_bucket_executions", "graph"):
        if count := steps(graph):
            filled = share(padding(graph), useful(graph) + padding(graph))
            graphs.add_row(graph, f"{count / seconds:.1f}", time_of(spent, count, graph), filled)
    ranks = Table("rank", "alive", "steps/s", "ms a step")
    steps, spent = grown("nxd_rank_steps", "rank"), grown("nxd_rank_seconds", "rank")
    for rank, alive in now.by("nxd_rank_alive", "rank").items():
        ranks.add_row(rank, "yes" if alive else "NO", f"{steps(rank) / seconds:.1f}", time_of(spent, steps(rank), rank))
    return Group(summary, graphs, ranks)


def run(url: str, api_key: str | None, every: float, once: bool) -> None:
    """Draw a picture every so many seconds until Ctrl-C; ``once``: one, after that time. Raises ServerError at first;
    later it says that the server does not answer."""
    server, title = Server(url, api_key), urlsplit(url).netloc

    def look() -> Look:
        return Look(asyncio.run(asyncio.wait_for(server.get("/metrics"), 10)).decode())

    before = look()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal and not once) as live:
        while True:
            time.sleep(every)
            try:
                now = look()
                live.update(view(before, now, title), refresh=True)
                before = now
            except (ServerError, asyncio.TimeoutError) as error:
                live.update(f"{title}: {error}", refresh=True)
            if once:
                return
