"""A causal language model for inference: configuration, model with a key/value cache, wrapper for each of its two
submodels, and an application that compiles, loads and generates.

python -m nxd_infer.compat inference_demo.py --tp-degree 2 --compiled-model-path ./compiled --prompt "A river "
"""

import argparse
import json
import os
from types import SimpleNamespace

import torch
from neuronx_distributed.operators.argmax import argmax
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.utils import divide
from neuronx_distributed.trace.model_builder import BaseModelInstance, ModelBuilder
from neuronx_distributed.utils import cpu_mode
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

CONTEXT_ENCODING_MODEL_TAG, TOKEN_GENERATION_MODEL_TAG = "context_encoding_model", "token_generation_model"
COMPILED_MODEL_FILE_NAME, CONFIG_FILE = "model.pt", "neuron_config.json"


class InferenceConfig(SimpleNamespace):
    """Fields of the model's own configuration and ``neuron_config``'s."""

    def save(self, path):
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, CONFIG_FILE), "w") as file:
            json.dump(vars(self), file)

    @classmethod
    def load(cls, path):
        with open(os.path.join(path, CONFIG_FILE)) as file:
            return cls(**json.load(file))


class NeuronLlamaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        tp_degree = parallel_state.get_tensor_model_parallel_size()
        hidden, self.head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.num_heads = divide(config.num_attention_heads, tp_degree)
        self.num_key_value_heads = divide(config.num_key_value_heads, tp_degree)
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = ColumnParallelLinear(hidden, hidden, bias=False, gather_output=False)
        self.k_proj = ColumnParallelLinear(hidden, kv_size, bias=False, gather_output=False)
        self.v_proj = ColumnParallelLinear(hidden, kv_size, bias=False, gather_output=False)
        self.o_proj = RowParallelLinear(hidden, hidden, bias=False, input_is_parallel=True)

    def forward(self, hidden_states, position_ids, cos_sin, past_key, past_value):
        bsz, q_len, _ = hidden_states.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2) for f in projections)
        q, k = apply_rotary_pos_emb(q, k, *cos_sin)
        places = position_ids[:, None, :, None].expand_as(k)
        past_key, past_value = past_key.scatter(2, places, k), past_value.scatter(2, places, v)
        groups = self.num_heads // self.num_key_value_heads
        keys, values = repeat_kv(past_key, groups), repeat_kv(past_value, groups)
        seen = torch.arange(keys.shape[2]) <= position_ids[:, None, :, None]
        output = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.o_proj(output.transpose(1, 2).reshape(bsz, q_len, -1)), past_key, past_value


class NeuronLlamaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.self_attn = NeuronLlamaAttention(config)
        self.input_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.gate_proj = ColumnParallelLinear(hidden, inner, bias=False, gather_output=False)
        self.up_proj = ColumnParallelLinear(hidden, inner, bias=False, gather_output=False)
        self.down_proj = RowParallelLinear(inner, hidden, bias=False, input_is_parallel=True)

    def forward(self, hidden_states, *args):
        attention, *cache = self.self_attn(self.input_layernorm(hidden_states), *args)
        hidden_states = hidden_states + attention
        x = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), cache


