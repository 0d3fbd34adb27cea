"""The recipe of the documents for BERT, as a user of them writes it."""

from __future__ import annotations

import torch

import nxd_infer as nxd
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.parallel_state import get_tensor_model_parallel_size


def plain_bert():
    """What ``from_pretrained`` would give, without a download: a seeded model."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    parts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**sizes, **parts, attn_implementation="eager")).eval()


def get_bert(checkpoint: str):
    """The BERT recipe: transformers' own attention with its projections made parallel, weights loaded unsharded."""
    from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

    class ParallelSelfAttention(BertSelfAttention):
        def __init__(self, config):
            super().__init__(config)
            self.query = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
            self.key = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
            self.value = ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
            self.num_attention_heads = self.num_attention_heads // get_tensor_model_parallel_size()
            self.all_head_size = self.all_head_size // get_tensor_model_parallel_size()

    class ParallelSelfOutput(BertSelfOutput):
        def __init__(self, config):
            super().__init__(config)
            self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)

    model = plain_bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self = ParallelSelfAttention(model.config)
        layer.attention.output = ParallelSelfOutput(model.config)
    nxd.parallel_layers.load(checkpoint, model, sharded=False)
    return Logits(model).eval(), {}


class Logits(torch.nn.Module):
    """Tensors in, a tensor out, as tracing wants it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask).logits


def test_the_bert_recipe_gives_what_transformers_gives(tmp_path):
    checkpoint = tmp_path / "bert.pt"
    reference = plain_bert()
    torch.save({"model": reference.state_dict()}, checkpoint)
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    with nxd.trace.parallel_model_trace(
        get_bert, (ids, torch.ones_like(ids)), tp_degree=2, backend="eager", func_kwargs={"checkpoint": str(checkpoint)}
    ) as model:
        nxd.trace.parallel_model_save(model, tmp_path / "artifact")
    with nxd.trace.parallel_model_load(tmp_path / "artifact") as model:
        assert isinstance(model, nxd.trace.TensorParallelModel)
        for lengths in ((16, 16), (1, 9)):
            mask = (torch.arange(16) < torch.tensor(lengths)[:, None]).long()
            with torch.no_grad():
                expected = reference(ids, attention_mask=mask).logits
            ours = model(ids, mask)
            assert (ours - expected).abs().max() / expected.abs().max() < 1e-5
