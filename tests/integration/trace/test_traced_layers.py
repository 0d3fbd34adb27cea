"""Every layer inside one traced model, at more ranks than it has heads of keys, against the same one at degree 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from nxd_infer import trace
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
)
from tests.support.parallel_layers.compare import error

HIDDEN, DEGREE, COPIES = 16, 4, 2


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
        self.qkv = GQAQKVColumnParallelLinear(HIDDEN, [16, 8], kv_size_multiplier=COPIES, head_dim=4)
        self.conv_out = OutputChannelParallelConv2d(3, 8, 3, padding=1, gather_output=False)
        self.conv_in = InputChannelParallelConv2d(8, 5, 3, padding=1, input_is_parallel=True)

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
            "qkv": (q, k, v),
            "image": picture,
        }


def get_layers():
    torch.manual_seed(0)
    return Layers().eval(), {}


@pytest.mark.filterwarnings("ignore:kv_size_multiplier")
def test_every_layer_traced_equals_the_whole_one():
    """Which tests/integration/parallel_layers compares with plain PyTorch."""
    ids = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(1))
    image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = get_layers()[0](ids, image)
    with trace.parallel_model_trace(get_layers, (ids, image), tp_degree=DEGREE, backend="eager") as model:
        ours = model(ids, image)
    assert ours.keys() == expected.keys()
    for found, value in zip(tree_leaves(ours), tree_leaves(expected), strict=True):
        assert error(found, value) < 1e-5
