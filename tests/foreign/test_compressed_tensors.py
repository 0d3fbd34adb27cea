"""Directories that compressed-tensors writes, as llm-compressor calls it, have the values that it decompresses."""

import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor, decompress_module
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

from nxd_infer.hugging_face.weights import weights
from tests.support.tiny_models import write_tiny


def scales_of(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """What an observer of the smallest and largest weights finds."""
    if args.strategy == "block":
        rows, columns = args.block_structure
        pieces = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
        return calculate_qparams(pieces.amin(-1), pieces.amax(-1), args)
    size = {"tensor": weight.numel(), "channel": weight.shape[1]}.get(args.strategy, args.group_size)
    pieces = weight.reshape(-1, size) if args.strategy == "tensor" else weight.unflatten(1, (-1, size))
    return calculate_qparams(pieces.amin(-1), pieces.amax(-1), args)


def scheme(preset: str, targets: list[str], **changes):
    found = preset_name_to_scheme(preset, targets)
    for name, value in changes.items():
        setattr(found.weights, name, value)
    return found


LINEAR = ["Linear"]
SCHEMES = {
    "W4A16": {"a": scheme("W4A16", LINEAR, group_size=32)},
    "W4A16_ASYM": {"a": scheme("W4A16_ASYM", LINEAR)},
    "W8A16": {"a": scheme("W8A16", LINEAR, group_size=64)},
    "W8A8": {"a": scheme("W8A8", LINEAR)},
    "FP8": {"a": scheme("FP8", LINEAR)},
    "FP8_DYNAMIC": {"a": scheme("FP8_DYNAMIC", LINEAR)},
    "FP8_BLOCK": {"a": scheme("FP8_BLOCK", LINEAR, block_structure=[32, 64])},
    "several": {
        "a": scheme("W4A16", ["re:.*self_attn.*"], group_size=32),
        "b": scheme("W8A8", LINEAR),
        "c": scheme("FP8_DYNAMIC", ["model.layers.1.self_attn.k_proj", "re:.*down_proj"]),
    },
}


def compressed(tmp_path, groups, ignore):
    """Write ``tmp_path / "model"``, bfloat16; return the model, compressed in memory."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = write_tiny("llama", tmp_path / "source", **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            scale, zero = scales_of(module.weight, found.weights)
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "model")
    compressor.update_config(tmp_path / "model")
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_every_weight_is_what_it_decompresses(tmp_path, name):
    model = compressed(tmp_path, SCHEMES[name], ["lm_head", "model.layers.0.mlp.up_proj"])
    for module in model.modules():
        decompress_module(module)
    found, theirs = weights(tmp_path / "model"), dict(model.named_parameters())
    own = [key for key in theirs if key.endswith((".weight", ".bias"))]
    assert set(found.keys()) == set(own)
    for key in own:
        assert torch.equal(found.read(key), theirs[key]), key
        if theirs[key].ndim == 2:
            assert torch.equal(found.read(key, (slice(5, 77), slice(33, 90))), theirs[key][5:77, 33:90]), key
