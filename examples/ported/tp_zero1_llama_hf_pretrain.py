"""Llama with tensor parallelism, sequence parallelism and ZeRO-1."""

import argparse
import os

import modeling_llama_nxd as modeling
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from common import (
    Throughput,
    add_common_arguments,
    create_dataloader,
    full_state,
    get_linear_schedule_with_warmup,
    get_param_groups_by_weight_decay,
    print_losses,
)
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import checkpointing, grads, layers, parallel_state
from neuronx_distributed.parallel_layers.random import model_parallel_xla_manual_seed
from neuronx_distributed.parallel_layers.utils import is_pjrt_device
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from neuronx_distributed.utils.logger import get_logger
from neuronx_distributed.utils.model_utils import move_model_to_device
from transformers import LlamaForCausalLM

logger = get_logger()


def get_model(args):
    config = modeling.get_config(
        sequence_parallel_enabled=args.sequence_parallel_enabled, use_flash_attention=args.use_flash_attention
    )
    model = modeling.LlamaForCausalLM(config)
    path = os.path.join(args.output_dir, "pretrained.pt")
    if xm.is_master_ordinal(local=False):
        os.makedirs(args.output_dir, exist_ok=True)
        xm.save(modeling.convert_from_hf(full_state(args, LlamaForCausalLM, config)), path, master_only=False)
    xm.rendezvous("pretrained")
    checkpointing.load(path, model=model, sharded=False)
    return model


def train_llama(args):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel_size)
    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    model_parallel_xla_manual_seed(args.seed)
    device = xm.xla_device()
    model = get_model(args)
    move_model_to_device(model, device)
    model.train()
    parallel_linears = [m for m in model.modules() if isinstance(m, layers.BaseParallelLinear)]
    logger.info("%d parallel linear layers, pjrt: %s", len(parallel_linears), is_pjrt_device())

    optimizer = NeuronZero1Optimizer(
        get_param_groups_by_weight_decay(model, args.weight_decay),
        AdamW_FP32OptimParams,
        lr=args.lr,
        betas=(0.9, 0.95),
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
        max_norm=1.0,
    )
    optimizer.zero_grad()
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)
    train_device_loader = pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), device)
    throughput = Throughput(args.batch_size // dp_size, dp_size)
    losses = []

    def log(step, loss, norm):
        losses.append(loss.item())
        if xm.is_master_ordinal(local=False):
            logger.info("step %d norm %s, %.1f seq/s", step, norm, throughput.get_throughput())

    for step, batch in enumerate(train_device_loader, 1):
        loss = model(batch["input_ids"], labels=batch["labels"])
        loss.backward()
        if args.sequence_parallel_enabled:
            grads.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        reduced = xm.all_reduce(
            xm.REDUCE_SUM, loss.detach() / dp_size, groups=parallel_state.get_data_parallel_group(as_list=True)
        )
        xm.mark_step()
        xm.add_step_closure(log, (step, reduced.detach(), optimizer.grad_norm))
        if step >= args.max_steps:
            break
    xm.mark_step()

    state = {"model": model.state_dict(), "global_step": step, "scheduler": scheduler.state_dict()}
    checkpointing.save(state, os.path.join(args.output_dir, "weights"))
    optimizer.save_sharded_state_dict(os.path.join(args.output_dir, "optimizer"))
    xm.rendezvous("saved")
    loaded = checkpointing.load(os.path.join(args.output_dir, "weights"), model=model)
    assert loaded["global_step"] == step
    print_losses(losses)


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    parser.add_argument("--sequence_parallel_enabled", type=int, default=1)
    parser.add_argument("--use_flash_attention", type=int, default=1)
    args = parser.parse_args()
    torch.distributed.init_process_group("xla")
    train_llama(args)
