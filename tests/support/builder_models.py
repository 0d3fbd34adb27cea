"""A decoder as users of model builders write them, its unsharded weights, and what eager PyTorch generates with it."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.compat.model_builder.first_generation import BaseModelInstance
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_state import get_tensor_model_parallel_size

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, HEAD, LENGTH, LAYERS = 40, 32, 48, 4, 2, 8, 16, 2
PROMPT = [3, 17, 5, 29]
LONG = [*PROMPT, 11, 2, 38, 7]


class Attention(nn.Module):
    """Grouped-query attention; a rank that would have less than one key-value head has a copy of one."""

    def __init__(self):
        super().__init__()
        degree = get_tensor_model_parallel_size()
        self.copies = max(1, degree // KV_HEADS)
        keys = KV_HEADS * self.copies
        self.heads, self.keys = HEADS // degree, keys // degree
        self.q_proj = ColumnParallelLinear(WIDTH, HEADS * HEAD, bias=False, gather_output=False)
        self.k_proj = ColumnParallelLinear(WIDTH, keys * HEAD, bias=False, gather_output=False)
        self.v_proj = ColumnParallelLinear(WIDTH, keys * HEAD, bias=False, gather_output=False)
        self.o_proj = RowParallelLinear(HEADS * HEAD, WIDTH, bias=False, input_is_parallel=True)

    def preshard_hook(self, state_dict: dict[str, Tensor], name: str) -> None:
        prefix = name.removesuffix("weight")
        for part in ("k_proj", "v_proj"):
            weight = state_dict[f"{prefix}{part}.weight"].view(KV_HEADS, HEAD, WIDTH)
            state_dict[f"{prefix}{part}.weight"] = weight.repeat_interleave(self.copies, 0).reshape(-1, WIDTH)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, seen: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = x.shape[1]
        q = self.q_proj(x).view(1, n, self.heads, HEAD).transpose(1, 2)
        new = [proj(x).view(1, n, self.keys, HEAD).transpose(1, 2) for proj in (self.k_proj, self.v_proj)]
        index = positions.view(1, 1, n, 1).expand(1, self.keys, n, HEAD)
        keys, values = torch.scatter(keys, 2, index, new[0]), torch.scatter(values, 2, index, new[1])
        groups = self.heads // self.keys
        mask = torch.arange(seen)[None, :] <= positions.view(n, 1)
        y = F.scaled_dot_product_attention(
            q, *(one[:, :, :seen].repeat_interleave(groups, 1) for one in (keys, values)), attn_mask=mask
        )
        return self.o_proj(y.transpose(1, 2).reshape(1, n, -1)), keys, values


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.gate_up_proj = ColumnParallelLinear(WIDTH, 2 * INNER, bias=False, gather_output=False, stride=2)
        self.down_proj = RowParallelLinear(INNER, WIDTH, bias=False, input_is_parallel=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, seen: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, keys, values = self.self_attn(self.norm(x), positions, keys, values, seen)
        gate, up = self.gate_up_proj(x + y).chunk(2, -1)
        return x + y + self.down_proj(F.silu(gate) * up), keys, values


class Decoder(nn.Module):
    """Tokens [1, n] and positions [1, n] to the logits of the last one, and the next caches; it attends to the first
    ``n_positions`` of them."""

    n_positions = LENGTH

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed_tokens = ParallelEmbedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lm_head = ColumnParallelLinear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.make_caches([(1, layer.self_attn.keys, LENGTH, HEAD) for layer in self.layers for _ in range(2)])

    def make_caches(self, shapes) -> None:
        caches = (nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in shapes)
        self.past_key_values = nn.ParameterList(caches)

    def caches(self) -> list[Tensor]:
        return list(self.past_key_values)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> list[Tensor]:
        x, caches = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            x, *new = layer(x, position_ids, *self.caches()[2 * i : 2 * i + 2], self.n_positions)
            caches += new
        return [self.lm_head(x[:, -1]), *caches]


class InPlace(Decoder):
    """The second generation's way: caches are buffers that the model changes."""

    def make_caches(self, shapes) -> None:
        self.past_key_values = nn.Module()
        for i, shape in enumerate(shapes):
            self.past_key_values.register_buffer(str(i), torch.zeros(shape), persistent=False)

    def caches(self) -> list[Tensor]:
        return list(self.past_key_values.buffers())

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits, *caches = super().forward(input_ids, position_ids)
        for old, new in zip(self.caches(), caches, strict=True):
            old.copy_(new)
        return logits


class DecoderInstance(BaseModelInstance):
    """As in NxD Inference: the module is changed for its shape, and aliases are made of its caches."""

    def __init__(self, tied: bool = False):
        super().__init__(Decoder)
        self.tied = tied

    def load_module(self) -> None:
        self.module = Decoder(self.tied)
        self.module.eval()

    def get(self, bucket_rank: int | None, **kwargs):
        assert self.module is not None
        if bucket_rank is not None:
            self.module.n_positions = [len(PROMPT), 2 * len(PROMPT)][bucket_rank]
        self.input_output_aliases = {cache: 1 + i for i, cache in enumerate(self.module.past_key_values)}
        return self.module, self.input_output_aliases


def weights(tied: bool = False) -> dict[str, Tensor]:
    """The unsharded weights by the user's names; caches are none of them."""
    torch.manual_seed(4)
    tensors = {name: torch.randn_like(one) * 0.5 for name, one in Decoder(tied).state_dict().items()}
    return {name: one for name, one in tensors.items() if "past" not in name and not (tied and "lm_head" in name)}


def inputs(tokens: list[int], start: int = 0) -> tuple[Tensor, Tensor]:
    n = len(tokens)
    return torch.tensor([tokens], dtype=torch.int32), torch.arange(start, start + n).unsqueeze(0)


PREFILL, DECODE = inputs(PROMPT), inputs([0])


@torch.no_grad()
def eager(count: int, tied: bool = False, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens that plain PyTorch generates."""
    model = Decoder(tied)
    model.load_state_dict(weights(tied), strict=False)

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        logits, *caches = model(ids, positions)
        for old, new in zip(model.caches(), caches, strict=True):
            old.copy_(new)
        return logits

    return generate(step, count, prompt)


def generate(step, count: int, prompt: list[int] = PROMPT) -> list[int]:
    """Greedy tokens of ``step(input_ids, position_ids)``, which returns logits [1, vocabulary]."""
    logits, tokens = step(*inputs(prompt)), []
    for at in range(len(prompt), len(prompt) + count):
        tokens.append(int(logits.argmax()))
        logits = step(*inputs(tokens[-1:], at))
    return tokens


LOAD = """
import json, sys
from nxd_infer.compat.model_builder.nxd_model import NxDModel
from tests.support.builder_models import generate
for path in sys.argv[2:]:
    model = NxDModel.load(path)
    print(json.dumps(generate(model, int(sys.argv[1]))))
    model.model.close()
"""


def in_a_fresh_process(count: int, *artifacts: object) -> list[list[int]]:
    """Return the tokens that each saved model generates in a process that has none of this one's modules."""
    words = [sys.executable, "-c", LOAD, str(count), *map(str, artifacts)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
