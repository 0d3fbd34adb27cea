"""BERT that says what is a paraphrase: traced over ranks, a graph for each length, saved, loaded."""

import argparse
import os

import neuronx_distributed
import torch
from neuronx_distributed.parallel_layers import layers, parallel_state
from neuronx_distributed.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from torch_neuronx import BucketModelConfig
from transformers import BertConfig, BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

BUCKETS = (16, 32)


class ParallelSelfAttention(BertSelfAttention):
    def __init__(self, config):
        super().__init__(config)
        self.query = layers.ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        self.key = layers.ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        self.value = layers.ColumnParallelLinear(config.hidden_size, self.all_head_size, gather_output=False)
        self.num_attention_heads //= parallel_state.get_tensor_model_parallel_size()
        self.all_head_size //= parallel_state.get_tensor_model_parallel_size()


class ParallelSelfOutput(BertSelfOutput):
    def __init__(self, config):
        super().__init__(config)
        self.dense = layers.RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]


def get_config():
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertConfig(**sizes, intermediate_size=64, max_position_embeddings=64, num_labels=2)


def get_model():
    torch.manual_seed(12349)
    config = get_config()
    model = BertForSequenceClassification(config).eval()
    path = os.path.join(os.environ["MODEL_DIR"], "bert.pt")
    for layer in model.bert.encoder.layer:
        layer.attention.self = ParallelSelfAttention(config)
        layer.attention.output = ParallelSelfOutput(config)
    neuronx_distributed.parallel_layers.load(path, model, sharded=False)
    return Logits(model).eval(), {}


def bucket_kernel(inputs: list[torch.Tensor]):
    length = inputs[0].shape[1]
    bucket = 0 if length <= 16 else 1
    size = 16 if bucket == 0 else 32
    return [torch.nn.functional.pad(x, (0, size - length)) for x in inputs], torch.tensor([bucket])


def get_bucket_kernel(*_):
    return torch.jit.script(bucket_kernel)


def main(args):
    os.environ["MODEL_DIR"] = args.output_dir
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(12349)
    torch.save(BertForSequenceClassification(get_config()).state_dict(), os.path.join(args.output_dir, "bert.pt"))
    example_inputs = [(torch.ones(1, n, dtype=torch.long), torch.ones(1, n, dtype=torch.long)) for n in BUCKETS]
    model = parallel_model_trace(
        get_model,
        example_inputs,
        compiler_workdir=os.path.join(args.output_dir, "workdir"),
        compiler_args="--auto-cast=none --model-type=transformer",
        inline_weights_to_neff=False,
        bucket_config=BucketModelConfig(get_bucket_kernel),
        tp_degree=args.tp_degree,
        max_parallel_compilations=2,
    )
    parallel_model_save(model, os.path.join(args.output_dir, "tp_models"))
    del model
    model = parallel_model_load(os.path.join(args.output_dir, "tp_models"))
    logits = []
    for text in ("It does not matter.", "It does not matter how the work"):
        input_ids = torch.tensor([list(text.encode())])
        logits += model(input_ids, torch.ones_like(input_ids)).flatten().tolist()
    print("logits " + " ".join(f"{value:.9g}" for value in logits), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp_degree", "--tp", type=int, default=1)
    parser.add_argument("--output_dir", default="./output")
    main(parser.parse_args())
