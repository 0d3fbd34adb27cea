"""The same decoder by the second ModelBuilder: its cache are buffers that it changes, and shapes have tags."""

import argparse
import os

import torch
from inference_demo import NeuronLlamaForCausalLM, NeuronLlamaModel, add_arguments, get_config
from neuronx_distributed import ModelBuilder, NxDModel, NxDParallelState, shard_checkpoint
from neuronx_distributed.trace.parallel_context import init_on_device
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


class InPlaceLlama(NeuronLlamaModel):
    def make_caches(self, zeros):
        for number, cache in enumerate(zeros):
            self.register_buffer(f"cache_{number}", cache, persistent=False)

    def caches(self):
        return list(self.buffers(recurse=False))

    def forward(self, input_ids, position_ids, last):
        token, *values = super().forward(input_ids, position_ids, last)
        for cache, value in zip(self.caches(), values, strict=True):
            cache.copy_(value)
        return token


def shape_of(config, length):
    rows = torch.zeros(config.batch_size, length, dtype=torch.long)
    return {"input_ids": rows, "position_ids": rows.clone(), "last": rows[:, 0].clone()}


def main(args):
    config, artifact = get_config(args), os.path.join(args.compiled_model_path, "nxd_model")
    with NxDParallelState(world_size=args.tp_degree, rank=0, tensor_model_parallel_size=args.tp_degree):
        with init_on_device(torch.device("meta")):
            model = InPlaceLlama(config).eval()
        builder = ModelBuilder(model)
        for bucket in config.context_buckets:
            builder.trace(kwargs=shape_of(config, bucket), tag=f"prefill_{bucket}")
        builder.trace(kwargs=shape_of(config, 1), tag="decode")
        nxd_model = builder.compile(priority_model_key="decode", compiler_args="--auto-cast=none -O1")
    nxd_model.save(artifact)

    torch.manual_seed(args.seed)
    state_dict = LlamaForCausalLM(LlamaConfig(**config.hf_config)).state_dict()
    weights = os.path.join(args.compiled_model_path, "weights")
    shard_checkpoint(
        NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(state_dict), model=model, serialize_path=weights
    )
    ranks = range(args.tp_degree)
    nxd_model = NxDModel.load(artifact)
    nxd_model.set_weights(
        [load_file(os.path.join(weights, f"tp{rank}_sharded_checkpoint.safetensors")) for rank in ranks]
    )
    nxd_model.to_neuron()

    input_ids = torch.tensor([list(args.prompt.encode())]).repeat(args.batch_size, 1)
    length, rows = input_ids.shape[1], args.batch_size
    bucket = next(bucket for bucket in config.context_buckets if bucket >= length)
    padded = torch.nn.functional.pad(input_ids, (0, bucket - length))
    positions = torch.arange(bucket).repeat(rows, 1)
    tokens = [nxd_model(padded, positions, torch.full((rows,), length - 1), model_name=f"prefill_{bucket}")]
    for position in range(length, length + args.max_new_tokens - 1):
        place, last = torch.full((rows, 1), position), torch.zeros(rows, dtype=torch.long)
        tokens.append(nxd_model(tokens[-1][:, None], position_ids=place, last=last))
    print("tokens " + " ".join(map(str, torch.stack(tokens, dim=1).flatten().tolist())), flush=True)


if __name__ == "__main__":
    main(add_arguments(argparse.ArgumentParser()).parse_args())
