"""A plan as somebody else's package would add it: nothing of ours knows DistilBERT."""

from nxd_infer.distributed import ModelPlan

DISTILBERT = ModelPlan(
    {
        "attention": "attention",
        "attention.q_lin": "column:q",
        "attention.k_lin": "column:q",
        "attention.v_lin": "column:q",
        "attention.out_lin": "row:q",
        "ffn.lin1": "column",
        "ffn.lin2": "row",
        "word_embeddings": "vocabulary",
    },
    stacks=("transformer.layer",),
)
