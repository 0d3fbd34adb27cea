"""Experts in checkpoints: each expert's matrices apart, as files usually have them, or all in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import WeightMismatchError
from nxd_infer.hugging_face.weights import StoredSource, named_weights
from nxd_infer.layout.sources import DictSource
from nxd_models import registry
from tests.support.tiny_models import MIXTURES, write_tiny


def joined(path: Path) -> Path:
    """The same directory with transformers 5's own names."""
    module = registry.load_model(path)
    other = path.with_name(path.name + "-joined")
    other.mkdir()
    (other / "config.json").write_text((path / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, other / "model.safetensors")
    return other


@pytest.mark.parametrize("family", MIXTURES)
def test_both_forms_are_read_and_the_usual_one_is_written(tmp_path: Path, family: str) -> None:
    path = write_tiny(family, tmp_path / family, intermediate_size=21)
    files, other = load_file(path / "model.safetensors"), joined(path)
    directory = registry.load_config(path)
    for degree in (1, 2, 4):
        for rank in range(degree):
            with use_context(make_context(degree, rank, tp=degree)):
                one, two = registry.load_model(path), registry.load_model(other)
                inner = directory.config.mixture.intermediate_size  # pyright: ignore
                assert one.get_parameter("model.layers.0.mlp.experts.down_proj").shape == (6, 32, -(-inner // degree))
            assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    whole = registry.load_model(other)
    w1 = next(name for name in files if ".experts.3." in name)
    assert torch.equal(whole.get_parameter("model.layers.0.mlp.experts.down_proj")[3], files[w1.replace("w1", "w2")])
    written = StoredSource(DictSource(whole.state_dict()), directory.spec.stored_weights)
    assert set(written.keys()) == set(files)
    assert all(torch.equal(written.read(name), tensor) for name, tensor in files.items())
    assert all(written.shape(name) == tensor.shape for name, tensor in files.items())
    assert all(written.dtype(name) == tensor.dtype for name, tensor in files.items())


@pytest.mark.parametrize("family", MIXTURES)
def test_slices_are_those_of_the_whole(tmp_path: Path, family: str) -> None:
    path = write_tiny(family, tmp_path)
    module = registry.load_model(path)
    named = named_weights(module, registry.weights(path))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = module.get_parameter(name)
    rows = whole.shape[1]
    for experts in (slice(0, 1), slice(2, 6), slice(None)):
        for part in (slice(0, 5), slice(rows // 2 - 3, rows // 2 + 2), slice(rows // 2, rows), slice(None)):
            assert torch.equal(named.read(name, [experts, part, slice(3, 30)]), whole[experts, part, 3:30])


def test_a_missing_expert_is_told(tmp_path: Path) -> None:
    path = write_tiny("mixtral", tmp_path)
    files = load_file(path / "model.safetensors")
    gone = "model.layers.1.block_sparse_moe.experts.5.w1.weight"
    save_file({name: tensor for name, tensor in files.items() if name != gone}, path / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*5"):
        registry.load_model(path)
