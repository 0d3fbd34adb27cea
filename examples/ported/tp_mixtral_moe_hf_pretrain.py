"""Mixtral: a mixture of experts in each layer, split over expert parallel ranks as well, kept busy by a second loss."""

import argparse
import os

import modeling_llama_nxd as modeling
import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from common import add_common_arguments, create_dataloader, full_state, print_losses
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.loss_function import load_balancing_loss_func
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed.parallel_layers import checkpointing, parallel_state
from transformers import MixtralConfig, MixtralForCausalLM


def get_config(args):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    config = MixtralConfig(**sizes, **heads, **experts, output_router_logits=True, use_cache=False)
    vars(config).update(
        sequence_parallel_enabled=bool(args.use_sequence_parallel),
        use_flash_attention=False,
        kv_shared_group_size=1,
        fuse_qkv=False,
        rms_norm_eps=1e-5,
        mlp_bias=False,
    )
    return config


def convert_from_hf(state_dict):
    renamed = modeling.convert_from_hf(state_dict)
    for name in list(renamed):
        if ".mlp.gate." in name:
            renamed[name.replace("mlp.gate", "mlp.router.linear_router")] = renamed.pop(name)
        elif ".mlp.experts." in name:
            expert_name = name.replace("mlp.experts", "mlp.expert_mlps.mlp_op") + ".weight"
            renamed[expert_name] = renamed.pop(name).transpose(1, 2).contiguous()
    return renamed


class MixtralDecoderLayer(modeling.LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        parallel = {"sequence_parallel_enabled": config.sequence_parallel_enabled}
        router = RouterTopK(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            **parallel,
        )
        expert_mlps = ExpertMLPs(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            glu_mlp=True,
            capacity_factor=None,
            normalize_top_k_affinities=True,
        )
        self.mlp = MoE(router=router, expert_mlps=expert_mlps, return_router_logits=True, **parallel)

    def forward(self, hidden_states, position_embeddings):
        attention = self.self_attn(self.input_layernorm(hidden_states), position_embeddings=position_embeddings)[0]
        hidden_states = hidden_states + attention
        output, self.router_logits = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + output


class MixtralForCausalLMNxD(modeling.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(MixtralDecoderLayer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, input_ids, labels):
        loss = super().forward(input_ids, labels)
        router_logits = torch.cat([layer.router_logits for layer in self.model.layers])
        aux_loss = load_balancing_loss_func(
            router_logits, self.config.num_local_experts, top_k=self.config.num_experts_per_tok
        )
        return loss + self.config.router_aux_loss_coef * aux_loss


def get_model(args):
    model = MixtralForCausalLMNxD(get_config(args))
    path = os.path.join(args.output_dir, f"pretrained_{xm.get_ordinal()}.pt")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(convert_from_hf(full_state(args, MixtralForCausalLM, get_config(args))), path)
    checkpointing.load(path, model=model, sharded=False)
    return model


def train_mixtral(args):
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=args.tensor_parallel_size,
        expert_parallel_size=args.expert_parallel_size,
        optimizer_config={
            "zero_one_enabled": bool(args.use_zero1_optimizer),
            "grad_clipping": True,
            "max_grad_norm": 1.0,
        },
        sequence_parallel=bool(args.use_sequence_parallel),
    )
    model = nxd.initialize_parallel_model(nxd_config, get_model, False, args)
    assert parallel_state.get_expert_model_parallel_size() == args.expert_parallel_size
    model.train()
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=args.lr)
    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    losses = []
    for batch in pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), xm.xla_device()):
        loss = model.run_train(input_ids=batch["input_ids"], labels=batch["labels"]).detach()
        optimizer.step()
        optimizer.zero_grad()
        groups = parallel_state.get_data_parallel_group(as_list=True)
        losses.append(xm.all_reduce(xm.REDUCE_SUM, loss / dp_size, groups=groups))
        xm.mark_step()
        if len(losses) == args.max_steps:
            break
    nxd.save_checkpoint(args.output_dir, tag="trained", model=model, optimizer=optimizer)
    print_losses(losses)


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    parser.add_argument("--expert_parallel_size", "--ep", type=int, default=1)
    parser.add_argument("--use_sequence_parallel", type=int, default=1)
    parser.add_argument("--use_zero1_optimizer", type=int, default=0)
    args = parser.parse_args()
    torch.distributed.init_process_group("xla")
    train_mixtral(args)
