"""Train a model directory on a text: torchrun --nproc_per_node=2 examples/train.py ./llama ckpts --steps 20

Run it again to resume from its newest checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer

import nxd_infer as nxd
from nxd_infer.trainer import ResumableLoader, TrainingProgress, shutdown
from nxd_models import registry

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a Hugging Face directory of a supported family")
parser.add_argument("checkpoints", help="a folder that all ranks share, or s3://bucket/prefix")
parser.add_argument("--steps", type=int, default=100, help="how many steps to train, on top of the checkpoint's")
parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
parser.add_argument("--text", default=__file__, help="the text file to train on; default: this program")
parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
parser.add_argument(
    "--pp", type=int, default=1, help="ranks that share the layers in order; the rest are data parallel"
)
args = parser.parse_args()
if "RANK" not in os.environ:
    parser.error("needs one process per rank: run `torchrun --nproc_per_node=2 examples/train.py ...`")

nxd_config = nxd.neuronx_distributed_config(  # joins the other processes: over gloo, or NCCL on GPUs
    tensor_parallel_size=args.tp,
    pipeline_parallel_size=args.pp,
    pipeline_config={"auto_partition": True, "num_microbatches": 4} if args.pp > 1 else None,
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)
model = nxd.initialize_parallel_model(nxd_config, registry.load_model, args.model, dtype=torch.float32)
device = next(model.parameters()).device
optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

tokens = Tokenizer.from_file(f"{args.model}/tokenizer.json").encode(Path(args.text).read_text()).ids
windows = [torch.tensor(tokens[at : at + 64]) for at in range(0, len(tokens) - 63, 64)]  # the model shifts the labels
dataset = [{"input_ids": window, "labels": window} for window in windows]
loader = ResumableLoader(dataset, batch_size=4, shuffle=True)  # each data-parallel rank draws its own part

job = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": loader}
user_content = nxd.load_checkpoint(args.checkpoints, **job)  # the newest; None at the first start
first = step = user_content["step"] if user_content else 0
last = first + args.steps
dp = nxd.parallel_state.get_data_parallel_size()

with TrainingProgress(total=last, initial=first) as progress:
    while step < last:
        for batch in loader:  # the rest of an epoch
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model.run_train(**batch)  # forward and backward, over all stages
            optimizer.step()  # averages, clips, steps
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            counted = {"tokens": dp * batch["input_ids"].numel(), "bubble": model.bubble}
            progress.step(loss, **counted, grad_norm=optimizer.grad_norm)
            if step % 100 == 0 or step == last:
                content = {"step": step}
                nxd.save_checkpoint(args.checkpoints, f"step_{step}", **job, user_content=content, async_save=True)
            if step == last:
                break
shutdown()  # waits for the save; all ranks leave together
if os.environ["RANK"] == "0" and last > first:
    print(f"saved {args.checkpoints}/step_{last}")
