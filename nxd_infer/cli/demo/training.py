"""Train a small Llama on the demo's text with a plain PyTorch loop, and write it as a Hugging Face directory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nxd_infer.cli.demo.corpus import BEGIN, END, VOCAB_SIZE, split, write_tokenizer

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
BATCH, LENGTH, PEAK_RATE = 8, 128, 8e-3


@dataclass(frozen=True)
class Trained:
    """What training gave. Losses are mean cross-entropies a token, in nats."""

    steps: int
    first_loss: float
    last_loss: float
    held_out_loss: float
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
    """Learning rate after the share ``done`` of the time: a short warm-up, then a cosine to a twentieth."""
    if done < 0.05:
        return PEAK_RATE * (0.1 + 0.9 * done / 0.05)
    return PEAK_RATE * (0.525 + 0.475 * math.cos(math.pi * (done - 0.05) / 0.95))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest.

    With so few steps Muon's orthogonal updates pay: 80 s of one core gave 1.36 bits a byte, AdamW alone 1.90.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens in ``windows`` [B, S + 1]; matrix products are in bfloat16."""
    # The fused attention's backward in bfloat16 takes longer here than the plain products do.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: Tensor) -> float:
    """The loss over text that the model has not seen, in windows of ``LENGTH`` one after the other."""
    windows = tokens.unfold(0, LENGTH + 1, LENGTH)
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(BATCH)) / len(windows)


def train(directory: Path, seconds: float, report: Callable[[float, str], None], seed: int = 0) -> Trained:
    """Train for about ``seconds`` and write ``directory``: config.json, model.safetensors, tokenizer files.

    ``report(share done, note)`` is called after each step.
    """
    from safetensors.torch import save_file

    from nxd_models.registry import build

    directory.mkdir(parents=True, exist_ok=True)
    texts, held_out = split()
    tokenizer = write_tokenizer(directory, texts)
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    config = {**CONFIG, "bos_token_id": begin, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config, indent=1))

    def tokens_of(chapters: list[str]) -> Tensor:
        return torch.tensor([i for text in chapters for i in (begin, *tokenizer.encode(text).ids, end)])

    torch.manual_seed(seed)
    model = build(directory, task="generate", dtype=torch.float32)
    model.train()
    steppers = optimizers(model)
    data = batches(tokens_of(texts), seed)
    losses: list[float] = []
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        for group in (group for stepper in steppers for group in stepper.param_groups):
            group["lr"] = rate(elapsed / seconds)
        loss = loss_of(model, next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
        elapsed = time.monotonic() - start
        speed = len(losses) * BATCH * LENGTH / elapsed
        left = max(0.0, seconds - elapsed)
        report(min(1.0, elapsed / seconds), f"loss {losses[-1]:.2f}  {speed:,.0f} tokens/s  {left:.0f} s left")
    speed = len(losses) * BATCH * LENGTH / (time.monotonic() - start)
    model.eval()
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    tail = losses[-10:]
    return Trained(
        steps=len(losses),
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        held_out_loss=held_out_loss(model, tokens_of(held_out)),
        tokens_per_second=speed,
        parameters=sum(p.numel() for p in model.parameters()),
    )
