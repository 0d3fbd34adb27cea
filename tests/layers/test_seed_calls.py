"""Each call form that the API guide shows for layers, padding, losses, checkpoints and the QKV module runs as written.

"As written" is with the package's name replaced, and with these corrections of samples that are not valid Python or
refer to a name that is not there:

* ``pad_model(model, tp_degree=32, desired_config.num_heads)``: a positional argument follows a keyword. It is
  ``n_heads=desired_config.num_heads`` (three times), and ``tp_degree`` is the degree of the test.
* ``my_hook`` of the ``pad_hook_fn`` sample: the call of ``pad_model`` is indented into the hook's body, and the hook
  multiplies ``model.split_size`` where it is given ``attention_to_pad``.
* ``device=False`` in the signature of ``RowParallelLinear`` means None.
* ``output_size`` in the signature of ``GQAQKVColumnParallelLinear`` is ``output_sizes`` in its list of parameters; both
  are accepted.
"""

from __future__ import annotations

import importlib
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import init

import nxd_infer
from nxd_infer import parallel_layers
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import utils as neuronx_dist_utils
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.parallel_layers.pad import get_number_of_extra_heads, pad_model
from nxd_infer.parallel_layers.parallel_state import get_tensor_model_parallel_size
from tests.ranks import run_ranks

EMPTY = inspect.Parameter.empty

# Path, and the parameters in the guide's order with its defaults.
DOCUMENTED: dict[str, dict[str, object]] = {
    "parallel_layers.ParallelEmbedding": {
        "num_embeddings": EMPTY,
        "embedding_dim": EMPTY,
        "init_method": init.normal_,
        "dtype": torch.float32,
        "device": None,
    },
    "parallel_layers.ColumnParallelLinear": {
        "input_size": EMPTY,
        "output_size": EMPTY,
        "bias": True,
        "gather_output": True,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
    },
    "parallel_layers.RowParallelLinear": {
        "input_size": EMPTY,
        "output_size": EMPTY,
        "bias": True,
        "input_is_parallel": False,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
    },
    "parallel_layers.pad.pad_model": {
        "model": EMPTY,
        "tp_degree": EMPTY,
        "n_heads": EMPTY,
        "wrapped_classes": (),
        "pad_hook_fn": None,
    },
    "parallel_layers.loss_functions.parallel_cross_entropy": {
        "parallel_logits": EMPTY,
        "labels": EMPTY,
        "label_smoothing": 0.0,
    },
    "parallel_layers.save": {
        "state_dict": EMPTY,
        "save_dir": EMPTY,
        "save_serially": True,
        "save_xser": False,
        "down_cast_bf16": False,
    },
    "parallel_layers.load": {
        "load_dir": EMPTY,
        "model_or_optimizer": None,
        "model_key": "model",
        "load_xser": False,
        "sharded": True,
    },
    "modules.qkv_linear.GQAQKVColumnParallelLinear": {
        "input_size": EMPTY,
        "output_size": None,
        "bias": True,
        "gather_output": True,
        "sequence_parallel_enabled": False,
        "dtype": torch.float32,
        "device": None,
        "kv_size_multiplier": 1,
        "fuse_qkv": True,
    },
    "parallel_state.initialize_model_parallel": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    },
}


@pytest.mark.check
@pytest.mark.parametrize("path", DOCUMENTED)
def test_signatures(path: str):
    """The documented parameters come first, in the documented order, with the documented defaults."""
    found: object = nxd_infer
    for name in path.split("."):
        found = getattr(found, name)
    parameters = [p for p in inspect.signature(found).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name: p.default for p in parameters} == DOCUMENTED[path]
    assert [p.name for p in parameters] == list(DOCUMENTED[path])


