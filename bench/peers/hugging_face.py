"""Hugging Face ``generate``: PyTorch without a compiler, bfloat16, dynamic or static cache."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from bench.peers.protocol import serve


class HuggingFace:
    def __init__(self, model: str, threads: int, cache: str):
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}, {cache} cache"
        self.options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if cache == "static":
            self.options |= {"cache_implementation": "static", "disable_compile": True}

    @torch.no_grad()
    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        clock = _Clock()
        begin = time.perf_counter()
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=None,
            max_new_tokens=new_tokens,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            **self.options,
        )
        times = [moment - begin for moment in clock.times]
        return {"tokens": out[:, ids.shape[1] :].tolist(), "times": [times] * len(prompts)}


class _Clock(transformers.StoppingCriteria):
    """A stopping criterion that never stops but records the time after every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    serve(HuggingFace)
