"""How tensor parallelism shards an encoder of the BERT family."""

from __future__ import annotations

from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_models.bert.config import BertConfig
from nxd_models.spec import Cut


def tensor_parallel_plan(config: BertConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    head_dim = config.hidden_size // config.num_heads
    heads = gqa_plan(config.num_heads, config.num_heads, degree).q_axis(head_dim)
    inner = AxisPlan.padded(config.intermediate_size)
    return {
        "embeddings.word_embeddings": Cut(0, AxisPlan.padded(config.vocab_size)),
        "encoder.layer.*.attention.self.query": Cut(0, heads),
        "encoder.layer.*.attention.self.key": Cut(0, heads),
        "encoder.layer.*.attention.self.value": Cut(0, heads),
        "encoder.layer.*.attention.output.dense": Cut(1, heads),
        "encoder.layer.*.intermediate.dense": Cut(0, inner),
        "encoder.layer.*.output.dense": Cut(1, inner),
    }
