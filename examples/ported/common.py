"""What the training scripts beside this one share: text, starting weights, a learning rate, a log."""

import time
from pathlib import Path

import torch
import torch_xla.core.xla_model as xm
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB_SIZE = 128


class TextDataset(Dataset):
    """Blocks of a text, each letter a token."""

    def __init__(self, seq_len):
        tokens = torch.tensor(list(Path(__file__).with_name("text.txt").read_bytes()))
        self.blocks = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def create_dataloader(args, dp_size, dp_rank):
    dataset = TextDataset(args.seq_len)
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=False, drop_last=True)
    return DataLoader(dataset, sampler=sampler, batch_size=args.batch_size // dp_size, drop_last=True)


def add_common_arguments(parser):
    parser.add_argument("--tensor_parallel_size", "--tp", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=4, help="of all data-parallel ranks together")
    parser.add_argument("--seq_len", type=int, default=32)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=12349)
    parser.add_argument("--output_dir", default="./output")
    return parser


def full_state(args, model_cls, config):
    """The state of a model of transformers that a seed gives: what a download would be."""
    torch.manual_seed(args.seed)
    return model_cls(config).state_dict()


def get_param_groups_by_weight_decay(model, weight_decay):
    no_decay = ["bias", "norm", "LayerNorm"]
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]


def get_linear_schedule_with_warmup(optimizer, warmup_steps, max_steps):
    def factor(step):
        return (step + 1) / warmup_steps if step < warmup_steps else (max_steps - step) / (max_steps - warmup_steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Throughput:
    """Sequences per second since the last call."""

    def __init__(self, batch_size, world_size, grad_accum_usteps=1):
        self.seqs_per_iteration = batch_size * world_size * grad_accum_usteps
        self.start_time = time.time()

    def get_throughput(self):
        now, started = time.time(), self.start_time
        self.start_time = now
        return self.seqs_per_iteration / max(now - started, 1e-6)


def print_losses(losses):
    """What a test reads."""
    if xm.is_master_ordinal(local=False):
        print("losses " + " ".join(f"{float(loss):.9g}" for loss in losses), flush=True)
