"""Every layer inside one traced model against plain PyTorch on the same logical weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nxd_infer import trace
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
)

HIDDEN, KV_HEADS = 16, 2


class Layers(nn.Module):
    """One of each; the outputs are those of every layer, gathered."""

    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(40, HIDDEN)
        self.by_width = ParallelEmbedding(40, HIDDEN, shard_across_embedding=True)
        self.gathered = ColumnParallelLinear(HIDDEN, 24)
        self.up = ColumnParallelLinear(HIDDEN, 32, gather_output=False)
        self.down = RowParallelLinear(32, HIDDEN, input_is_parallel=True)
        self.row = RowParallelLinear(HIDDEN, 12)
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, [16, 8], kv_size_multiplier=self.copies(), head_dim=4)
        self.conv_out = OutputChannelParallelConv2d(3, 8, 3, padding=1, gather_output=False)
        self.conv_in = InputChannelParallelConv2d(8, 5, 3, padding=1, input_is_parallel=True)

    @staticmethod
    def copies() -> int:
        from nxd_infer.parallel_state import get_tensor_model_parallel_size

        return max(1, get_tensor_model_parallel_size() // KV_HEADS)

    def forward(self, ids, image):
        x = self.embedding(ids) + self.by_width(ids)
        q, k, v = self.qkv(x)
        mlp = self.down(F.gelu(self.up(x)))
        picture = self.conv_in(torch.relu(self.conv_out(image)))
        return {
            "x": x,
            "gathered": self.gathered(x),
            "mlp": mlp,
            "row": self.row(x),
            "q": q,
            "k": k,
            "v": v,
            "picture": picture,
        }


def get_layers():
    torch.manual_seed(0)
    return Layers().eval(), {}


def plain(model: Layers, ids: torch.Tensor, image: torch.Tensor, copies: int) -> dict[str, torch.Tensor]:
    """The same computation from the logical weights, with PyTorch's own functions."""
    w = {name: value.detach() for name, value in model.state_dict().items()}
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))  # noqa: E731
    x = F.embedding(ids, w["embedding.weight"]) + F.embedding(ids, w["by_width.weight"])
    qkv = F.linear(x, w["qkv.weight_qkv"], w["qkv.bias_qkv"])
    k, v = (t.unflatten(-1, (KV_HEADS, 4)) for t in (qkv[..., 16:24], qkv[..., 24:]))
    picture = torch.relu(F.conv2d(image, w["conv_out.weight"], w["conv_out.bias"], padding=1))
    return {
        "x": x,
        "gathered": linear(x, "gathered"),
        "mlp": linear(F.gelu(linear(x, "up")), "down"),
        "row": linear(x, "row"),
        "q": qkv[..., :16],
        "k": k.repeat_interleave(copies, 2).flatten(2),  # each copy of a head beside the first
        "v": v.repeat_interleave(copies, 2).flatten(2),
        "picture": F.conv2d(picture, w["conv_in.weight"], w["conv_in.bias"], padding=1),
    }


def test_every_layer_traced_equals_plain_pytorch():
    tp = 4  # more than there are heads of keys
    ids = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(1))
    image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    expected = plain(get_layers()[0], ids, image, copies=tp // KV_HEADS)
    with trace.parallel_model_trace(get_layers, (ids, image), tp_degree=tp, backend="eager") as model:
        ours = model(ids, image)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].shape == value.shape, name
        assert (ours[name] - value).abs().max() / value.abs().max() < 1e-5, name
