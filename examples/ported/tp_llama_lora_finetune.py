"""LoRA on a Llama that the checkpoint converter has made; the adapter is saved before and after."""

import argparse
import os

import modeling_llama_nxd as modeling
import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from common import add_common_arguments, create_dataloader, full_state, print_losses
from convert_checkpoints import CheckpointConverterLlama
from neuronx_distributed.modules.lora import LoraConfig
from neuronx_distributed.parallel_layers.parallel_state import get_data_parallel_rank, get_data_parallel_size
from transformers import LlamaForCausalLM


def convert_pretrained(args):
    """What a user does once, on the command line."""
    path = os.path.join(args.output_dir, "pytorch_model.bin")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(full_state(args, LlamaForCausalLM, modeling.get_config()), path)
    converter = CheckpointConverterLlama()
    options = ["--input_dir", path, "--output_dir", os.path.join(args.output_dir, "pretrained_weight")]
    options += ["--convert_from_full_state", "--tp_size", str(args.tensor_parallel_size), "--qkv_linear", "True"]
    converter.run(converter.get_arg_parser()[0].parse_args(options))


def get_model(args):
    model = modeling.LlamaForCausalLM(modeling.get_config())
    nxd.load_checkpoint(args.output_dir, tag="pretrained_weight", model=model)
    return model


def train_lora(args):
    lora_config = LoraConfig(
        enable_lora=True,
        lora_rank=4,
        lora_alpha=16,
        lora_dropout=0.0,
        bias="none",
        lora_verbose=False,
        target_modules=["o_proj", "down_proj", "lm_head"],
        save_lora_base=False,
        merge_lora=False,
        lora_save_dir=os.path.join(args.output_dir, "lora_adapter"),
    )
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        optimizer_config={"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
        lora_config=lora_config,
    )
    if xm.is_master_ordinal(local=False):
        convert_pretrained(args)
    xm.rendezvous("converted")
    model = nxd.initialize_parallel_model(nxd_config, get_model, False, args)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, trained, lr=args.lr)
    nxd.save_checkpoint(args.output_dir, tag="lora_0", model=model)
    dp_size, dp_rank = get_data_parallel_size(), get_data_parallel_rank()
    losses = []
    for batch in pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), xm.xla_device()):
        loss = model.run_train(input_ids=batch["input_ids"], labels=batch["labels"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        xm.mark_step()
        if len(losses) == args.max_steps:
            break
    nxd.save_checkpoint(args.output_dir, tag="lora", model=model)
    print_losses(losses)


if __name__ == "__main__":
    args = add_common_arguments(argparse.ArgumentParser()).parse_args()
    torch.distributed.init_process_group("xla")
    train_lora(args)
