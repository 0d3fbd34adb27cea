"""Real traced artifacts of tiny models, for servers in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from tests.support import tiny_models
from tests.support.http.http_servers import ServerProcess
from tests.support.shared import VARIABLE, shared

WORDS = ["the", "with", "for", "while", "if", "try", "else", "def", "class", "import"]
ONE_LAYER = {"num_hidden_layers": 1}
"""Exported in half the time of two, which tests/models traces."""
PROMPTS = [f"{WORDS[number % 10]} {number}" for number in range(40)]

LLAMA = {"batch_sizes": [1, 4], "prompt_buckets": [16], "max_len": 256}
"""What tests trace that need no other shapes: it is done once for all of them."""


def trace_tiny(
    family: str,
    task: str,
    directory: Path | None = None,
    *,
    tp: int = 2,
    backend="eager",
    model: dict | None = None,
    **shapes,
) -> Path:
    """``directory/artifact``, traced of a tiny model of ``family`` in ``directory/model``, of one layer (``model``:
    other options of write_tiny). A run of the tests traces the same once: without ``directory`` nobody may change it.
    """
    arguments = (family, task, tp, backend, {**ONE_LAYER, **(model or {})}, dict(sorted(shapes.items())))
    make = functools.partial(_trace_tiny, *arguments)
    if VARIABLE in os.environ:
        made = shared(f"tiny/{family}-{hashlib.sha256(repr(arguments).encode()).hexdigest()[:16]}", make)
        if directory is None:
            return made / "artifact"
        shutil.copytree(made, directory, dirs_exist_ok=True)
    else:  # not in a test
        assert directory is not None
        make(directory)
    return directory / "artifact"


SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.4}


def trace_sampled(directory: Path | None = None) -> Path:
    """A tiny Llama that samples by default, on one rank, with two slots for adapters of rank 4."""
    model = {"generation": {**SAMPLED, "do_sample": True, "eos_token_id": [tiny_models.EOS, 200]}}
    shapes = {"batch_sizes": [1, 4], "prompt_buckets": [16], "max_len": 64, "lora_slots": 2, "lora_rank": 4}
    return trace_tiny("llama", "generate", directory, tp=1, model=model, **shapes)


def _trace_tiny(family: str, task: str, tp: int, backend: str, model: dict, shapes: dict, directory: Path) -> None:
    from nxd_infer import trace
    from nxd_models.serving import tasks

    model_dir = tiny_models.write_tiny(family, directory / "model", **model)
    plan = tasks.plan(model_dir, task, dtype=torch.float32, model_name=f"tiny-{family}", **shapes)
    arguments = {**plan.trace_arguments(), "tp_degree": tp, "backend": backend}
    _trace(trace, arguments, directory / "artifact")


def _trace(trace, arguments, artifact: Path) -> Path:
    with trace.parallel_model_trace(**arguments) as model:
        trace.parallel_model_save(model, artifact)
    return artifact


class Affine(nn.Module):
    """A model of no task: ``y = x @ w * scale``, and the sum of ``k``'s rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12, dtype=torch.float32).reshape(3, 4) / 10)
        rows = {"pad": {0: 0}}
        self.nxd_inputs = {"x": rows, "k": rows, "scale": {**rows, "default": 2.0}}
        self.nxd_outputs = {"y": {"cut": {0: ["x", 0]}}, "total": {"cut": {0: ["x", 0]}}}

    def forward(self, x, k, scale):
        return {"y": x @ self.weight * scale[:, None], "total": k.sum(1)}


def affine() -> tuple[nn.Module, dict]:
    return Affine(), {}


def trace_affine() -> Path:
    """Degree 1, batches of up to 4 rows."""
    from nxd_infer import trace

    example = {"x": torch.ones(4, 3), "k": torch.ones(4, 2, dtype=torch.int64), "scale": torch.ones(4)}
    arguments = {"func": affine, "example_inputs": example, "backend": "eager"}
    return shared("tiny/affine", lambda directory: _trace(trace, arguments, directory / "artifact")) / "artifact"


class Scores(nn.Module):
    """A user's own module, which declares nothing: probabilities of five classes [B, 5], and each row's length [B]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 16), nn.Linear(16, 5)

    def forward(self, x, mask):
        y = self.down(torch.tanh(self.up(x))) * mask[:, None]
        return y.softmax(-1), x.norm(dim=-1)


def scores() -> nn.Module:
    return Scores()


def trace_scores() -> Path:
    """Degree 1, batches of 2, 4 and 8 rows."""
    from nxd_infer import trace

    examples = [(torch.ones(rows, 3), torch.ones(rows)) for rows in (2, 4, 8)]
    arguments = {"func": scores, "example_inputs": examples, "batch_dim": 0, "backend": "eager"}
    arguments |= {"bucket_config": trace.BucketModelConfig(), "inline_weights_to_neff": False}
    return shared("tiny/scores", lambda directory: _trace(trace, arguments, directory / "artifact")) / "artifact"


@contextlib.contextmanager
def real_server(artifact: Path, *options: str, wait: bool = True):
    """``nxd-infer serve ARTIFACT``, ready; of an option that ``options`` repeat, the last one counts."""
    patient = ("--call-timeout", "120", "--header-timeout", "600")
    command = [sys.executable, "-m", "nxd_infer", "serve", str(artifact), "--port", "0", *patient, *options]
    server = ServerProcess(command)
    try:
        yield server.wait_ready() if wait else server
    finally:
        if server.process.poll() is None:
            server.kill()


def greedy_texts(model_dir: Path, prompts: list[str], max_tokens: int) -> dict[str, str]:
    """What transformers' own model says, token by token without a cache, decoded as the server does."""
    from transformers import AutoModelForCausalLM

    from nxd_server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    texts = {}
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        start = len(ids)
        with torch.no_grad():
            for _ in range(max_tokens):
                logits = model(torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
        texts[prompt] = tokenizer.decode(ids[start:])
    return texts
