"""A quantized model over ranks is the one of a single process: its shards, its results, its trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.backends.cpu.encodings import PACKED_STORED
from nxd_infer.context import current_context
from nxd_infer.layout.shard import shard_state_dict
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization.quantization_config import QuantizationType, QuantizedDtype
from nxd_infer.quantization.quantize import convert
from nxd_infer.util.dtypes import dtype_name
from tests.support.needs import needs_native
from tests.support.ranks import run_ranks

X = torch.linspace(-1, 1, 2 * 16).view(2, 16)
CONFIGS = [
    {"quantization_type": kind, "quantized_dtype": dtype, "quantization_per_channel_axis": axis}
    for kind, axis in ((QuantizationType.PER_TENSOR_SYMMETRIC, None), (QuantizationType.PER_CHANNEL_SYMMETRIC, 0),
                       (QuantizationType.PER_CHANNEL_SYMMETRIC, 1),
                       (QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC, 2))
    for dtype in (QuantizedDtype.INT8, QuantizedDtype.F8E4M3)
]  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, width: int = 16, inner: int = 26):
        super().__init__()
        torch.manual_seed(3)
        self.up = ColumnParallelLinear(width, 2 * inner, bias=False, gather_output=False, stride=2)
        self.down = RowParallelLinear(inner, width, input_is_parallel=True)
        self.head = ColumnParallelLinear(width, 7, pad=True)
        self.first = ExpertFusedColumnParallelLinear(3, width, 10, bias=True)
        self.last = ExpertFusedRowParallelLinear(3, 10, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(nn.functional.silu(gate) * up)
        return self.head(x + self.last(self.first(x.expand(3, *x.shape))).sum(0))


def on_rank(folder: Path) -> list[tuple[Tensor, Tensor, list[str]]]:
    """For each configuration what the model gives that each rank makes of its own float shards, and that of the whole
    checkpoint; and where the two differ (but for scales of padding, which multiply zeros)."""
    found = []
    for number, config in enumerate(CONFIGS):
        made, loaded = convert(Mlp(), config), convert(Mlp(), config)
        here = current_context().axis("tp")
        state = shard_state_dict(loaded, load_file(folder / str(number)), here.rank, here.degree)
        loaded.load_state_dict(state)
        own = made.state_dict()
        different = [name for name in state if not torch.equal(own[name].float(), state[name].float())]
        found.append((made(X), loaded(X), [name for name in different if name != "head.scale"]))
    return found


def test_two_ranks_hold_the_shards_of_what_one_process_quantizes(tmp_path):
    expected = [checkpoint(tmp_path / str(number), config) for number, config in enumerate(CONFIGS)]
    for found in run_ranks(on_rank, 2, tmp_path):
        for (made, loaded, different), wanted in zip(found, expected, strict=True):
            assert different == []
            torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(loaded, wanted, rtol=1e-5, atol=1e-6)


def checkpoint(path: Path, config: dict) -> Tensor:
    whole = convert(Mlp(), config)
    save_file(whole.state_dict(), path)
    return whole(X).detach()


@pytest.mark.parametrize(
    "config", [pytest.param(CONFIGS[2], marks=pytest.mark.smoke), CONFIGS[3]], ids=["int8", "float8"]
)
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


class TwoLinears(nn.Module):
    """Two layers that read one input, one with a scale for the whole weight; and one weight in use elsewhere, too."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = (ColumnParallelLinear(16, 33, bias=bias, dtype=dtype) for bias in (True, False, False))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) + self.c(x) + self.c._matrix().sum()


def two_linears(dtype: torch.dtype) -> nn.Module:
    model = TwoLinears(dtype)
    model.b = convert(model.b, CONFIGS[0])
    return convert(model, CONFIGS[2])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_reads_int8_weights_as_they_are(tmp_path, dtype):
    """Packed, also after new weights (with -128, which this package itself does not make) and made again."""
    eager = two_linears(dtype)
    x, limit = X.to(dtype), {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.06}
    state = eager.state_dict()
    new = {**state, "a.weight": torch.arange(-128, -128 + 33 * 16).view(33, 16).clamp(max=127).to(torch.int8)}
    options, packed = {"nxd_packed": 1}, {"a.weight": PACKED_STORED, "b.weight": PACKED_STORED}
    arguments = {"checkpoint_loader_callable": lambda: state, "inline_weights_to_neff": False}
    with nxd.trace.parallel_model_trace(
        lambda: (two_linears(dtype), {}), x, backend="cpu", compiler_args=options, **arguments
    ) as model:
        assert {spec.name: spec.encoding for spec in model.manifest.weights if spec.encoding} == packed
        torch.testing.assert_close(model(x), eager(x).detach(), **limit)
        model.update_weights(new)
        eager.load_state_dict(new)
        torch.testing.assert_close(model(x), eager(x).detach(), **limit)
        nxd.trace.parallel_model_save(model, tmp_path / "saved")
    nxd.trace.parallel_model_recompile(tmp_path / "saved", tmp_path / "again", backend="cpu", compiler_args=options)
    with nxd.trace.parallel_model_load(tmp_path / "again") as again:
        assert {spec.name: spec.encoding for spec in again.manifest.weights if spec.encoding} == packed
        torch.testing.assert_close(again(x), eager(x).detach(), **limit)
