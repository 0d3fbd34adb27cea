"""``nxd-infer bench``: a load of one model, from this machine, and a report of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_infer.cli.console import aside, spinner
from nxd_infer.cli.load import report
from nxd_infer.cli.load.options import LoadOptions
from nxd_infer.cli.load.served import server, wait_ready
from nxd_infer.cli.load.streams import Server, ServerError, Stream
from nxd_infer.errors import ArtifactError
from nxd_infer.util.ports import free_port
from nxd_infer.util.progress_bar import progress_bar

WORDS = """
the of and to in is was for that on as with it at by from his an were are which this also be had has first new their
after two one when its other time city no people world only into years more than over some three used most known made
part during there later under such state many where before water school war long area line small well
""".split()  # noqa: SIM905  (a list of them would be a page)


def run(target: str, options: LoadOptions) -> int:
    """Print the figures of a server, or of an artifact, which is served meanwhile; return 1 if a request failed."""
    if options.plot is not None:
        report.check_drawable(options.plot)
    with _served(target) as url:
        to = Server(url, options.api_key or os.environ.get("OPENAI_API_KEY"))
        with progress_bar(aside, drawn=aside.is_terminal) as display:
            task = display.add_task("requests", total=options.requests, note="")
            load = _Load(to, options, lambda: display.advance(task))
            try:
                asyncio.run(asyncio.wait_for(load.main(), options.timeout))
            except asyncio.TimeoutError:
                aside.print(
                    f"after {options.timeout:g} s (--timeout) {load.unfinished} requests had not ended", style="red"
                )
    if not load.streams:
        raise ServerError(f"no request was sent within {options.timeout:g} s: raise --timeout")
    figures = report.figures(load.streams, load.seconds, options)
    report.show(target, figures, load.streams, options)
    return int(figures["failed"] > 0)


@contextlib.contextmanager
def _served(target: str) -> Iterator[str]:
    if "://" in target:
        yield target
        return
    if not Path(target, "manifest.json").is_file():
        raise ArtifactError(f"{target!r} is neither an artifact nor a URL such as http://localhost:8000")
    with tempfile.TemporaryDirectory(prefix="nxd-infer-bench-") as directory:
        log, port = Path(directory, "server.log"), free_port()
        with server(Path(target), port, log) as process:
            with spinner("starting the server", aside):
                wait_ready(process, port, log, 600)
            yield f"http://127.0.0.1:{port}"


class _Load:
    def __init__(self, to: Server, options: LoadOptions, ended: Any):
        self.to, self.options, self.ended = to, options, ended
        self.random = random.Random(options.seed)  # nosec B311  # not for secrets
        self.streams: list[Stream] = []
        self.seconds = 0.0

    @property
    def unfinished(self) -> int:
        return self.options.requests - sum(stream.done or bool(stream.error) for stream in self.streams)

    async def main(self) -> None:
        model = self.options.model or await self._first_model()
        words_per_token = await self._calibrate(model)
        shared = self._words(round(self.options.shared_prefix * words_per_token))
        rest = round((self.options.prompt_tokens - self.options.shared_prefix) * words_per_token)
        prompts = [" ".join(shared + self._words(rest)) or "the" for _ in range(self.options.requests)]
        room, tasks = asyncio.Semaphore(self.options.concurrency), []
        start = due = time.perf_counter()
        try:
            for prompt in prompts:
                await room.acquire()
                if self.options.rate is not None:
                    due += self._gap(self.options.rate)
                    await asyncio.sleep(due - time.perf_counter())
                self.streams.append(Stream(0.0))
                tasks.append(asyncio.create_task(self._one(self._body(model, prompt), self.streams[-1], room)))
            await asyncio.gather(*tasks)
        finally:
            self.seconds = time.perf_counter() - start
            for task in tasks:
                task.cancel()

    async def _one(self, body: dict[str, Any], into: Stream, room: asyncio.Semaphore) -> None:
        try:
            await self.to.stream(body, into)
        finally:
            room.release()
            self.ended()

    def _gap(self, rate: float) -> float:
        return self.random.expovariate(rate) if self.options.arrivals == "poisson" else 1 / rate

    def _words(self, count: int) -> list[str]:
        return self.random.choices(WORDS, k=count)

    def _body(self, model: str, prompt: str) -> dict[str, Any]:
        most = self.options.max_tokens
        return {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}

    async def _first_model(self) -> str:
        models = json.loads(await self.to.get("/v1/models"))["data"]
        if not models:
            raise ServerError("the server has no model under /v1/models")
        return models[0]["id"]

    async def _calibrate(self, model: str) -> float:
        """Return the words of a token; the first request also shows whether the server takes any."""
        words = self._words(-(-self.options.prompt_tokens // 4))  # fewer than asked for, if words are many tokens
        one = await self.to.stream({**self._body(model, " ".join(words)), "max_tokens": 1})
        if one.error:
            raise ServerError(f"the first request failed: {one.error}")
        return len(words) / max(1, one.prompt_tokens or len(words))
