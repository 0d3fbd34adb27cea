"""Layers, losses, norms, the QKV module and checkpoints of states, called as the documents write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import init

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed import parallel_layers
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)

from tests.support.seeds.degrees import alone, at_degree


def layer_calls() -> dict[str, set[tuple[int, ...]]]:
    """Shapes of the results of layers made by position and by keyword, with every documented argument."""
    tokens, x, f32 = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 4, 8), torch.float32
    by_name = {"sequence_parallel_enabled": False, "dtype": f32}
    embeddings = (
        parallel_layers.ParallelEmbedding(16, 8),
        parallel_layers.ParallelEmbedding(16, 8, init.normal_, f32, None),
        parallel_layers.ParallelEmbedding(
            num_embeddings=16, embedding_dim=8, init_method=init.xavier_normal_, dtype=f32, device="cpu"
        ),
    )
    columns = (
        parallel_layers.ColumnParallelLinear(8, 16),
        parallel_layers.ColumnParallelLinear(8, 16, True, True, False, f32, torch.device("cpu")),
        parallel_layers.ColumnParallelLinear(
            input_size=8, output_size=16, bias=False, gather_output=True, device=None, **by_name
        ),
    )
    rows = (
        parallel_layers.RowParallelLinear(16, 8, True, True, False, f32, False),
        parallel_layers.RowParallelLinear(
            input_size=16, output_size=8, bias=True, input_is_parallel=True, device=False, **by_name
        ),
    )
    column = parallel_layers.ColumnParallelLinear(8, 16, gather_output=False)
    up = parallel_layers.ColumnParallelLinear(8, 16, gather_output=False, sequence_parallel_enabled=True)
    down = parallel_layers.RowParallelLinear(16, 8, input_is_parallel=True, sequence_parallel_enabled=True)
    return {
        "embedding": {tuple(layer(tokens).shape) for layer in embeddings},
        "column": {tuple(layer(x).shape) for layer in columns},
        "row": {tuple(layer(column(x)).shape) for layer in rows},
        "row of all": {tuple(parallel_layers.RowParallelLinear(16, 8)(torch.ones(2, 16)).shape)},
        "sequence": {tuple(down(up(torch.ones(4 // get_tensor_model_parallel_size(), 2, 8))).shape)},
    }


def qkv_calls() -> list[tuple[int, ...]]:
    """``bias=True``, the documented default, crashes the reference."""
    x, shapes = torch.ones(2, 3, 8), []
    for qkv in (
        GQAQKVColumnParallelLinear(8, [16, 8]),
        GQAQKVColumnParallelLinear(8, [16, 8], True, True, False, torch.float32, None, 1, True),
        GQAQKVColumnParallelLinear(8, output_sizes=[16, 8], bias=True),
        GQAQKVColumnParallelLinear(
            input_size=8, output_size=[16, 8], bias=True, gather_output=False, sequence_parallel_enabled=False,
            init_method=init.normal_, dtype=torch.float32, device=torch.device("cpu"), kv_size_multiplier=2,
            fuse_qkv=False,
        ),
        GQAQKVColumnParallelLinear(8, 16, bias=False),
    ):  # fmt: skip
        q, k, v = qkv(x)
        assert k.shape == v.shape
        shapes.append((q.shape[-1], k.shape[-1]))
    return shapes


def loss_calls() -> tuple[list[float], list[float]]:
    """The losses of a rank's part of the logits, and of the whole ones as PyTorch computes them."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 16), torch.randint(16, (2, 3))
    part = logits.chunk(get_tensor_model_parallel_size(), -1)[get_tensor_model_parallel_rank()]
    found = [
        nxd.parallel_layers.loss_functions.parallel_cross_entropy(part.clone(), labels),
        parallel_cross_entropy(part.clone(), labels, label_smoothing=0.1),
    ]
    expected = [
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        for smoothing in (0.0, 0.1)
    ]
    return [float(loss.mean()) for loss in found], [float(loss) for loss in expected]


