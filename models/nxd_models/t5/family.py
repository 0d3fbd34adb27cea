"""The T5 family's entry in the registry."""

from __future__ import annotations

from nxd_infer.hugging_face.stored import StoredWeight
from nxd_models.serving.seq2seq_step import Seq2SeqStep
from nxd_models.spec import ModelSpec, Task
from nxd_models.t5.config import read_config
from nxd_models.t5.model import ConditionalGeneration, tensor_parallel_plan


class T5Step(Seq2SeqStep, ConditionalGeneration):
    """One generation step of a model of the T5 family."""

    nxd_equal_ranks = True


T5 = ModelSpec(
    model_types=("t5",),
    read_config=read_config,
    tasks={
        "generate": Task(
            ConditionalGeneration, T5Step, blocks="decoder.block", architecture=("ForConditionalGeneration",)
        )
    },
    tensor_parallel_plan=tensor_parallel_plan,
    stored_weights={"lm_head.weight": StoredWeight("shared.weight", fallback=True)},
    encodes_prompts=True,
)
