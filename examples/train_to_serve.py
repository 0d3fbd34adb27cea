"""From training to serving, the same on every backend: python examples/train_to_serve.py BACKEND MODEL OUT

Teaches the model of a Hugging Face directory the alphabet, traces what was trained for two ranks of BACKEND (cpu,
xla or neuron), saves, loads and serves it, and prints what the server says after "abcd".
"""

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

ALPHABET = "abcdefghijklmnop"
PROMPT, ANSWER = 4, 8
STEPS = 80


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(model_dir: Path, letters: list[int], checkpoints: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():  # torchrun sets them
        os.environ.setdefault(name, value)
    config = nxd.neuronx_distributed_config(tensor_parallel_size=1)
    model = nxd.initialize_parallel_model(config, registry.load_model, model_dir, dtype=torch.float32)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    tokens = torch.tensor([letters * 2])
    for _ in range(STEPS):
        model.run_train(input_ids=tokens, labels=tokens)
        optimizer.step()
        optimizer.zero_grad()
    nxd.save_checkpoint(str(checkpoints), "trained", model=model)


def trace(model_dir: Path, checkpoints: Path, backend: str, artifact: Path) -> None:
    shapes = {"batch_sizes": [1], "prompt_buckets": [8], "max_len": 32, "dtype": torch.float32}
    plan = tasks.plan(model_dir, "generate", weights=weight_source(checkpoints), **shapes)
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend=backend) as model:
        parallel_model_save(model, artifact)
    with parallel_model_load(artifact, backend=backend) as model:
        print(f"{artifact} runs {len(model.buckets)} graphs on {model.tp_degree} ranks")


def serve_and_ask(artifact: Path, prompt: list[int]) -> str:
    url = f"http://127.0.0.1:{free_port()}"
    server = subprocess.Popen([sys.executable, "-m", "nxd_infer", "serve", artifact, "--port", url.rpartition(":")[2]])
    try:
        wait_until_ready(server, url)
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def main(backend: str, model_dir: Path, out: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    letters = [tokenizer.token_to_id(letter) for letter in ALPHABET]
    train(model_dir, letters, out / "checkpoints")
    trace(model_dir, out / "checkpoints", backend, out / "artifact")
    print(serve_and_ask(out / "artifact", letters[:PROMPT]))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