class NeuronLlamaModel(nn.Module):
    """``input_ids`` [b, n], ``position_ids`` [b, n], ``last`` [b]: the next token [b], then the cache's next values."""

    def __init__(self, config):
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = ParallelEmbedding(config.vocab_size, hidden, None, shard_across_embedding=True)
        self.layers = nn.ModuleList([NeuronLlamaLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(hidden, config.vocab_size, bias=False, gather_output=False)
        self.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(**config.hf_config))
        tp_degree = parallel_state.get_tensor_model_parallel_size()
        head_dim, kv_heads = hidden // config.num_attention_heads, divide(config.num_key_value_heads, tp_degree)
        shape = (config.batch_size, kv_heads, config.seq_len, head_dim)
        self.make_caches([torch.zeros(shape) for _ in range(2 * config.num_hidden_layers)])

    def make_caches(self, zeros):
        self.past_key_values = nn.ParameterList([nn.Parameter(cache, requires_grad=False) for cache in zeros])

    def caches(self):
        return list(self.past_key_values)

    def forward(self, input_ids, position_ids, last):
        hidden_states, pasts, caches = self.embed_tokens(input_ids), self.caches(), []
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for number, layer in enumerate(self.layers):
            hidden_states, cache = layer(hidden_states, position_ids, cos_sin, *pasts[2 * number : 2 * number + 2])
            caches += cache
        index = last[:, None, None].expand(-1, 1, hidden_states.shape[2])
        logits = self.lm_head(self.norm(hidden_states.gather(1, index)))
        return [argmax(logits, dim=2, gather_dim=2, keepdim=False).squeeze(1), *caches]


class DecoderModelInstance(BaseModelInstance):
    def __init__(self, model_cls, config):
        self.model_cls, self.config = model_cls, config
        self.module, self.input_output_aliases = None, {}

    def load_module(self):
        self.module = self.model_cls(self.config).eval()

    def get(self, bucket_rank, **kwargs):
        self.input_output_aliases = {cache: 1 + i for i, cache in enumerate(self.module.caches())}
        return self.module, self.input_output_aliases


class ModelWrapper(nn.Module):
    """One submodel: its buckets, and how a call is padded to one of them."""

    def __init__(self, config, model_cls, tag, buckets):
        super().__init__()
        self.config, self.model_cls, self.tag, self.buckets, self.model = config, model_cls, tag, buckets, None

    def input_generator(self):
        bsz = self.config.batch_size
        return [
            (
                torch.zeros(bsz, n, dtype=torch.long),
                torch.zeros(bsz, n, dtype=torch.long),
                torch.zeros(bsz, dtype=torch.long),
            )
            for n in self.buckets
        ]

    def get_model_instance(self):
        return DecoderModelInstance(self.model_cls, self.config)

    def forward(self, input_ids, position_ids, last):
        bucket = next((n for n in self.buckets if n >= input_ids.shape[1]), None)
        if bucket is None:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than {self.buckets[-1]}, the largest of {self.tag}")
        pad = (0, bucket - input_ids.shape[1])
        # Padding is written where the next tokens will be, and overwritten by them.
        positions = torch.arange(bucket)[None].expand(len(input_ids), -1) if pad[1] else position_ids
        return self.model.nxd_model.forward(nn.functional.pad(input_ids, pad), positions.contiguous(), last)


class NeuronApplicationBase(nn.Module):
    _model_cls = None

    def __init__(self, model_path, config=None):
        super().__init__()
        self.model_path, self.config = model_path, config or InferenceConfig.load(model_path)
        self.models, self.traced_model = [], None

    def get_builder(self):
        builder = ModelBuilder(
            router=None,
            tp_degree=self.config.tp_degree,
            start_rank_id=0,
            local_ranks_size=self.config.tp_degree,
            checkpoint_loader=self.checkpoint_loader_fn,
            compiler_workdir=None,
            debug=False,
            logical_nc_config=1,
        )
        for model in self.models:
            builder.add(
                key=model.tag,
                model_instance=model.get_model_instance(),
                example_inputs=model.input_generator(),
                compiler_args="--enable-saturate-infinity --auto-cast=none --model-type=transformer -O1",
                priority_model_idx=0 if model.tag == TOKEN_GENERATION_MODEL_TAG else None,
            )
        return builder

    def checkpoint_loader_fn(self):
        return self.convert_hf_to_neuron_state_dict(load_file(os.path.join(self.model_path, "model.safetensors")))

    def compile(self, compiled_model_path):
        self.config.save(compiled_model_path)
        builder = self.get_builder()
        traced_model = builder.trace(initialize_model_weights=False)
        torch.jit.save(traced_model, os.path.join(compiled_model_path, COMPILED_MODEL_FILE_NAME))
        builder.shard_checkpoint(serialize_path=os.path.join(compiled_model_path, "weights"))

    def load(self, compiled_model_path, start_rank_id=0):
        self.traced_model = torch.jit.load(os.path.join(compiled_model_path, COMPILED_MODEL_FILE_NAME))
        name = os.path.join(compiled_model_path, "weights", "tp{}_sharded_checkpoint.safetensors")
        weights = [load_file(name.format(rank)) for rank in range(self.config.tp_degree)]
        self.traced_model.nxd_model.initialize(weights, torch.tensor([start_rank_id], dtype=torch.int32))
        for model in self.models:
            model.model = self.traced_model


class NeuronLlamaForCausalLM(NeuronApplicationBase):
    _model_cls = NeuronLlamaModel

    def __init__(self, model_path, config=None):
        super().__init__(model_path, config)
        context, generation = CONTEXT_ENCODING_MODEL_TAG, TOKEN_GENERATION_MODEL_TAG
        self.context_encoding = ModelWrapper(self.config, self._model_cls, context, self.config.context_buckets)
        self.token_generation = ModelWrapper(self.config, self._model_cls, generation, [1])
        self.models = [self.context_encoding, self.token_generation]

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict):
        return {name.removeprefix("model.").replace(".mlp.", "."): weight for name, weight in state_dict.items()}

    def generate(self, input_ids, max_new_tokens):
        length = input_ids.shape[1]
        positions = torch.arange(length)[None].expand(len(input_ids), -1)
        tokens = [self.context_encoding(input_ids, positions, torch.full((len(input_ids),), length - 1))]
        for position in range(length, length + max_new_tokens - 1):
            place = torch.full((len(input_ids), 1), position)
            tokens.append(
                self.token_generation(tokens[-1][:, None], place, torch.zeros(len(input_ids), dtype=torch.long))
            )
        return torch.stack(tokens, dim=1)


def get_config(args):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    hf_config = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    neuron_config = {"batch_size": args.batch_size, "seq_len": args.seq_len, "tp_degree": args.tp_degree}
    context = {"context_buckets": [16, 40], "rms_norm_eps": 1e-6, "hf_config": hf_config}
    return InferenceConfig(**hf_config, **neuron_config, **context)


def add_arguments(parser):
    parser.add_argument("--model-path", default="./llama")
    parser.add_argument("--compiled-model-path", default="./compiled")
    parser.add_argument("--tp-degree", "--tp", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--prompt", default="It takes from the banks, a grain at ")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=12349)
    return parser


def main(args):
    config = get_config(args)
    os.makedirs(args.model_path, exist_ok=True)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(**config.hf_config))
    save_file(model.state_dict(), os.path.join(args.model_path, "model.safetensors"))
    assert cpu_mode() or not args.on_cpu
    NeuronLlamaForCausalLM(args.model_path, config).compile(args.compiled_model_path)

    application = NeuronLlamaForCausalLM(args.model_path, InferenceConfig.load(args.compiled_model_path))
    application.load(args.compiled_model_path)
    input_ids = torch.tensor([list(args.prompt.encode())]).repeat(args.batch_size, 1)
    tokens = application.generate(input_ids, args.max_new_tokens)
    print("tokens " + " ".join(map(str, tokens.flatten().tolist())), flush=True)


if __name__ == "__main__":
    main(add_arguments(argparse.ArgumentParser()).parse_args())
