"""vLLM's CPU build, its engine stepped by hand in this process."""

from __future__ import annotations

import time
from typing import Any

import vllm

from bench.peers.protocol import serve


class Vllm:
    def __init__(self, model: str, threads: int):
        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.version = f"vllm {vllm.__version__}"
        self._requests = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        engine = self.llm.llm_engine
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        rows = {}
        begin = time.perf_counter()
        for row, prompt in enumerate(prompts):
            self._requests += 1
            rows[str(self._requests)] = row
            # vLLM renames requests and returns the requested name
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                row, known = rows[output.request_id], list(output.outputs[0].token_ids)
                fresh = known[len(tokens[row]) :]
                tokens[row] += fresh
                times[row] += [time.perf_counter() - begin] * len(fresh)
        return {"tokens": tokens, "times": times}


def main() -> None:
    serve(Vllm)
