"""Train a small Llama on the demo's text with a plain PyTorch loop, and write it as a Hugging Face directory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.cli.demo.corpus import BEGIN, END, VOCAB_SIZE, documents, write_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
BATCH, LENGTH, PEAK_RATE = 16, 128, 3e-3


@dataclass(frozen=True)
class Trained:
    """What training gave."""

    steps: int
    first_loss: float
    last_loss: float
    tokens_per_second: float
    parameters: int


def batches(tokens: Tensor, seed: int):
    """Endless random windows ``[BATCH, LENGTH + 1]`` of one long token tensor."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(LENGTH + 1)
    while True:
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH, 1), generator=generator)
        yield tokens[starts + window]


def rate(done: float) -> float:
    """Learning rate after the share ``done`` of the time: a short warm-up, then a cosine to a tenth."""
    if done < 0.05:
        return PEAK_RATE * (0.1 + 0.9 * done / 0.05)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * (done - 0.05) / 0.95))


def train(directory: Path, seconds: float, report: Callable[[float, str], None], seed: int = 0) -> Trained:
    """Train for about ``seconds`` and write ``directory``: config.json, model.safetensors, tokenizer files.

    ``report(share done, note)`` is called after each step. The loss is the mean cross-entropy a token, in nats.
    """
    from safetensors.torch import save_file

    from nxd_models.registry import build

    directory.mkdir(parents=True, exist_ok=True)
    texts = documents()
    tokenizer = write_tokenizer(directory, texts)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    config = {**CONFIG, "bos_token_id": begin, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokens = torch.tensor([i for text in texts for i in (begin, *tokenizer.encode(text).ids, end)])

    torch.manual_seed(seed)
    model = build(directory, task="generate", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    data = batches(tokens, seed)
    losses: list[float] = []
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate(elapsed / seconds)
        window = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speed = len(losses) * BATCH * LENGTH / max(time.monotonic() - start, 1e-9)
        report(min(1.0, elapsed / seconds), f"loss {losses[-1]:.2f}  {speed:,.0f} tokens/s")
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    tail = losses[-10:]
    return Trained(
        steps=len(losses),
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        tokens_per_second=len(losses) * BATCH * LENGTH / (time.monotonic() - start),
        parameters=sum(p.numel() for p in model.parameters()),
    )
