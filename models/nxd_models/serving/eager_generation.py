"""Generate by calling a decoder's step in plain PyTorch: the reference for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import ModelConfigError
from nxd_models.serving.decoder_step import DecoderStep, step_inputs


@dataclass
class Generated:
    """The result of :func:`generate_eager` for one prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """The most likely tokens of each position with their log probabilities."""


Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@torch.no_grad()
def generate_eager(
    step: DecoderStep,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos_token_ids: Sequence[int] = (),
    piece: int | None = None,
    run: Run | None = None,
    **sampling: Any,
) -> list[Generated]:
    """Generate for all prompts at once, one slot each: the plain reference for the engine.

    Args:
        step: defines the sizes, and runs if ``run`` is None.
        prompts: at most ``step.slots`` lists of at least one token id.
        eos_token_ids: a sequence ends after one of these, which is its last token.
        piece: prefill at most this many tokens at a time; None: the whole prompt.
        run: another way to run a step (such as a traced bucket), from named inputs to named outputs.
        sampling: inputs of the step by name, one value for all, or a list with one per prompt.
    """
    if len(prompts) > step.slots:
        raise ModelConfigError(f"{len(prompts)} prompts do not fit the {step.slots} slots of this step")
    for prompt in prompts:
        if not 1 <= len(prompt) <= step.max_len:
            raise ModelConfigError(f"a prompt must have 1 to {step.max_len} tokens, got {len(prompt)}")
    run = run or (lambda inputs: step(**inputs))
    results = [Generated() for _ in prompts]

    def inputs_for(
        rows: Sequence[int], feed: Sequence[Sequence[int]], starts: Sequence[int], least: int = 1
    ) -> dict[str, Tensor]:
        sizes = (step.config.vocab_size, len(rows), max(len(feed[0]), least), step.slots, step.bias_slots)
        inputs = step_inputs(*sizes, adapter=step.adapter_slots is not None)
        inputs["tokens"][:, : len(feed[0])] = torch.tensor(feed)
        inputs["start"][:] = torch.tensor(starts)
        inputs["length"][:] = len(feed[0])
        inputs["block_table"][:, 0] = torch.tensor(rows)
        inputs["prompt_length"][:] = torch.tensor([len(prompts[row]) for row in rows])
        for name, value in sampling.items():
            values = [value[row] for row in rows] if isinstance(value, list) else value
            inputs[name][:] = torch.as_tensor(values, dtype=inputs[name].dtype)
        return inputs

    def take(row: int, outputs: dict[str, Tensor], at: int) -> None:
        results[row].tokens.append(int(outputs["token"][at, 0]))
        results[row].logprobs.append(float(outputs["logprob"][at, 0]))
        ids, values = outputs["top_ids"][at, 0].tolist(), outputs["top_logprobs"][at, 0].tolist()
        results[row].top.append({i: value for i, value in zip(ids, values, strict=True) if i >= 0})

    for row, prompt in enumerate(prompts):
        outputs: dict[str, Tensor] = {}
        size = piece or len(prompt)
        for at in range(0, len(prompt), size):
            outputs = run(inputs_for([row], [list(prompt[at : at + size])], [at], step.shortest_prompt))
        if max_new_tokens > 0:
            take(row, outputs, 0)

    def runs_on(row: int) -> bool:
        made = results[row].tokens
        fits = len(prompts[row]) + len(made) <= step.max_len
        return bool(made) and len(made) < max_new_tokens and made[-1] not in eos_token_ids and fits

    while active := [row for row in range(len(prompts)) if runs_on(row)]:
        feed = [[results[row].tokens[-1]] for row in active]
        starts = [len(prompts[row]) + len(results[row].tokens) - 1 for row in active]
        outputs = run(inputs_for(active, feed, starts))
        for at, row in enumerate(active):
            take(row, outputs, at)
    return results
