"""``nxd-infer generate``: continue prompts with the engine in this process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from nxd_infer.cli.console import aside, spinner, verbatim
from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.trace import load_artifact
from nxd_server import LLM
from nxd_server.engine.generation_engine import Engine
from nxd_server.engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 64


def run(
    artifact: Path,
    prompts: list[str],
    as_json: bool,
    max_tokens: int | None,
    speculate: int | None,
    draft: str | None,
    allow_kernel: bool | None,
    generation_defaults: bool | None,
    **sampling: Any,
) -> None:
    """Print each prompt's continuation, or one JSON object per prompt; everything else goes to stderr.

    ``max_tokens`` None: the default, if it fits. Parameters of the sampler that are None: the model's default if
    ``generation_defaults``, else greedy. Others: the default of :class:`LLM`.
    """
    typed = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams(max_tokens=max_tokens, **typed)  # report a wrong value before anything is loaded
    manifest = load_artifact(artifact, verify=False).manifest
    if manifest.metadata.get("task") == "generate" and TOKENIZER not in manifest.files:
        raise ModelConfigError(
            f"{artifact} has no tokenizer.json: put the tokenizer's files into the model's directory and trace again"
        )

    given = {"speculate": speculate, "draft": draft, "allow_kernel": allow_kernel}
    given |= {"generation_defaults": generation_defaults}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    waiting = nullcontext() if as_json else spinner("loading and answering", aside)
    with waiting, LLM(artifact, **options) as llm:
        rooms = [max_tokens or min(DEFAULT_MAX_TOKENS, llm.room(prompt)) for prompt in prompts]
        values = {"temperature": 0.0, **llm.sampling_defaults, **typed}
        outputs = llm.generate(prompts, [SamplingParams(max_tokens=room, **values) for room in rooms])
        assert isinstance(llm.engine, Engine)  # generate() has rejected any other
        stats = llm.engine.stats()
    for output in outputs:
        answer = output.outputs[0]
        if as_json:
            record = {
                "prompt": output.prompt,
                "text": answer.text,
                "tokens": len(answer.token_ids),
                "finish_reason": answer.finish_reason,
            }
            print(json.dumps(record, ensure_ascii=False))
            continue
        verbatim(output.prompt or "", bold=True)
        verbatim(answer.text, end="\n")
        aside.print(
            f"[{len(answer.token_ids)} tokens, finish reason {answer.finish_reason}]", style="dim", markup=False
        )
    if (speculate or draft) and not as_json:
        right = f"[speculation: {stats.accepted_tokens} of {stats.draft_tokens} guessed tokens were right]"
        aside.print(right, style="dim", markup=False)
