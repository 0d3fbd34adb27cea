"""Llama with weights in 8 bits: quantized once, converted layer by layer, traced, and asked for its next tokens."""

import argparse
import functools
import os

import modeling_llama_nxd as modeling
import torch
from neuronx_distributed.parallel_layers import checkpointing
from neuronx_distributed.quantization.quantization_config import (
    QuantizationType,
    get_default_per_channel_custom_qconfig_dict,
)
from neuronx_distributed.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from neuronx_distributed.quantization.quantization_utils import quantize_pytorch_model_per_channel_symmetric
from neuronx_distributed.quantization.quantize import convert
from neuronx_distributed.trace import parallel_model_trace
from transformers import LlamaForCausalLM

NOT_CONVERTED = ["q_proj", "k_proj", "v_proj", "lm_head"]


def quantize(args):
    torch.manual_seed(args.seed)
    model = quantize_pytorch_model_per_channel_symmetric(
        LlamaForCausalLM(modeling.get_config()), inplace=False, dtype=torch.int8, modules_to_not_convert=NOT_CONVERTED
    )
    torch.save(modeling.convert_from_hf(model.state_dict()), args.quantized_checkpoints_path)


class LastLogits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model.lm_head(self.model.model(input_ids))[:, -1]


def get_model(path):
    model = modeling.LlamaForCausalLM(modeling.get_config())
    q_config = get_default_per_channel_custom_qconfig_dict()
    assert q_config["quantization_type"] == QuantizationType.PER_CHANNEL_SYMMETRIC
    convert(model, q_config, inplace=True, modules_to_not_convert=["lm_head"])
    assert isinstance(model.model.layers[0].mlp.gate_up_proj, QuantizedColumnParallel)
    assert isinstance(model.model.layers[0].self_attn.o_proj, QuantizedRowParallel)
    model.lm_head.gather_output = True
    checkpointing.load(path, model=model, sharded=False)
    return LastLogits(model).eval(), {}


def main(args):
    os.makedirs(os.path.dirname(args.quantized_checkpoints_path) or ".", exist_ok=True)
    quantize(args)
    letters = torch.tensor([list(args.prompt.encode())])
    loader = functools.partial(get_model, args.quantized_checkpoints_path)
    model = parallel_model_trace(loader, (letters,), tp_degree=args.tp_degree)
    tokens = []
    for _ in range(args.max_new_tokens):
        tokens.append(int(model(letters).argmax()))
        letters = torch.cat([letters[:, 1:], torch.tensor([tokens[-1:]])], dim=1)
    print("tokens " + " ".join(map(str, tokens)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp_degree", "--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=12349)
    parser.add_argument("--prompt", default="It had wanted bread, and ")
    parser.add_argument("--max_new_tokens", type=int, default=8)
    parser.add_argument("--quantized_checkpoints_path", default="./output/quantized.pt")
    main(parser.parse_args())
