"""llama.cpp through llama-cpp-python's low-level interface: one context, one sequence per row."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from bench.peers.protocol import serve

ROOM = 768
"""Positions per sequence: the longest prompt and its answer."""
PIECE = 512
"""Prompt tokens at once, which is llama.cpp's own default."""


class LlamaCpp:
    def __init__(self, model: str, threads: int, form: str = "BF16", folder: str | None = None):
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, None)
        path = gguf_of(Path(model), form, threads, folder)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads = threads
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._contexts: dict[int, Any] = {}

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        context = self._context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()

        def feed(part: list[tuple[int, int, int, bool]]) -> None:
            """Feed entries of (row, position, token, whether logits are needed)."""
            self._decode(context, part)
            for place, (row, _, _, wanted) in enumerate(part):
                if wanted:
                    logits = llama_cpp.llama_get_logits_ith(context, place)
                    tokens[row].append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
                    times[row].append(time.perf_counter() - begin)

        entries = [
            (row, position, token, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(entries), PIECE):
            feed(entries[start : start + PIECE])
        for number in range(new_tokens - 1):
            feed([(row, len(prompt) + number, tokens[row][-1], True) for row, prompt in enumerate(prompts)])
        return {"tokens": tokens, "times": times}

    def score(self, prompt: list[int]) -> list[float]:
        """Return the log-probability of each token of a prompt but the first."""
        context = self._context(1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        self._decode(context, [(0, position, token, True) for position, token in enumerate(prompt)])
        scores = []
        for place, token in enumerate(prompt[1:]):
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), (self.vocab,)).astype("f8")
            scores.append(float(logits[token] - np.logaddexp.reduce(logits)))
        return scores

    def _context(self, rows: int) -> Any:
        """Return a context for a number of sequences, cached."""
        if rows not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = rows * ROOM, PIECE, PIECE
            params.n_seq_max, params.n_threads, params.n_threads_batch = rows, self.threads, self.threads
            self._contexts[rows] = llama_cpp.llama_init_from_model(self.model, params)
            if not self._contexts[rows]:
                raise RuntimeError(f"llama.cpp makes no context for {rows} sequences")
        return self._contexts[rows]

    def _decode(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for place, (row, position, token, wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        status = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode ended with status {status}")


# --- the file it reads ------------------------------------------------------------------------------

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def gguf_of(model: Path, form: str, threads: int, folder: str | None = None) -> Path:
    """Return the file of a model (a directory, or a GGUF file of any form) with weights of ``form``, as llama.cpp names
    it (``Q4_K_M``), in ``folder`` or beside the model, after making it."""
    plain = form == "BF16" and model.is_dir()
    path = Path(folder or model.parent) / (f"{model.name}.gguf" if plain else f"{model.name}-{form}.gguf")
    weights = model / "model.safetensors" if model.is_dir() else model
    if path.exists() and path.stat().st_mtime >= weights.stat().st_mtime:
        return path
    if plain:
        write_gguf(model, path)
        return path
    part = path.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form}"), threads
    params.allow_requantize = model.is_file()
    source = model if model.is_file() else gguf_of(model, "BF16", threads)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {source} as {form}")
    part.replace(path)
    return path


def write_gguf(model: Path, out: Path) -> None:
    """Write the model as one GGUF file: bfloat16 matrices unchanged, norms in float32, no tokenizer."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, bits in stacked(read_bfloat16(model / "model.safetensors")).items():
        if name.endswith("q_proj.weight"):
            bits = interleaved_halves(bits, heads)
        elif name.endswith("k_proj.weight"):
            bits = interleaved_halves(bits, kv_heads)
        if bits.ndim == 1 or "block_sparse_moe.gate" in name:  # routers are in float32, too
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(out)


def gguf_name(name: str) -> str:
    if name in OUTSIDE:
        return f"{OUTSIDE[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the matrices of all experts of a layer."""
    found: dict[str, np.ndarray] = {}
    for name, bits in weights.items():
        head, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = bits
        elif rest.startswith("0."):
            count = next(i for i in itertools.count() if f"{head}.experts.{i}.{rest[2:]}" not in weights)
            found[f"{head}.experts.{rest[2:]}"] = np.stack(
                [weights[f"{head}.experts.{i}.{rest[2:]}"] for i in range(count)]
            )
    return found


def interleaved_halves(bits: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: Hugging Face rotates halves of a head, llama.cpp adjacent pairs."""
    rows, columns = bits.shape
    return bits.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_bfloat16(path: Path) -> dict[str, np.ndarray]:
    """Read a bfloat16 safetensors file as raw bits, because NumPy has no bfloat16."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert entry["dtype"] == "BF16" and end - begin == 2 * math.prod(entry["shape"])
            found[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return found


def main() -> None:
    serve(LlamaCpp)
