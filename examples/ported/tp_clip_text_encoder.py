"""The text encoder of an image generator, its linear layers replaced one by one by sharded ones, on two ranks."""

import argparse
import functools

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads
from neuronx_distributed.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection


def get_sharded_data(data, dim):
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    size = data.shape[dim] // parallel_state.get_tensor_model_parallel_size()
    return data.narrow(dim, size * tp_rank, size).clone()


def column(linear):
    sharded = ColumnParallelLinear(linear.in_features, linear.out_features, bias=True, gather_output=False)
    sharded.weight.data = get_sharded_data(linear.weight.data, 0)
    sharded.bias.data = get_sharded_data(linear.bias.data, 0)
    return sharded


def row(linear):
    sharded = RowParallelLinear(linear.in_features, linear.out_features, bias=True, input_is_parallel=True)
    sharded.weight.data = get_sharded_data(linear.weight.data, 1)
    sharded.bias.data = linear.bias.data.detach()
    return sharded


class TracingCLIPTextWrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).text_embeds


def get_config():
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 32, "projection_dim": 16}
    return CLIPTextConfig(**sizes, **heads, eos_token_id=2, bos_token_id=0, pad_token_id=1)


def get_text_encoder(seed):
    torch.manual_seed(seed)
    model = CLIPTextModelWithProjection(get_config()).eval()
    tp_size = parallel_state.get_tensor_model_parallel_size()
    for module in list(model.modules()):
        if hasattr(module, "k_proj"):
            assert get_number_of_extra_heads(module.num_heads, tp_size) == 0
            module.num_heads //= tp_size
            module.q_proj, module.k_proj, module.v_proj = (
                column(module.q_proj),
                column(module.k_proj),
                column(module.v_proj),
            )
            module.out_proj = row(module.out_proj)
        elif hasattr(module, "fc1"):
            module.fc1, module.fc2 = column(module.fc1), row(module.fc2)
    return TracingCLIPTextWrapper(model).eval(), {}


def main(args):
    input_ids = torch.full((2, 32), 2)
    for line, text in enumerate(("a river at dusk", "bread, and the measuring of fields")):
        letters = torch.tensor(list(text.encode())[:31])
        input_ids[line, : len(letters)] = letters
    model = parallel_model_trace(
        functools.partial(get_text_encoder, args.seed),
        (input_ids,),
        compiler_args="--model-type=transformer --enable-fast-loading-neuron-binaries",
        tp_degree=args.tp_degree,
    )
    parallel_model_save(model, args.compiled_model_path)
    embeddings = parallel_model_load(args.compiled_model_path)(input_ids)
    print("embeddings " + " ".join(f"{value:.9g}" for value in embeddings.flatten().tolist()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp_degree", "--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=12349)
    parser.add_argument("--compiled_model_path", default="./text_encoder")
    main(parser.parse_args())
