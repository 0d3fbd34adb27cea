"""GGUF files as models: the numbers of transformers' own reading, and what is refused."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from nxd_infer.errors import CheckpointError, MissingPackageError, ModelConfigError, NxdError
from nxd_infer.hugging_face import gguf_file
from nxd_infer.recipes.job import begin_of
from nxd_infer.recipes.prepare import tokenizer_source
from nxd_infer.recipes.recipe import load
from nxd_infer.trace import load_artifact
from nxd_models import registry
from nxd_server.app.prepare import CONFIG, LocalSource, kind_of
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.support.e2e.command import here
from tests.support.models.helpers import prompts_of, relative_difference
from tests.support.tiny_models import write_tiny

IDS = torch.tensor(prompts_of([24, 24], 280))


pytestmark = pytest.mark.usefixtures("own_cache")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Rows that blocks of 32 divide."""
FACTORS = {Kind.Q4_K: slice(0, 4), Kind.Q5_K: slice(0, 4), Kind.Q6_K: slice(-2, None)}
"""Where the float16 factors of a block are."""
QUANTISED = (Kind.Q4_0, Kind.Q8_0, Kind.Q4_1, Kind.F16, Kind.F32)


def write_gguf(
    path: Path,
    kinds: tuple[Kind, ...] = QUANTISED,
    family: str = "llama",
    rope_factors: np.ndarray | None = None,
    **metadata: int | str,
) -> Path:
    """Write a tiny model as llama.cpp's converter does: matrices have ``kinds`` in turn; byte-level tokenizer and chat
    template come along. ``rope_factors`` divide the frequencies of the rotary positions, ``metadata`` are further
    numbers and texts, ``__`` for a dot. Return ``path``."""
    sizes = {**SIZES, "head_dim": 128} if family == "qwen3" else SIZES  # as transformers takes all of them to have
    source = write_tiny(family, path.parent / f"{path.stem}-source", **sizes)
    if kinds[0] in FACTORS:  # blocks of 256
        source = write_tiny(family, source, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), family)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, source, config)
    for name, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    for number, (name, tensor) in enumerate(sorted(load_arrays(source / "model.safetensors").items())):
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, heads if "q_proj" in name else kv_heads)
        kind = Kind.F32 if tensor.ndim == 1 else kinds[number % len(kinds)]
        data = _blocks(tensor.astype(np.float32), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32), raw_dtype=Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(tensor: np.ndarray, kind: Kind) -> np.ndarray:
    """Return a matrix in blocks of ``kind``; of a kind that only llama.cpp writes, random ones of small numbers."""
    if kind not in FACTORS:
        return gguf.quantize(tensor, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(tensor.size)
    found = draw.integers(0, 256, (tensor.size // elements, size), np.uint8)
    scales = (draw.random((len(found), 2)) * 1e-3).astype(np.float16).view(np.uint8)
    found[:, FACTORS[kind]] = scales[:, : found[:, FACTORS[kind]].shape[1]]
    return found.reshape(len(tensor), -1)


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of queries or keys as llama.cpp rotates them: pairs of neighbours, not halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict) -> None:
    model = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in model["added_tokens"]}
    ids = {**{token["content"]: token["id"] for token in model["added_tokens"]}, **model["model"]["vocab"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if number in special else normal for number in range(len(tokens))])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template((source / "chat_template.jinja").read_text())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_quantised_weights_are_those_of_transformers_in_bfloat16(tmp_path, family):
    file = write_gguf(tmp_path / "tiny.gguf", family=family)
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs = read(tmp_path, gguf_file=file.name, dtype=torch.bfloat16, **unpacked)
    for weight in theirs.parameters():
        weight.data = weight.float()
    found = registry.load_model(file, dtype=torch.float32)(IDS)
    assert relative_difference(found, theirs(IDS).logits) < 1e-5
    assert registry.load_config(file).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    "kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.BF16], ids=lambda kind: kind.name
)
def test_each_kind_has_the_values_of_the_gguf_package(tmp_path, kind):
    file = write_gguf(tmp_path / "kind.gguf", (kind,))
    found, tensors = load_file(gguf_file.model_directory(file) / "model.safetensors"), gguf.GGUFReader(file).tensors
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    assert len(found) == len(theirs)
    for name, weight in found.items():
        expected = theirs[names.get_name(name, (".weight", ".bias"))]
        if "q_proj" in name or "k_proj" in name:  # pairs of neighbours become halves of a head again
            heads = 4 if "q_proj" in name else 2
            expected = expected.reshape(heads, -1, 2, expected.shape[1]).swapaxes(1, 2).reshape(expected.shape)
        assert torch.equal(weight, torch.tensor(expected).bfloat16()), name


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, torch.float32), (Kind.F16, torch.float16)])
def test_plain_weights_stay_as_they_are(tmp_path, kind, dtype):
    directory = gguf_file.model_directory(write_gguf(tmp_path / "plain.gguf", (kind,)))
    source = load_file(tmp_path / "plain-source/model.safetensors")
    assert {name: tensor.dtype for name, tensor in load_file(directory / "model.safetensors").items()} == dict.fromkeys(
        source, dtype
    )
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(tensor, source[name].to(dtype)), name


def test_tokenizer_and_template_come_along_and_a_turn_ends_where_llama_cpp_ends_it(tmp_path):
    file = write_gguf(tmp_path / "chat.gguf", tokenizer__ggml__eot_token_id=4)
    directory, source = gguf_file.model_directory(file), tmp_path / "chat-source"
    text = "Hello, it's <|user|> 12 é"
    assert Tokenizer.from_dir(directory).encode(text) == Tokenizer.from_dir(source).encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    ours, theirs = ChatTemplate.from_dir(directory), ChatTemplate.from_dir(source)
    assert ours is not None and theirs is not None
    assert ours.render(messages) == theirs.render(messages)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 4]


