"""Models traced by the package itself, called, saved, loaded and given new weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_infer.errors import WeightSchemaError
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.trace import parallel_model_load, parallel_model_save, parallel_model_trace

VOCABULARY, HIDDEN = 12, 8


class Net(nn.Module):
    """Tied embeddings, biases, a constant buffer, a state, declared padding, a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = ParallelEmbedding(VOCABULARY, HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 16, bias=True, gather_output=False)
        self.down = RowParallelLinear(16, HIDDEN, bias=True, input_is_parallel=True)
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, gather_output=True)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(float(HIDDEN)) / HIDDEN, persistent=False)
        self.register_buffer("calls", torch.zeros(1))
        self.unread = nn.Linear(2, 2)
        self.nxd_inputs = {"ids": {"pad": {0: 0, 1: 0}}}
        self.nxd_outputs = {"output_0": {"cut": {0: ["ids", 0], 1: ["ids", 1]}}}

    def forward(self, ids: torch.Tensor):
        self.calls.add_(1)
        hidden = self.embed(ids) + self.frequencies
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(hidden), self.calls.clone()


def get_model():
    return Net(), {}


def test_trace_call_update_save_and_load(tmp_path):
    example = (torch.zeros(2, 4, dtype=torch.int64),)
    ids = torch.randint(0, VOCABULARY, (2, 3))
    plain = Net()

    def same(model) -> bool:
        y, want = model(ids)[0], plain(ids)[0]
        return y.shape == want.shape and bool((y - want).abs().max() <= 1e-5 * want.abs().max())

    options = {"tp_degree": 2, "backend": "eager", "inline_weights_to_neff": False}
    with parallel_model_trace(get_model, example, **options) as model:
        assert same(model)
        assert model(ids)[1].item() == 2
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(torch.randn_like(parameter))
        weights = plain.state_dict()
        assert {"embed.weight", "head.weight", "calls", "unread.bias"} <= weights.keys()
        assert model.manifest.layout["unread"] == ["unread.bias", "unread.weight"]
        assert not same(model)
        model.update_weights(weights)
        assert same(model)
        assert model(ids)[1].item() == 5  # states stay
        for name in ("embed.weight", "head.weight"):  # a checkpoint holds a tied weight under either name
            with torch.no_grad():
                plain.embed.weight.normal_()
            model.update_weights({key: value for key, value in plain.state_dict().items() if key != name})
            assert same(model)
        with pytest.raises(WeightSchemaError, match=r"missing: up\.weight"):
            model.update_weights({key: value for key, value in weights.items() if key != "up.weight"})
        parallel_model_save(model, tmp_path / "updated")
    with parallel_model_load(tmp_path / "updated", call_timeout=60, start_timeout=600) as model:
        assert same(model)
