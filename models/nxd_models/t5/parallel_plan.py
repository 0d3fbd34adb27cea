"""How tensor parallelism shards a model of the T5 family."""

from __future__ import annotations

from nxd_infer.layout import AxisPlan
from nxd_models.spec import Cut
from nxd_models.t5.config import T5Config


def tensor_parallel_plan(config: T5Config, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    heads = AxisPlan.heads(config.num_heads, config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.inner_size), AxisPlan.padded(config.vocab_size)
    attentions = ("encoder.block.*.layer.*.SelfAttention", "decoder.block.*.layer.*.SelfAttention")
    attentions = (*attentions, "decoder.block.*.layer.*.EncDecAttention")
    forwards = tuple(f"{stack}.block.*.layer.*.DenseReluDense" for stack in ("encoder", "decoder"))
    wider = ("wi_0", "wi_1") if config.gated else ("wi",)
    return {
        "shared": Cut(0, vocabulary),
        **{f"{attention}.{name}": Cut(0, heads) for attention in attentions for name in "qkv"},
        **{f"{attention}.o": Cut(1, heads) for attention in attentions},
        **{
            f"{attention}.relative_attention_bias": Cut(1, AxisPlan.padded(config.num_heads))
            for attention in attentions[:2]
        },
        **{f"{forward}.{name}": Cut(0, inner) for forward in forwards for name in wider},
        **{f"{forward}.wo": Cut(1, inner) for forward in forwards},
        **({} if config.scaled else {"lm_head": Cut(0, vocabulary)}),
    }
