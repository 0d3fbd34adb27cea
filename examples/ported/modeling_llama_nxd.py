"""Llama of transformers whose linear layers are replaced by parallel ones."""

from functools import partial

import torch
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.utils import divide
from torch import nn
from transformers.models.llama import modeling_llama as hf


def get_config(**kwargs):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = hf.LlamaConfig(**sizes, **heads, use_cache=False)
    config.sequence_parallel_enabled = kwargs.get("sequence_parallel_enabled", False)
    config.use_flash_attention = kwargs.get("use_flash_attention", False)
    config.kv_shared_group_size = kwargs.get("kv_shared_group_size", 1)
    config.fuse_qkv = kwargs.get("fuse_qkv", False)
    return config


def convert_from_hf(state_dict):
    """The names of this model: gate and up in one weight, q, k and v in one layer."""
    renamed = {}
    for name, weight in state_dict.items():
        if ".gate_proj." in name:
            up = state_dict[name.replace("gate_proj", "up_proj")]
            renamed[name.replace("gate_proj", "gate_up_proj")] = torch.cat([weight, up])
        elif any(f".{part}_proj." in name for part in "qkv"):
            prefix, part = name.removesuffix("_proj.weight").rsplit(".", 1)
            renamed[f"{prefix}.qkv_proj.weight_{part}"] = weight
        elif ".up_proj." not in name:
            renamed[name] = weight
    return renamed


def _init_normal(std, w):
    return nn.init.normal_(w, mean=0.0, std=std)


class LlamaRMSNorm(hf.LlamaRMSNorm):
    def __init__(self, hidden_size, eps=1e-6, sequence_parallel_enabled=False):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel_enabled = sequence_parallel_enabled


class LlamaMLP(hf.LlamaMLP):
    def __init__(self, config):
        nn.Module.__init__(self)
        init_method = partial(_init_normal, config.initializer_range)
        options = {"bias": False, "init_method": init_method}
        options["sequence_parallel_enabled"] = config.sequence_parallel_enabled
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, 2 * config.intermediate_size, stride=2, gather_output=False, **options
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, input_is_parallel=True, **options
        )
        self.act_fn = nn.SiLU()
        self.split_size = divide(config.intermediate_size, parallel_state.get_tensor_model_parallel_size())

    def forward(self, x):
        gate_proj, up_proj = self.gate_up_proj(x).split(self.split_size, dim=-1)
        return self.down_proj(self.act_fn(gate_proj) * up_proj)


class CoreAttention(nn.Module):
    """The part that activation checkpointing computes again."""

    def forward(self, query_states, key_states, value_states):
        scores = torch.matmul(query_states, key_states.transpose(2, 3)) / query_states.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype), value_states)


class LlamaAttention(hf.LlamaAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)
        self.config = config
        tp_size = parallel_state.get_tensor_model_parallel_size()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_heads = divide(config.num_attention_heads, tp_size)
        self.num_key_value_heads = divide(config.num_key_value_heads * config.kv_shared_group_size, tp_size)
        init_method = partial(_init_normal, config.initializer_range)
        options = {"bias": False, "init_method": init_method}
        options["sequence_parallel_enabled"] = config.sequence_parallel_enabled
        self.qkv_proj = GQAQKVColumnParallelLinear(
            config.hidden_size,
            [config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim],
            gather_output=False,
            kv_size_multiplier=config.kv_shared_group_size,
            fuse_qkv=config.fuse_qkv,
            **options,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim, config.hidden_size, input_is_parallel=True, **options
        )
        self.core_attn = CoreAttention()

    def forward(self, hidden_states, position_embeddings, **kwargs):
        states = self.qkv_proj(hidden_states)
        if self.config.sequence_parallel_enabled:  # [s, b, n d]
            states = [state.transpose(0, 1) for state in states]
        bsz, q_len, _ = states[0].shape
        query_states, key_states, value_states = (
            x.reshape(bsz, q_len, -1, self.head_dim).transpose(1, 2) for x in states
        )
        query_states, key_states = hf.apply_rotary_pos_emb(query_states, key_states, *position_embeddings)
        key_states = hf.repeat_kv(key_states, self.num_heads // self.num_key_value_heads)
        value_states = hf.repeat_kv(value_states, self.num_heads // self.num_key_value_heads)
        if self.config.use_flash_attention:
            transposed = (x.transpose(2, 3) for x in (query_states, key_states, value_states))
            attn_output = nki_flash_attn_func(*transposed)
        else:
            attn_output = self.core_attn(query_states, key_states, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        if self.config.sequence_parallel_enabled:
            attn_output = attn_output.transpose(0, 1)
        return self.o_proj(attn_output), None


class LlamaDecoderLayer(hf.LlamaDecoderLayer):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        norm = partial(LlamaRMSNorm, config.hidden_size, config.rms_norm_eps, config.sequence_parallel_enabled)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()


class LlamaModel(hf.LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        init_method = partial(_init_normal, config.initializer_range)
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, init_method=init_method
        )
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps, config.sequence_parallel_enabled)
        self.rotary_emb = hf.LlamaRotaryEmbedding(config=config)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        if self.config.sequence_parallel_enabled:
            hidden_states = hidden_states.transpose(0, 1).contiguous()
            hidden_states = mappings.scatter_to_sequence_parallel_region(hidden_states)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, position_embeddings=position_embeddings)
        return self.norm(hidden_states)


class LlamaForCausalLM(hf.LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=False,
            sequence_parallel_enabled=config.sequence_parallel_enabled,
            init_method=partial(_init_normal, config.initializer_range),
        )

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids))
        if self.config.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        if labels is None:
            return logits
        shift_logits = logits[:, :-1, :].contiguous()
        shift_labels = labels[:, 1:].contiguous()
        loss = parallel_cross_entropy(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1))
        return torch.mean(loss)