def layer_calls() -> dict[str, tuple[int, ...]]:
    """The classes as the guide writes them: by position, by keyword, with every documented argument."""
    shapes = {}
    tokens, x = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 4, 8)
    for embedding in (
        parallel_layers.ParallelEmbedding(16, 8),
        parallel_layers.ParallelEmbedding(16, 8, init.normal_, torch.float32, None),
        parallel_layers.ParallelEmbedding(
            num_embeddings=16, embedding_dim=8, init_method=init.xavier_normal_, dtype=torch.float32, device="cpu"
        ),
    ):
        shapes["embedding"] = tuple(embedding(tokens).shape)
    for column in (
        parallel_layers.ColumnParallelLinear(8, 16),
        parallel_layers.ColumnParallelLinear(8, 16, True, True, False, torch.float32, torch.device("cpu")),
        parallel_layers.ColumnParallelLinear(
            input_size=8,
            output_size=16,
            bias=False,
            gather_output=True,
            sequence_parallel_enabled=False,
            dtype=torch.float32,
            device=None,
        ),
    ):
        shapes["column"] = tuple(column(x).shape)
    column = parallel_layers.ColumnParallelLinear(8, 16, gather_output=False)
    for row in (
        parallel_layers.RowParallelLinear(16, 8, True, True, False, torch.float32, False),
        parallel_layers.RowParallelLinear(
            input_size=16,
            output_size=8,
            bias=True,
            input_is_parallel=True,
            sequence_parallel_enabled=False,
            dtype=torch.float32,
            device=False,
        ),
    ):
        shapes["row"] = tuple(row(column(x)).shape)
    shapes["row of all"] = tuple(parallel_layers.RowParallelLinear(16, 8)(torch.ones(2, 16)).shape)
    size = get_tensor_model_parallel_size()
    up = parallel_layers.ColumnParallelLinear(8, 16, gather_output=False, sequence_parallel_enabled=True)
    down = parallel_layers.RowParallelLinear(16, 8, input_is_parallel=True, sequence_parallel_enabled=True)
    shapes["sequence"] = tuple(down(up(torch.ones(4 // size, 2, 8))).shape)
    loss = parallel_cross_entropy(
        torch.randn(2, 3, 16 // size), torch.ones(2, 3, dtype=torch.int64), label_smoothing=0.1
    )
    shapes["loss"] = tuple(loss.shape)
    return shapes


@pytest.mark.parametrize("tp", [1, 2])
def test_layers(tp: int):
    expected = {
        "embedding": (2, 2, 8),
        "column": (2, 4, 16),
        "row": (2, 4, 8),
        "row of all": (2, 8),
        "sequence": (4 // tp, 2, 8),
        "loss": (2, 3),
    }
    for shapes in run_ranks(layer_calls, 2) if tp == 2 else [layer_calls()]:
        assert shapes == expected


def qkv_calls() -> list[tuple[int, ...]]:
    x, shapes = torch.ones(2, 3, 8), []
    for qkv in (
        GQAQKVColumnParallelLinear(8, [16, 8]),
        GQAQKVColumnParallelLinear(8, [16, 8], True, True, False, torch.float32, None, 1, True),
        GQAQKVColumnParallelLinear(8, output_sizes=[16, 8], bias=True),
        GQAQKVColumnParallelLinear(
            input_size=8,
            output_size=[16, 8],
            bias=True,
            gather_output=False,
            sequence_parallel_enabled=False,
            init_method=init.normal_,
            dtype=torch.float32,
            device=torch.device("cpu"),
            kv_size_multiplier=2,
            fuse_qkv=False,
        ),
        GQAQKVColumnParallelLinear(8, 16, bias=False),
    ):
        q, k, v = qkv(x)
        assert k.shape == v.shape
        shapes.append((q.shape[-1], k.shape[-1]))
    return shapes


def test_qkv():
    """``bias=True``, the documented default, crashes the reference."""
    # With kv_size_multiplier=2 on two ranks each holds its half of the queries and all of the keys.
    assert run_ranks(qkv_calls, 2) == [[(16, 8), (16, 8), (16, 8), (8, 8), (16, 16)]] * 2


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


def test_checkpoints(tmp_path):
    run_ranks(checkpoint_calls, 2, str(tmp_path))


# --- pad_model: the guide's attention, modified as it says ----------------------------------------------------


class MyAttention(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.hidden // config.num_heads
        self.split_size = config.hidden
        self.qkv = nn.ModuleList(
            parallel_layers.ColumnParallelLinear(config.hidden, config.hidden, gather_output=False) for _ in range(3)
        )
        self.out = parallel_layers.RowParallelLinear(config.hidden, config.hidden, input_is_parallel=True)
        self.num_heads = neuronx_dist_utils.divide(
            self.num_heads + get_number_of_extra_heads(self.num_heads, get_tensor_model_parallel_size()),
            get_tensor_model_parallel_size(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for layer in self.qkv)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class MyModel(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.attention = MyAttention(config)
        self.mlp_up = parallel_layers.ColumnParallelLinear(config.hidden, 20, gather_output=False)
        self.mlp_down = parallel_layers.RowParallelLinear(20, config.hidden, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp_down(torch.relu(self.mlp_up(x)))


def get_model(config: SimpleNamespace) -> MyModel:
    torch.manual_seed(0)
    return MyModel(config)


def pad_calls() -> list[torch.Tensor]:
    desired_config = SimpleNamespace(hidden=12, num_heads=3)
    degree = get_tensor_model_parallel_size()
    torch.manual_seed(1)
    x, outputs = torch.randn(2, 5, 12), []

    model = get_model(config=desired_config)
    model = pad_model(model, tp_degree=degree, n_heads=desired_config.num_heads)
    outputs.append(model(x))

    model = get_model(config=desired_config)
    model = pad_model(model, tp_degree=degree, n_heads=desired_config.num_heads, wrapped_classes=[MyAttention])
    outputs.append(model(x))

    def my_hook(attention_to_pad, tgt_src_ratio):
        attention_to_pad.split_size = int(attention_to_pad.split_size * tgt_src_ratio)

    model = get_model(config=desired_config)
    model = pad_model(
        model,
        tp_degree=degree,
        n_heads=desired_config.num_heads,
        wrapped_classes=[MyAttention],
        pad_hook_fn=my_hook,
    )
    assert model.attention.split_size == 12 * (3 + get_number_of_extra_heads(3, degree)) // 3
    outputs.append(model(x))
    return [y.detach() for y in outputs]


def test_pad_model():
    """Three heads on two ranks; padding changes no result."""
    expected = pad_calls()[0]
    for outputs in run_ranks(pad_calls, 2):
        for y in outputs:
            assert (y - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.check
def test_module_paths():
    """The paths that the guide and ported code import from."""
    for path, names in {
        "parallel_layers": ["ParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear", "save", "load"],
        "parallel_layers.layers": ["BaseParallelLayer", "SPMDRank", "OutputChannelParallelConv2d"],
        "parallel_layers.mappings": [
            "copy_to_tensor_model_parallel_region",
            "gather_from_sequence_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "reduce_from_tensor_model_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
            "scatter_to_sequence_parallel_region",
            "scatter_to_tensor_model_parallel_region",
        ],
        "parallel_layers.pad": ["pad_model", "get_number_of_extra_heads"],
        "parallel_layers.parallel_state": ["get_tensor_model_parallel_size", "initialize_model_parallel"],
        "parallel_layers.utils": ["divide", "split_tensor_along_last_dim"],
        "parallel_layers.random": ["model_parallel_xla_manual_seed", "get_xla_rng_tracker"],
        "parallel_layers.checkpointing": ["save", "load"],
        "modules.qkv_linear": ["GQAQKVColumnParallelLinear"],
        "parallel_state": ["move_model_to_device", "get_tensor_model_parallel_group"],
    }.items():
        module = importlib.import_module(f"nxd_infer.{path}")
        for name in names:
            assert getattr(module, name) is not None
