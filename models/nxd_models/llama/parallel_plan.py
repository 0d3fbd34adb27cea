"""How tensor parallelism shards a decoder of the Llama family."""

from __future__ import annotations

from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_models.llama.config import LlamaConfig
from nxd_models.spec import Cut


def tensor_parallel_plan(config: LlamaConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    heads = gqa_plan(config.num_heads, config.num_kv_heads, degree)
    queries, keys = heads.q_axis(config.head_dim), heads.kv_axis(config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.intermediate_size), AxisPlan.padded(config.vocab_size)
    return {
        "model.embed_tokens": Cut(0, vocabulary),
        "model.layers.*.self_attn.q_proj": Cut(0, queries),
        "model.layers.*.self_attn.k_proj": Cut(0, keys),
        "model.layers.*.self_attn.v_proj": Cut(0, keys),
        "model.layers.*.self_attn.o_proj": Cut(1, queries),
        "model.layers.*.mlp.gate_proj": Cut(0, inner),
        "model.layers.*.mlp.up_proj": Cut(0, inner),
        "model.layers.*.mlp.down_proj": Cut(1, inner),
        **({} if config.tied else {"lm_head": Cut(0, vocabulary)}),
    }
