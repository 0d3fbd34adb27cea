"""``nxd-infer generate``: continue prompts with the engine in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_infer.cli.console import console, spinner


def run(artifact: Path, prompts: list[str], as_json: bool, **sampling: Any) -> None:
    """Print each prompt's continuation, or one JSON object a prompt."""
    from nxd_server import LLM
    from nxd_server.engine.params import SamplingParams

    params = SamplingParams(**sampling)
    if as_json:
        with LLM(artifact) as llm:
            outputs = llm.generate(prompts, params)
        for output in outputs:
            answer = output.outputs[0]
            record = {
                "prompt": output.prompt,
                "text": answer.text,
                "tokens": len(answer.token_ids),
                "finish_reason": answer.finish_reason,
            }
            print(json.dumps(record, ensure_ascii=False))
        return
    with spinner("loading and answering"), LLM(artifact) as llm:
        outputs = llm.generate(prompts, params)
    for output in outputs:
        answer = output.outputs[0]
        console.print(output.prompt or "", style="bold", end="", markup=False)
        console.print(answer.text, markup=False)
        console.print(
            f"[{len(answer.token_ids)} tokens, finish reason {answer.finish_reason}]", style="dim", markup=False
        )
