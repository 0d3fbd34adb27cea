"""EAGLE heads of tiny models: a naive reference in plain PyTorch, checkpoints, and heads that have learnt something.

A head's weights are a dictionary under the names of published checkpoints, with the target's embedding (and output
layer) besides, which :func:`write_head` leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.models.helpers import prompts_of
from tests.support.shared import shared
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

LAYERS, SIZE, INNER, HEADS, KEYS, DIM, THETA, EPS = 5, 32, 48, 4, 2, 8, 1e4, 1e-5
GUESSED = 96
"""Tokens that an EAGLE-3 head can guess."""
KINDS = ("eagle", "eagle3")
PROMPTS, COUNT = prompts_of([4, 11, 19, 7], VOCAB_SIZE, seed=8), 30
"""What heads learn to continue, as their targets do, by so many tokens."""


def models() -> Path:
    """A folder with a target, ``answers.pt`` to PROMPTS, and for both kinds of heads ``random-KIND``, ``learnt-KIND``
    and the latter's weights."""

    def make(folder: Path) -> None:
        target = write_target(folder / "target")
        said = answers(target, PROMPTS, COUNT)
        torch.save(said, folder / "answers.pt")
        texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, said, strict=True)]
        for kind in KINDS:
            write_head(folder / f"random-{kind}", target, random_head(target, kind))
            weights = trained_head(target, kind, texts)
            torch.save(weights, folder / f"learnt-{kind}.pt")
            write_head(folder / f"learnt-{kind}", target, weights)

    return shared("eagle-models", make)


def write_target(folder: Path, **changes) -> Path:
    return write_tiny("llama", folder, num_hidden_layers=LAYERS, **changes)


def random_head(target: Path, kind: str, seed: int = 0, guessed: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Weights that know nothing; ``guessed``: the tokens of an EAGLE-3 head, ascending."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(SIZE, generator=generator)

    layer, reads = ("layers.0.", SIZE) if kind == "eagle" else ("midlayer.", 2 * SIZE)
    theirs = load_file(target / "model.safetensors")
    weights = {
        "embed_tokens.weight": theirs["model.embed_tokens.weight"],
        f"{layer}self_attn.q_proj.weight": matrix(HEADS * DIM, reads),
        f"{layer}self_attn.k_proj.weight": matrix(KEYS * DIM, reads),
        f"{layer}self_attn.v_proj.weight": matrix(KEYS * DIM, reads),
        f"{layer}self_attn.o_proj.weight": matrix(SIZE, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, SIZE),
        f"{layer}mlp.up_proj.weight": matrix(INNER, SIZE),
        f"{layer}mlp.down_proj.weight": matrix(SIZE, INNER),
        f"{layer}post_attention_layernorm.weight": norm(),
    }
    if kind == "eagle":
        weights |= {
            "fc.weight": matrix(SIZE, 2 * SIZE),
            "fc.bias": 0.1 * norm(),
            "lm_head.weight": theirs["lm_head.weight"],
        }
        return weights
    tokens = torch.tensor(guessed or range(1, 3 * GUESSED, 3))
    seen = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    seen[tokens] = True
    return {
        **weights,
        "fc.weight": matrix(SIZE, 3 * SIZE),
        "norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "lm_head.weight": matrix(len(tokens), SIZE),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": seen,
    }


def write_head(folder: Path, target: Path, weights: dict[str, torch.Tensor], **changes) -> Path:
    """The checkpoint of a head, with ``changes`` in its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    left = ["embed_tokens.weight"]
    if "d2t" in weights:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(weights["d2t"])}
    else:
        left.append("lm_head.weight")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(
        {name: one.contiguous() for name, one in weights.items() if name not in left}, folder / "model.safetensors"
    )
    return folder


# --- the reference: whole texts, no cache ---


def _norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotated(x):
    angles = torch.arange(x.shape[0])[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(w, layer, x):
    def heads(name, count):
        return (x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(len(x), count, DIM)

    q, k, v = _rotated(heads("q", HEADS)), _rotated(heads("k", KEYS)), heads("v", KEYS)
    k, v = (one.repeat_interleave(HEADS // KEYS, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return mixed @ w[f"{layer}self_attn.o_proj.weight"].T


def given(w, features):
    """What the target gives [n, F], as states [n, E]."""
    return features @ w["fc.weight"].T if "norm.weight" in w else features


def states(w, tokens, before):
    """The head's states [n, E] for tokens [n], each with the state before it, [n, E]."""
    embedded = w["embed_tokens.weight"][tokens]
    if "norm.weight" in w:
        layer = "midlayer."
        both = _norm(embedded, w[f"{layer}input_layernorm.weight"]), _norm(before, w[f"{layer}hidden_norm.weight"])
        x = before + _attention(w, layer, torch.cat(both, -1))
    else:
        layer = "layers.0."
        x = torch.cat([embedded, before], -1) @ w["fc.weight"].T + w["fc.bias"]
        x = x + _attention(w, layer, x)
    y = _norm(x, w[f"{layer}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


def logits(w, x):
    """Of the target's tokens [..., V]."""
    if "norm.weight" not in w:
        return x @ w["lm_head.weight"].T
    made = _norm(x, w["norm.weight"]) @ w["lm_head.weight"].T
    everything = torch.full((*x.shape[:-1], VOCAB_SIZE), float("-inf"))
    for number, offset in enumerate(w["d2t"].tolist()):
        everything[..., number + offset] = made[..., number]
    return everything


@torch.no_grad()
def chain(w, tokens, features, count):
    """``count`` logits [V], one guess after the other, and the guesses: pairs of a token and the state before it, then
    each guess with the head's own state."""
    tokens, before, made = list(tokens), given(w, features), []
    for _ in range(count):
        own = states(w, tokens, before)
        made.append(logits(w, own[-1]))
        tokens.append(int(made[-1].argmax()))
        before = torch.cat([before, own[-1:]])
    return made, tokens[len(tokens) - count :]


@torch.no_grad()
def features(target: Path, kind: str, text: list[int]) -> torch.Tensor:
    """What a target gives for each token of a text, by transformers: [n, F]."""
    found = _model(target)(torch.tensor([text]), output_hidden_states=True).hidden_states
    layers = (-1,) if kind == "eagle" else (2, LAYERS // 2, LAYERS - 3)
    return torch.cat([found[layer][0] for layer in layers], -1)


def _model(target: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@torch.no_grad()
def answers(target: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers of so many tokens, by transformers."""
    model, made = _model(target), []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        made.append(text[len(prompt) :])
    return made


def trained_head(target: Path, kind: str, texts: list[list[int]], steps: int = 150) -> dict[str, torch.Tensor]:
    """A head that has learnt these texts: the next token behind each pair, and (EAGLE) the target's next state."""
    torch.manual_seed(0)
    known = sorted({token for text in texts for token in text} | set(range(GUESSED - 60)))
    weights = random_head(target, kind, guessed=known)
    learnt = [one.requires_grad_() for name, one in weights.items() if one.is_floating_point() and "embed" not in name]
    if kind == "eagle":
        weights["lm_head.weight"].requires_grad_(False)
        learnt = [one for one in learnt if one.requires_grad]
    seen = [features(target, kind, text) for text in texts]
    optimizer = torch.optim.Adam(learnt, 1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for text, there in zip(texts, seen, strict=True):
            own = states(weights, text[1:-1], given(weights, there[:-2]))
            loss = loss + F.cross_entropy(logits(weights, own), torch.tensor(text[2:]))
            if kind == "eagle":
                loss = loss + F.smooth_l1_loss(own, there[1:-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: one.detach() for name, one in weights.items()}
