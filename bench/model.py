"""The models of the benchmarks: seeded random Llamas and Mixtrals with a tokenizer, in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.options import Options, home
from nxd_infer.cli.demo.corpus import documents
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.recipes.tokenizers import train_tokenizer

COMMON: dict[str, int] = {
    "hidden": 1024,
    "layers": 16,
    "heads": 16,
    "kv_heads": 8,
    "intermediate": 2816,
    "vocab": 32000,
    "max_len": 4096,
    "seed": 1234,
}
"""254.3 M parameters; a decode step reads 443.1 MB (all but the embedding), and 32 KiB of cache per token."""
TINY = COMMON | {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 2048}


DRAFT = {"hidden": 512, "layers": 2, "heads": 8, "kv_heads": 4, "intermediate": 1408}
"""Of a model that guesses for another one: a decode step reads 45 MB."""
MIXTURE = COMMON | {"intermediate": 1152, "experts": 16, "chosen": 4}
"""1.02 B parameters, of which a token uses 0.31 B besides its row of the embedding."""
MODELS = {"common": COMMON, "tiny": TINY, "mixture": MIXTURE, "tiny-mixture": TINY | {"experts": 8, "chosen": 2}}
MODELS |= {"common-draft": COMMON | DRAFT, "tiny-draft": TINY | {"hidden": 64, "layers": 1, "intermediate": 128}}


def stamped(path: Path, key: str, make: Callable[[Path], Any]) -> Path:
    """Return ``path`` as built by ``make``; rebuild it if ``key``, a digest of its inputs, has changed."""
    stamp = path.with_name(path.name + ".stamp")
    if not (path.exists() and stamp.is_file() and stamp.read_text() == key):
        stamp.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        stamp.write_text(key)
    return path


def bench_model(options: Options) -> Path:
    """Return the directory of the model that ``options`` names, after creating it if needed."""
    sizes = MODELS[options.model]
    key = hashlib.sha256(Path(__file__).read_bytes() + repr(sizes).encode()).hexdigest()
    return stamped(home() / "models" / options.model, key, lambda path: write_llama(path, **sizes))


def prompts(model: Path, batch: int, length: int, seed: int) -> list[list[int]]:
    """Return ``batch`` different prompts of ``length`` token ids, determined by the seed."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    generator = random.Random(f"{batch} {length} {seed}")
    return [[generator.randrange(3, vocab) for _ in range(length)] for _ in range(batch)]


def bytes_per_step(model: Path) -> int:
    """Return the bytes of weights that a decode step of one row reads: everything but the embedding's other rows, and
    the experts that it does not choose."""
    config = json.loads((model / "config.json").read_text())
    share = config.get("num_experts_per_tok", 1) / config.get("num_local_experts", 1)
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return round(
        sum(
            2 * math.prod(entry["shape"]) * (share if ".experts." in name else 1)
            for name, entry in header.items()
            if "embed_tokens" not in name
        )
    )


def cache_bytes_per_token(model: Path) -> int:
    """Return the bytes of keys and values per position, over all layers."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def texts(vocab: int) -> list[str]:
    """Return texts to train a tokenizer of ``vocab`` tokens: Python's standard library has enough words."""
    if vocab <= 8192:
        return documents()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    return [path.read_text(errors="ignore") for path in sources if "site-packages" not in path.parts][:1500]


def write_llama(
    directory: Path,
    hidden: int = 512,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    intermediate: int = 1408,
    vocab: int = 8192,
    max_len: int = 1024,
    seed: int = 0,
    experts: int = 0,
    chosen: int = 0,
) -> Path:
    """Write config.json, model.safetensors (bfloat16) and the tokenizer; return ``directory``. With ``experts``, of
    which a token has ``chosen``, it is a Mixtral."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(directory, texts(vocab), vocab)
    head_dim = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": experts, "num_experts_per_tok": chosen}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{block}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{block}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, heads * head_dim),
        }
        mlp = {
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
        }
        if experts:
            block = f"{block}.block_sparse_moe"
            shapes[f"{block}.gate.weight"] = (experts, hidden)
            for expert in range(experts):
                for name, shape in zip(("w1", "w3", "w2"), mlp.values(), strict=True):
                    shapes[f"{block}.experts.{expert}.{name}.weight"] = shape
        else:
            shapes |= {f"{block}.mlp.{name}.weight": shape for name, shape in mlp.items()}
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str) -> torch.Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    entries = [(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    with (directory / "model.safetensors").open("wb") as file:
        write_safetensors(file, entries, tensor, {"format": "pt"})  # at most one tensor in memory
    return directory
