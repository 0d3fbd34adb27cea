"""How tensor parallelism shards a decoder of the GPT-NeoX family."""

from __future__ import annotations

from nxd_infer.layout import AxisPlan
from nxd_models.gpt_neox.config import NeoXConfig
from nxd_models.spec import Cut


def tensor_parallel_plan(config: NeoXConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    # One weight has each head's query, key and value together.
    fused = AxisPlan.heads(config.num_heads, 3 * config.head_dim)
    heads = AxisPlan.heads(config.num_heads, config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.intermediate_size), AxisPlan.padded(config.vocab_size)
    return {
        "gpt_neox.embed_in": Cut(0, vocabulary),
        "gpt_neox.layers.*.attention.query_key_value": Cut(0, fused),
        "gpt_neox.layers.*.attention.dense": Cut(1, heads),
        "gpt_neox.layers.*.mlp.dense_h_to_4h": Cut(0, inner),
        "gpt_neox.layers.*.mlp.dense_4h_to_h": Cut(1, inner),
        "embed_out": Cut(0, vocabulary),
    }
