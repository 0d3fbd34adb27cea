"""GPT-NeoX: parallel layers by subclasses, a checkpoint in the middle, and a new start from it."""

import argparse
import os

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from common import add_common_arguments, create_dataloader, full_state, get_param_groups_by_weight_decay, print_losses
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import checkpointing, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.utils import divide, get_local_world_size, move_all_tensor_to_cpu
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox import modeling_gpt_neox as hf


def get_config():
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXConfig(**sizes, intermediate_size=64, max_position_embeddings=64, use_cache=False)


class GPTNeoXAttention(hf.GPTNeoXAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.num_attention_heads = divide(config.num_attention_heads, parallel_state.get_tensor_model_parallel_size())
        self.query_key_value = ColumnParallelLinear(config.hidden_size, 3 * config.hidden_size, gather_output=False)
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)


class GPTNeoXMLP(hf.GPTNeoXMLP):
    def __init__(self, config):
        super().__init__(config)
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, config.intermediate_size, gather_output=False)
        self.dense_4h_to_h = RowParallelLinear(config.intermediate_size, config.hidden_size, input_is_parallel=True)


class GPTNeoXForCausalLMNxD(hf.GPTNeoXForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox.embed_in = ParallelEmbedding(config.vocab_size, config.hidden_size)
        for number, layer in enumerate(self.gpt_neox.layers):
            layer.attention = GPTNeoXAttention(config, number)
            layer.mlp = GPTNeoXMLP(config)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False, gather_output=False)

    def forward(self, input_ids, labels):
        lm_logits = self.lm_head(self.gpt_neox(input_ids)[0])
        shift_logits = lm_logits[:, :-1, :].contiguous()
        loss = parallel_cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), labels[:, 1:].reshape(-1))
        return loss.mean()


def train_gpt_neox(args, first, last, losses):
    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    device = xm.xla_device()
    model = GPTNeoXForCausalLMNxD(get_config())
    if first == 0:
        path = os.path.join(args.output_dir, f"pretrained_{xm.get_ordinal()}.pt")
        torch.save(full_state(args, GPTNeoXForCausalLM, get_config()), path)
        checkpointing.load(path, model=model, sharded=False, weights_only=True)
    model.to(device).train()
    optimizer = NeuronZero1Optimizer(
        get_param_groups_by_weight_decay(model, args.weight_decay),
        torch.optim.AdamW,
        lr=args.lr,
        pin_layout=False,
        grad_clipping=True,
        max_norm=1.0,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        coalesce_cc=True,
    )
    folder, optimizer_folder = (os.path.join(args.output_dir, name) for name in ("weights", "optim"))
    if first > 0:
        state = checkpointing.load(folder, model=model, model_key="model", sharded=True, strict=True)
        assert state["global_step"] == first
        optimizer.load_sharded_state_dict(optimizer_folder)
    loader = pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), device)
    for step, batch in enumerate(loader):
        if step < first:
            continue
        loss = model(batch["input_ids"], batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        groups = parallel_state.get_data_parallel_group(as_list=True)
        losses.append(xm.all_reduce(xm.REDUCE_SUM, loss.detach() / dp_size, groups=groups))
        xm.mark_step()
        if step + 1 == last:
            break
    state = {"model": move_all_tensor_to_cpu(model.state_dict()), "global_step": last}
    checkpointing.save(state, folder, save_serially=get_local_world_size() > 8)
    optimizer.save_sharded_state_dict(optimizer_folder)
    xm.rendezvous("saved")


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    args = parser.parse_args()
    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel_size)
    os.makedirs(args.output_dir, exist_ok=True)
    losses = []
    train_gpt_neox(args, 0, args.max_steps // 2, losses)
    train_gpt_neox(args, args.max_steps // 2, args.max_steps, losses)
    print_losses(losses)
