"""This project's engine in a peer process, as used through ``nxd_server.LLM``."""

from __future__ import annotations

import time
from typing import Any

from bench.peers.protocol import serve
from nxd_infer import __version__
from nxd_server import LLM, SamplingParams
from nxd_server.engine.generation_engine import Engine
from nxd_server.engine.request import ErrorEvent, Event, TokenEvent
from nxd_server.engine.step_tensors import StepInputs

TOUCH = 16
"""Distance of written positions, so that no page of a cache is an untouched zero page."""


class Ours:
    def __init__(self, model: str, threads: int, **engine: Any):
        self.llm = LLM(model, threads_per_rank=threads, prefix_caching=False, **engine)  # no prompt comes twice
        assert isinstance(self.llm.engine, Engine)
        self.engine = self.llm.engine
        self.version = __version__
        self._touched = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        rows = [_Row() for _ in prompts]
        begin = time.perf_counter()
        tickets = [self.engine.submit(prompt, params, row) for prompt, row in zip(prompts, rows, strict=True)]
        for ticket in tickets:
            ticket.wait()
        for row in rows:
            if row.error is not None:
                raise row.error
        return {"tokens": [row.tokens for row in rows], "times": [[t - begin for t in row.times] for row in rows]}

    def steps(self, batch: int, context: int, count: int) -> dict[str, Any]:
        """Return the seconds of ``count`` decode steps of ``batch`` rows with ``context`` tokens each.

        The caches are filled, not computed: a step reads the same amount whatever they hold.
        """
        inputs = self._decode_inputs(batch)
        self._touch(batch, context)
        seconds = []
        for _ in range(count):
            inputs["start"].fill_(context - 1)
            begin = time.perf_counter()
            self.llm.model.run_bucket(f"decode_b{batch}", inputs)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def _decode_inputs(self, batch: int) -> Any:
        bucket = next(bucket for bucket in self.llm.model.buckets if bucket.name == f"decode_b{batch}")
        inputs = StepInputs(bucket, self.engine.slots, arrays=False).tensors
        inputs["tokens"].fill_(5)
        inputs["length"].fill_(1)
        for row in range(batch):
            inputs["block_table"][row] = row
        return inputs

    def _touch(self, batch: int, context: int) -> None:
        largest = self.engine.slots
        inputs = self._decode_inputs(largest)
        for position in range(self._touched, context, TOUCH):
            inputs["start"].fill_(position)
            self.llm.model.run_bucket(f"decode_b{largest}", inputs)
        self._touched = max(self._touched, context)

    def close(self) -> None:
        self.llm.close()


class _Row:
    """Receives a request's events in the engine's thread."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.error: Exception | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.times.append(time.perf_counter())
            self.tokens.append(event.token)
        elif isinstance(event, ErrorEvent):
            self.error = event.error


def main() -> None:
    serve(Ours)
