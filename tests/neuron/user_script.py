"""Train a model, trace what was trained, save it, load it, serve it: the same for every backend.

``python -m tests.neuron.user_script BACKEND MODEL_DIR OUT`` prints what the server answers: the letters that follow.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from tokenizers import Tokenizer

import nxd_infer as nxd
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from nxd_models import registry
from nxd_models.serving import tasks

LETTERS = "abcdefghijklmnop"
STEPS = 80
PROMPT, ANSWER = 4, 8


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def pattern(model_dir: Path) -> list[int]:
    """A token for each letter."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    found = [tokenizer.token_to_id(letter) for letter in LETTERS]
    assert None not in found
    return found


def train(model_dir: Path, folder: Path) -> None:
    """Until the model knows what follows what."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", free_port())):
        os.environ.setdefault(name, value)
    config = nxd.neuronx_distributed_config(tensor_parallel_size=1)
    model = nxd.initialize_parallel_model(config, registry.load_model, model_dir, dtype=torch.float32)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    tokens = torch.tensor([pattern(model_dir) * 2])
    for _ in range(STEPS):
        model.run_train(input_ids=tokens, labels=tokens)
        optimizer.step()
        optimizer.zero_grad()
    nxd.save_checkpoint(str(folder), "trained", model=model)


def serve(artifact: Path, prompt: list[int]) -> str:
    """What the server answers."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "nxd_infer", "serve", str(artifact), "--port", port])
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.2)
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait(60)


def main(backend: str, model_dir: Path, out: Path) -> None:
    train(model_dir, out / "checkpoints")
    weights = weight_source(out / "checkpoints")
    shapes = {"batch_sizes": [1], "prompt_buckets": [8], "max_len": 32, "dtype": torch.float32}
    plan = tasks.plan(model_dir, "generate", weights=weights, **shapes)
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend=backend) as traced:
        parallel_model_save(traced, out / "artifact")
    with parallel_model_load(out / "artifact", backend=backend) as loaded:
        assert loaded.tp_degree == 2
    print(serve(out / "artifact", pattern(model_dir)[:PROMPT]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
