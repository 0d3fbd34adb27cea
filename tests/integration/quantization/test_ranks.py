"""A quantized model over ranks is the one of a single process: its shards, its results, its trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.context import current_context
from nxd_infer.layout.shard import shard_state_dict
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization.quantization_config import QuantizationType, QuantizedDtype
from nxd_infer.quantization.quantize import convert
from nxd_infer.util.dtypes import dtype_name
from tests.support.ranks import run_ranks

X = torch.linspace(-1, 1, 2 * 16).view(2, 16)
CONFIGS = [
    {"quantization_type": kind, "quantized_dtype": dtype, "quantization_per_channel_axis": axis}
    for kind, axis in ((QuantizationType.PER_TENSOR_SYMMETRIC, None), (QuantizationType.PER_CHANNEL_SYMMETRIC, 0),
                       (QuantizationType.PER_CHANNEL_SYMMETRIC, 1))
    for dtype in (QuantizedDtype.INT8, QuantizedDtype.F8E4M3)
]  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, width: int = 16, inner: int = 26):
        super().__init__()
        torch.manual_seed(3)
        self.up = ColumnParallelLinear(width, 2 * inner, bias=False, gather_output=False, stride=2)
        self.down = RowParallelLinear(inner, width, input_is_parallel=True)
        self.head = ColumnParallelLinear(width, 7, pad=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.head(x + self.down(nn.functional.silu(gate) * up))


def on_rank(config: dict, path: Path) -> tuple[Tensor, Tensor, list[str]]:
    """What the model gives that each rank makes of its own float shards, and that of the whole checkpoint; and where
    the two differ (but for scales of padding, which multiply zeros)."""
    made, loaded = convert(Mlp(), config), convert(Mlp(), config)
    here = current_context().axis("tp")
    state = shard_state_dict(loaded, load_file(path), here.rank, here.degree)
    loaded.load_state_dict(state)
    own = made.state_dict()
    different = [name for name in state if not torch.equal(own[name].float(), state[name].float())]
    return made(X), loaded(X), [name for name in different if name != "head.scale"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c['quantization_type'].name}-{c['quantized_dtype'].name}")
def test_two_ranks_hold_the_shards_of_what_one_process_quantizes(tmp_path, config):
    expected = checkpoint(tmp_path / "whole", config)
    for made, loaded, different in run_ranks(on_rank, 2, config, tmp_path / "whole"):
        assert different == []
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-6)


def checkpoint(path: Path, config: dict) -> Tensor:
    whole = convert(Mlp(), config)
    save_file(whole.state_dict(), path)
    return whole(X).detach()


@pytest.mark.smoke
@pytest.mark.parametrize("config", [CONFIGS[2], CONFIGS[3]], ids=["int8", "float8"])
def test_a_quantized_model_is_traced_and_its_weights_stay_small(tmp_path, config):
    path = tmp_path / "model.safetensors"
    expected = checkpoint(path, config)

    def build():
        return convert(Mlp(), config, inplace=True), {}

    with nxd.trace.parallel_model_trace(
        build, X, tp_degree=2, checkpoint_loader_callable=lambda: load_file(path), inline_weights_to_neff=False
    ) as model:
        torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-6)
        stored = {spec.name: spec.dtype for spec in model.manifest.weights}
        assert stored["up.weight"] == dtype_name(config["quantized_dtype"].value)
        nxd.trace.parallel_model_save(model, tmp_path / "saved")
    with nxd.trace.parallel_model_load(tmp_path / "saved") as loaded:
        torch.testing.assert_close(loaded(X), expected, rtol=1e-5, atol=1e-6)