def clip_calls() -> list[float]:
    """The norm of the whole model's gradients, whatever part of them is here; then they are clipped to 1."""
    torch.manual_seed(0)
    model = nn.Sequential(
        parallel_layers.ColumnParallelLinear(8, 16, gather_output=False),
        parallel_layers.RowParallelLinear(16, 8, input_is_parallel=True),
    )
    (model(torch.arange(16.0).view(2, 8)) ** 2).sum().backward()
    norms = [
        nxd.parallel_layers.clip_grad_norm(model.parameters(), 1e9),
        nxd.parallel_layers.clip_grad_norm(parameters=model.parameters(), max_norm=1e9, norm_type=2),
        nxd.parallel_layers.clip_grad_norm(list(model.parameters()), 1e9, float("inf")),
        nxd.parallel_layers.clip_grad_norm(model[0].weight, 1e9),
        nxd.parallel_layers.clip_grad_norm(model.parameters(), max_norm=1.0),
        nxd.parallel_layers.clip_grad_norm(model.parameters(), 1e9),
    ]
    return [float(norm) for norm in norms]


def checkpoint_calls(folder: str) -> None:
    model = parallel_layers.ColumnParallelLinear(4, 8)
    expected = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    parallel_layers.save(state_dict, f"{folder}/plain", save_serially=True, save_xser=False, down_cast_bf16=False)
    parallel_layers.save(state_dict, f"{folder}/xser", save_xser=True)
    nn.init.zeros_(model.weight)
    state = parallel_layers.load(f"{folder}/plain", model_or_optimizer=model, model_key="model", sharded=True)
    assert state["epoch"] == 1 and torch.equal(model.weight, expected)
    nn.init.zeros_(model.weight)
    parallel_layers.load(f"{folder}/xser", model=model, load_xser=True)
    assert torch.equal(model.weight, expected)
    optimizer.param_groups[0]["lr"] = 1.0
    parallel_layers.load(f"{folder}/plain", optimizer, "optimizer", False)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert parallel_layers.load(f"{folder}/plain").keys() == state_dict.keys()
    # One file of the whole model, as torch.save writes it.
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    if get_tensor_model_parallel_rank() == 0:
        torch.save({"model": {"weight": whole, "bias": torch.zeros(8)}}, f"{folder}/whole.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    parallel_layers.load(f"{folder}/whole.pt", model_or_optimizer=model, sharded=False)
    part = whole.chunk(get_tensor_model_parallel_size())[get_tensor_model_parallel_rank()]
    assert torch.equal(model.weight, part)


def every_call(folder: str):
    checkpoint_calls(folder)
    return layer_calls(), qkv_calls(), loss_calls(), clip_calls()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_calls(tp: int, tmp_path: Path):
    whole_norms = alone(clip_calls)
    assert whole_norms[0] == whole_norms[1] == whole_norms[4] > max(whole_norms[2], whole_norms[3])
    assert whole_norms[5] == pytest.approx(1, rel=1e-4)
    for shapes, qkv, (losses, expected), norms in at_degree(tp, every_call, str(tmp_path)):
        assert shapes == {
            "embedding": {(2, 2, 8)},
            "column": {(2, 4, 16)},
            "row": {(2, 4, 8)},
            "row of all": {(2, 8)},
            "sequence": {(4 // tp, 2, 8)},
        }
        # Not gathered, a rank holds its share of the queries, and of the keys and their copies.
        assert qkv == [(16, 8), (16, 8), (16, 8), (16 // tp, 8 * 2 // tp), (16, 16)]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert norms == pytest.approx(whole_norms, rel=1e-5)
    folders = {f"tp_rank_{rank:02d}_pp_rank_00" for rank in range(tp)}
    assert folders <= {path.name for path in (tmp_path / "plain").iterdir()}
    assert folders | {f"{name}.tensors" for name in folders} <= {path.name for path in (tmp_path / "xser").iterdir()}
