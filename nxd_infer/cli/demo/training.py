"""Train the demo's Llama, tensor parallel over all ranks: a program that every rank runs, as under torchrun.

``python -m nxd_infer.cli.demo.training FOLDER SECONDS PARENT``; :func:`prepare` creates FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.cli.console import console
from nxd_infer.cli.demo.corpus import VOCAB_SIZE, split
from nxd_infer.cli.demo.made import MODEL
from nxd_infer.cli.demo.optimizer import MuonAndAdamW, groups_of
from nxd_infer.context import current_context
from nxd_infer.recipes.tokenizers import BEGIN, END, train_tokenizer
from nxd_infer.trainer import NxDModel, TrainingProgress, shutdown
from nxd_infer.util.devices import HOST
from nxd_infer.util.machine import computes_bfloat16
from nxd_infer.util.this_process import die_with_parent
from nxd_models.registry import build

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
BATCH, LENGTH, PEAK_RATE, SEED = 8, 128, 8e-3, 0
TOKENS, CHECKPOINTS, FIGURES = "tokens.safetensors", "checkpoints", "training.json"
"""Contents of the folder besides the model: the text as ids, the trained weights, the results."""


@dataclass(frozen=True)
class Trained:
    """Results of training. Losses are mean cross-entropies per token, in nats."""

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float
    tokens_per_second: float


def prepare(folder: Path) -> None:
    """Write a model directory without weights, and the text as token ids."""
    model = folder / MODEL
    model.mkdir(parents=True, exist_ok=True)
    texts, held_out = split()
    tokenizer = train_tokenizer(model, texts, VOCAB_SIZE)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    config = {**CONFIG, "bos_token_id": begin, "eos_token_id": end}
    (model / "config.json").write_text(json.dumps(config, indent=1))

    def ids(chapters: list[str]) -> Tensor:
        return torch.tensor([i for text in chapters for i in (begin, *tokenizer.encode(text).ids, end)])

    save_file({"train": ids(texts), "held_out": ids(held_out)}, folder / TOKENS)


def batches(tokens: Tensor) -> Iterator[Tensor]:
    """Yield random windows ``[BATCH, LENGTH]`` of one long token tensor, forever, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    window = torch.arange(LENGTH)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        yield tokens[starts + window]


def rate(done: float) -> float:
    """Return the learning rate after the fraction ``done``: a short warm-up, then a cosine decay to a twentieth."""
    if done < 0.05:
        return PEAK_RATE * (0.1 + 0.9 * done / 0.05)
    return PEAK_RATE * (0.525 + 0.475 * math.cos(math.pi * (done - 0.05) / 0.95))


@contextlib.contextmanager
def narrow() -> Iterator[None]:
    """Run matrix products in bfloat16 if the processor has it, without fused attention: its backward is slow there."""
    with torch.autocast(HOST.type, torch.bfloat16, enabled=computes_bfloat16()), sdpa_kernel(SDPBackend.MATH):
        yield


def agreed(value: float) -> float:
    """Return the first rank's number on every rank: with a clock per rank they would not stop at the same step."""
    return float(comm.broadcast(torch.tensor(value, dtype=torch.float64), current_context()))


@narrow()
def held_out_loss(model: NxDModel, tokens: Tensor) -> float:
    """Return the loss over held-out text, in consecutive windows."""
    windows = tokens.unfold(0, LENGTH, LENGTH - 1)  # the first token of a window is given, not predicted
    parts = windows.split(BATCH)
    return sum(model.run_eval(input_ids=part, labels=part).item() * len(part) for part in parts) / len(windows)


def train(folder: Path, seconds: float) -> Trained:
    """Train for about ``seconds`` on this rank, and save a checkpoint. Every rank calls it."""
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=dist.get_world_size())
    torch.manual_seed(SEED)
    model = nxd.initialize_parallel_model(nxd_config, build, folder / MODEL, task="generate", dtype=torch.float32)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, MuonAndAdamW, groups_of(model), lr=PEAK_RATE)
    tokens = load_file(folder / TOKENS)
    data = batches(tokens["train"])
    losses: list[float] = []
    start = time.monotonic()
    with TrainingProgress(seconds=seconds, console=console) as progress:
        while (elapsed := agreed(time.monotonic() - start)) < seconds or not losses:
            for group in optimizer.param_groups:
                group["lr"] = rate(min(1.0, elapsed / seconds))
            windows = next(data)
            with narrow():
                loss = model.run_train(input_ids=windows, labels=windows)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.step(loss, tokens=windows.numel())
        speed = len(losses) * BATCH * LENGTH / (time.monotonic() - start)
    tag = f"step_{len(losses)}"
    nxd.save_checkpoint(folder / CHECKPOINTS, tag, model=model, optimizer=optimizer, num_kept_ckpts=1)
    tail = losses[-10:]
    return Trained(
        steps=len(losses),
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        held_out_loss=held_out_loss(model, tokens["held_out"]),
        tokens_per_second=speed,
    )


def main(folder: str, seconds: str, parent: str) -> None:
    die_with_parent(int(parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the terminal
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment
    trained = train(Path(folder), float(seconds))
    if dist.get_rank() == 0:
        (Path(folder) / FIGURES).write_text(json.dumps(asdict(trained)))
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
