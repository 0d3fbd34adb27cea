"""BERT's masked words and next sentences, with tensor parallelism in each layer and data parallelism over the rest."""

import argparse
import os

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # noqa: F401
import torch_xla.runtime as xr
from common import Throughput, add_common_arguments, create_dataloader, full_state, print_losses
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.checkpointing import load, save
from neuronx_distributed.parallel_layers.grads import bucket_allreduce_gradients, clip_grad_norm
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.utils import get_local_world_size
from neuronx_distributed.utils.model_utils import move_model_to_device
from transformers import BertConfig, BertForPreTraining

MASK = 1


def get_config():
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**sizes, **no_dropout, intermediate_size=64, max_position_embeddings=64)


def get_model(args):
    config = get_config()
    model = BertForPreTraining(config)
    model.bert.embeddings.word_embeddings = ParallelEmbedding(
        config.vocab_size, config.hidden_size, config.pad_token_id
    )
    for layer in model.bert.encoder.layer:
        hidden, inner = config.hidden_size, config.intermediate_size
        attention = layer.attention.self
        attention.query = ColumnParallelLinear(hidden, hidden, gather_output=False)
        attention.key = ColumnParallelLinear(hidden, hidden, gather_output=False)
        attention.value = ColumnParallelLinear(hidden, hidden, gather_output=False)
        attention.num_attention_heads //= parallel_state.get_tensor_model_parallel_size()
        attention.all_head_size = attention.num_attention_heads * attention.attention_head_size
        layer.attention.output.dense = RowParallelLinear(hidden, hidden, input_is_parallel=True)
        layer.intermediate.dense = ColumnParallelLinear(hidden, inner, gather_output=False)
        layer.output.dense = RowParallelLinear(inner, hidden, input_is_parallel=True)
    predictions = model.cls.predictions
    predictions.decoder = ColumnParallelLinear(config.hidden_size, config.vocab_size, gather_output=True)
    predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    predictions.bias = predictions.decoder.bias
    path = os.path.join(args.output_dir, f"pretrained_{xm.get_ordinal()}.pt")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(full_state(args, BertForPreTraining, config), path)
    load(path, model, sharded=False)
    return model


def mask_tokens(input_ids, step):
    """A fifth of the tokens, the same on every rank that has the same text."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device) % 5 == step % 5
    labels = torch.where(places, input_ids, -100)
    return torch.where(places, MASK, input_ids), labels


def train_bert(args):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel_size)
    dp_size, dp_rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_replica_groups()
    ranks_of_model = parallel_state.get_tensor_model_parallel_replica_groups()
    assert len(replicas) * len(replicas[0]) == len(ranks_of_model) * len(ranks_of_model[0]) == xr.world_size()
    device = xm.xla_device()
    model = get_model(args)
    move_model_to_device(model, device, include_buffers=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    throughput = Throughput(args.batch_size // dp_size, dp_size)
    losses = []
    for step, batch in enumerate(pl.MpDeviceLoader(create_dataloader(args, dp_size, dp_rank), device)):
        input_ids, labels = mask_tokens(batch["input_ids"], step)
        is_next = batch["input_ids"][:, 0] % 2
        loss = model(input_ids=input_ids, labels=labels, next_sentence_label=is_next).loss
        loss.backward()
        bucket_allreduce_gradients(xm._fetch_gradients(optimizer))
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = xm.all_reduce(xm.REDUCE_SUM, loss.detach() / dp_size, groups=replicas)
        xm.mark_step()
        losses.append(loss)
        if len(losses) == args.max_steps:
            break
    xm.master_print(f"{throughput.get_throughput():.1f} seq/s per step, {get_local_world_size()} ranks on this machine")
    state = {"model": model.state_dict(), "global_step": len(losses)}
    save(state, os.path.join(args.output_dir, "weights"), save_xser=True, master_dp_only=True)
    print_losses(losses)


if __name__ == "__main__":
    parser = add_common_arguments(argparse.ArgumentParser())
    args = parser.parse_args()
    torch.distributed.init_process_group("xla")
    train_bert(args)
