"""Llama with the training API: one configuration for model, optimizer and checkpoints; and going on from one."""

import argparse

import modeling_llama_nxd as modeling
import neuronx_distributed as nxd
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
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear, create_local_weight
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import requires_init_pg_override
from neuronx_distributed.trainer.checkpoint import finalize_checkpoint, has_checkpoint
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from transformers import LlamaForCausalLM


def get_model(args):
    return modeling.LlamaForCausalLM(modeling.get_config(sequence_parallel_enabled=args.use_sequence_parallel))


def init_weights(module, device=None):
    """Called for each module: nothing is downloaded, so each that has parameters starts at zero, or at one."""
    for parameter in module.parameters(recurse=False):
        torch.nn.init.constant_(parameter, 1.0 if parameter.dim() == 1 else 0.0)


def load_pretrained(model, args):
    """Each rank takes its part of the whole weights by hand."""
    state = modeling.convert_from_hf(full_state(args, LlamaForCausalLM, modeling.get_config()))
    linears = (BaseParallelLinear, GQAQKVColumnParallelLinear)
    assert any(isinstance(module, linears) for module in model.modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                size = parameter.shape[parameter.partition_dim]
                weight = create_local_weight(state[name], parameter.partition_dim, size, parameter.partition_stride)
                parameter.copy_(weight)
            else:
                parameter.copy_(state[name])


def train_llama(args, max_steps, losses):
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=1,
        expert_parallel_size=1,
        context_parallel_size=1,
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=args.use_sequence_parallel,
        activation_checkpoint_config=modeling.CoreAttention if args.use_selective_checkpoint else "full",
        model_init_config={"sequential_move_factor": 11, "meta_device_init": True, "param_init_fn": init_weights},
        mixed_precision_config={"use_master_weights": True, "use_fp32_grad_acc": True},
    )
    model = nxd.initialize_parallel_model(nxd_config, get_model, False, args)
    load_pretrained(model, args)
    model.train()
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config, AdamW_FP32OptimParams, get_param_groups_by_weight_decay(model, args.weight_decay), lr=args.lr
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)
    start = 0
    if has_checkpoint(args.output_dir):
        user_content = nxd.load_checkpoint(
            args.output_dir, tag=None, model=model, optimizer=optimizer, scheduler=scheduler, num_workers=8, strict=True
        )
        start = user_content["step"]

    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    loader = pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), xm.xla_device())
    for step, batch in enumerate(loader, 1):
        if step <= start:
            continue
        optimizer.zero_grad()
        accumulated = torch.zeros((), device=xm.xla_device())
        for input_ids in batch["input_ids"].chunk(args.grad_accum_usteps):
            loss = model.run_train(input_ids=input_ids, labels=input_ids)
            accumulated += loss.detach() / args.grad_accum_usteps
        if args.grad_accum_usteps > 1:
            for parameter in model.parameters():
                gradient = parameter.main_grad if getattr(parameter, "main_grad", None) is not None else parameter.grad
                gradient.div_(args.grad_accum_usteps)
        optimizer.step()
        scheduler.step()
        reduced = xm.all_reduce(
            xm.REDUCE_SUM, accumulated / dp_size, groups=parallel_state.get_data_parallel_group(True)
        )
        losses.append(reduced.detach())
        xm.mark_step()
        if step == max_steps:
            break
    nxd.save_checkpoint(
        args.output_dir,
        tag=f"step_{step}",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        user_content={"step": step, "batch_idx": step, "cli_args": vars(args)},
        use_xser=True,
        num_kept_ckpts=1,
        async_save=True,
    )
    finalize_checkpoint()
    nonfinite = reduce_from_tensor_model_parallel_region(torch.isfinite(optimizer.grad_norm).logical_not().float())
    assert nonfinite.item() == 0, optimizer.grad_norm


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    parser.add_argument("--use_sequence_parallel", type=int, default=1)
    parser.add_argument("--use_selective_checkpoint", type=int, default=1)
    parser.add_argument("--grad_accum_usteps", type=int, default=1)
    args = parser.parse_args()
    if not requires_init_pg_override():
        torch.distributed.init_process_group("xla")
    losses = []
    train_llama(args, args.max_steps // 2, losses)
    train_llama(args, args.max_steps, losses)
    print_losses(losses)
