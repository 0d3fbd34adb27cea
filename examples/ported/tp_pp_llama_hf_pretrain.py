"""Llama over pipeline stages: NxDPPModel around the model, an optimizer of its local parameters."""

import argparse
import os

import modeling_llama_nxd as modeling
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from common import (
    add_common_arguments,
    create_dataloader,
    full_state,
    get_linear_schedule_with_warmup,
    get_param_groups_by_weight_decay,
    print_losses,
)
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import checkpointing, mappings
from neuronx_distributed.parallel_layers.grads import clip_grad_norm
from neuronx_distributed.parallel_layers.parallel_state import (
    get_data_parallel_rank,
    get_data_parallel_replica_groups,
    get_data_parallel_size,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_size,
    get_tensor_model_parallel_rank,
    initialize_model_parallel,
)
from neuronx_distributed.parallel_layers.random import model_parallel_xla_manual_seed
from neuronx_distributed.pipeline import NxDPPModel
from neuronx_distributed.utils.batch_utils import get_batch_on_this_context_parallel_rank
from transformers import LlamaForCausalLM


def create_partition(config, args):
    """The last layer of each stage but the last."""
    per_stage = config.num_hidden_layers // args.pipeline_parallel_size
    return [f"model.layers.{per_stage * stage - 1}" for stage in range(1, args.pipeline_parallel_size)]


def train_llama(args):
    initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_parallel_size,
        tensor_model_parallel_size=args.tensor_parallel_size,
        context_parallel_size=1,
        expert_model_parallel_size=1,
    )
    dp_rank, dp_size = get_data_parallel_rank(), get_data_parallel_size()
    tp_rank, pp_rank = get_tensor_model_parallel_rank(), get_pipeline_model_parallel_rank()
    model_parallel_xla_manual_seed(args.seed)
    config = modeling.get_config(sequence_parallel_enabled=args.use_sequence_parallel, fuse_qkv=True)
    model = modeling.LlamaForCausalLM(config)
    path = os.path.join(args.output_dir, f"pretrained_{tp_rank}_{pp_rank}_{dp_rank}.pt")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save({"state": modeling.convert_from_hf(full_state(args, LlamaForCausalLM, config))}, path)
    checkpointing.load(path, model_or_optimizer=model, model_key="state", sharded=False)

    model = NxDPPModel(
        model,
        transformer_layer_cls=modeling.LlamaDecoderLayer,
        num_microbatches=args.num_microbatches,
        output_loss_value_spec=True,
        input_names=["input_ids", "labels"],
        pipeline_cuts=create_partition(config, args),
        leaf_module_cls=[modeling.LlamaRMSNorm.__name__],
        autowrap_modules=[mappings],
        use_zero1_optimizer=args.use_zero1_optimizer > 0,
        deallocate_pipeline_outputs=args.deallocate_pipeline_outputs > 0,
        virtual_pipeline_size=1,
        broadcast_and_average_loss=True,
    )
    model.move_model_to_device()
    groups = get_param_groups_by_weight_decay(model, args.weight_decay)
    if args.use_zero1_optimizer:
        optimizer = NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=args.lr, grad_clipping=True, max_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)
    device = xm.xla_device()
    losses = []
    for batch in pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), device):
        batch = get_batch_on_this_context_parallel_rank(batch)
        loss = model.run_train(input_ids=batch["input_ids"], labels=batch["labels"])
        if not args.use_zero1_optimizer:
            for parameter in model.local_parameters():
                xm.all_reduce("sum", [parameter.grad], scale=1 / dp_size, groups=get_data_parallel_replica_groups())
            clip_grad_norm(model.local_parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach())
        xm.mark_step()
        if len(losses) == args.max_steps:
            break

    checkpointing.save({"model": model.local_state_dict()}, os.path.join(args.output_dir, "weights"), save_xser=True)
    assert get_pipeline_model_parallel_size() == args.pipeline_parallel_size
    print_losses(losses)


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    parser.add_argument("--pipeline_parallel_size", "--pp", type=int, default=1)
    parser.add_argument("--num_microbatches", type=int, default=2)
    parser.add_argument("--use_sequence_parallel", type=int, default=0)
    parser.add_argument("--use_zero1_optimizer", type=int, default=0)
    parser.add_argument("--deallocate_pipeline_outputs", type=int, default=1)
    args = parser.parse_args()
    torch.distributed.init_process_group("xla")
    train_llama(args)