def test_a_directory_stands_for_its_one_file_unless_it_has_safetensors(tmp_path):
    file = write_gguf(tmp_path / "a.gguf")
    assert gguf_file.find_gguf(tmp_path) == file
    assert kind_of(LocalSource(tmp_path)) == kind_of(LocalSource(file)) == CONFIG
    assert list(LocalSource(tmp_path).model_files()) == ["a.gguf"]
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(ModelConfigError, match=r"holds a\.gguf, b\.gguf: give the path of one"):
        registry.load_config(tmp_path)
    shutil.copy(tmp_path / "a-source/model.safetensors", tmp_path)
    assert gguf_file.model_directory(tmp_path) == tmp_path


def test_it_is_read_once_until_it_changes(tmp_path):
    file = write_gguf(tmp_path / "a.gguf")
    with ThreadPoolExecutor(3) as pool:  # at once
        first, *others = pool.map(gguf_file.model_directory, [file] * 3)
    assert set(others) == {first}
    made = first.stat().st_mtime_ns
    assert (gguf_file.model_directory(str(file)), first.stat().st_mtime_ns) == (first, made)
    assert first.name == "a", "which is what a server calls the model"
    os.utime(file, ns=(0, 0))
    assert gguf_file.model_directory(file) != first
    assert not list(first.parents[1].glob("tmp*")), "nothing half made stays"


def test_a_damaged_file_is_named(tmp_path):
    file = write_gguf(tmp_path / "whole.gguf")
    whole = file.read_bytes()
    endless = bytearray(whole)
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    endless[at : at + 8] = (1 << 60).to_bytes(8, "little")  # elements of the array
    for content in (b"", b"GGUF", whole[:100], whole[:5000], whole[:-1], b"PK" + whole, bytes(endless)):
        (damaged := tmp_path / "damaged.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"damaged\.gguf is damaged, or is not a GGUF file"):
            registry.load_config(damaged)
    with pytest.raises(ModelConfigError, match=r"nothing\.gguf is missing"):
        registry.load_config(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"split__count": 3}, r"is one of 3 parts: join them"),
        ({"llama__rope__scaling__type": "yarn"}, r"has rope\.scaling\.type = yarn, and transformers reads"),
    ],
)
def test_what_transformers_would_drop_is_refused(tmp_path, metadata, problem):
    with pytest.raises(ModelConfigError, match=problem):
        registry.load_config(write_gguf(tmp_path / "odd.gguf", **metadata))


def factors_as_llama_cpp_writes_them(factor: float, theta: float = 10000.0, head_dim: int = 16) -> np.ndarray:
    """Of a Llama 3 (``LlamaModel.generate_extra_tensors`` of its converter)."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / waves - 1) / (4 - 1), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


@torch.no_grad()
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_scaling_of_llama_3_is_found_in_its_factors(tmp_path, factor):
    file = write_gguf(tmp_path / "llama3.gguf", (Kind.F32,), rope_factors=factors_as_llama_cpp_writes_them(factor))
    source = tmp_path / "llama3-source"
    config = json.loads((source / "config.json").read_text())
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **frequencies}
    (source / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert relative_difference(registry.load_model(file, dtype=torch.float32)(IDS), expected(IDS).logits) < 1e-5
    assert registry.load_config(file).config.rope == registry.load_config(source).config.rope


def test_other_factors_are_refused(tmp_path):
    factors = factors_as_llama_cpp_writes_them(8.0)
    factors[3] *= 1.01
    with pytest.raises(ModelConfigError, match=r"has rope_freqs\.weight, and transformers reads"):
        registry.load_config(write_gguf(tmp_path / "odd.gguf", rope_factors=factors))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0wombat"[:-1], r"cannot read .* of the architecture 'womba'"),
        (b"blk.1.attn_q.weight", b"blk.7.attn_q.weight", r"lacks 1 weights of the model, the first is .*1.*q_proj"),
    ],
)
def test_another_architecture_and_a_weight_that_is_missing_are_named(tmp_path, old, new, problem):
    file = write_gguf(tmp_path / "odd.gguf")
    assert file.read_bytes().count(old) == 1
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(NxdError, match=problem):
        registry.load_config(file)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "PACKAGES", ("transformers", "gguf-of-nobody"))
    with pytest.raises(
        MissingPackageError, match=r"GGUF needs the package gguf-of-nobody: pip install 'nxd-infer\[hf\]'"
    ):
        registry.load_config(write_gguf(tmp_path / "a.gguf"))


@pytest.mark.smoke
def test_it_is_traced_verified_and_trained_like_any_model(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    sizes = ("--tp", 2, "--batch-sizes", 1, "--prompt-buckets", 16, "--max-len", 32, "--dtype", "float32")
    traced = here("trace", file, "--out", tmp_path / "artifact", "--backend", "eager", *sizes)
    assert traced.status == 0, traced.err
    assert load_artifact(tmp_path / "artifact").manifest.metadata["model_name"] == "tiny"
    verified = here("verify", tmp_path / "artifact", file)
    assert verified.status == 0, verified.out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"trainer: {{max_steps: 1}}\ndata: {{train_dir: {tmp_path}}}\nmodel: {{model_config: {file}}}\n"
        "model_alignment_strategy: {sft: {packing: true}}\n"
    )
    loaded, directory = load(recipe), gguf_file.model_directory(file)
    assert (begin_of(loaded).hugging_face, tokenizer_source(loaded)) == (directory, directory)
