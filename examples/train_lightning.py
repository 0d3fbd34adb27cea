"""Train a model directory on a text with PyTorch Lightning: python examples/train_lightning.py ./llama runs --epochs 2

Run it again, with more epochs, to go on from the last checkpoint. Under torchrun, pass --devices 1.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

import nxd_infer as nxd
from nxd_infer.lightning import (
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from nxd_models import registry

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a Hugging Face directory of a supported family")
parser.add_argument("runs", help="a folder for checkpoints and logs")
parser.add_argument("--epochs", type=int, default=2, help="the number of the last epoch")
parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
parser.add_argument("--text", default=__file__, help="the text file to train on; default: this program")
parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer; the rest are data parallel")
parser.add_argument("--devices", type=int, default=2, help="ranks to start on this machine")
args = parser.parse_args()

nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=args.tp,
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)
module = NeuronLTModule(
    model_fn=registry.load_model,
    nxd_config=nxd_config,
    opt_cls=torch.optim.AdamW,
    scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
    model_args=(args.model,),
    model_kwargs={"dtype": torch.float32},
    opt_kwargs={"lr": args.lr},
    scheduler_kwargs={"gamma": 0.999},
    grad_accum_steps=2,
)

tokens = Tokenizer.from_file(f"{args.model}/tokenizer.json").encode(Path(args.text).read_text()).ids
windows = [torch.tensor(tokens[at : at + 64]) for at in range(0, len(tokens) - 63, 64)]  # the model shifts the labels
dataset = [{"input_ids": window, "labels": window} for window in windows]

trainer = Trainer(
    strategy=NeuronXLAStrategy(nxd_config, async_save=True),
    devices=args.devices,
    max_epochs=args.epochs,
    plugins=[NeuronXLAPrecisionPlugin()],
    logger=NeuronTensorBoardLogger(args.runs),
    log_every_n_steps=1,
    callbacks=[
        NeuronTQDMProgressBar(),
        LearningRateMonitor(logging_interval="step"),
        ModelCheckpoint(f"{args.runs}/ckpts", monitor="loss", save_top_k=2, save_last=True),
    ],
)
trainer.fit(module, DataLoader(dataset, batch_size=2, shuffle=True), ckpt_path="last")
if trainer.is_global_zero:
    print(f"step {trainer.global_step}: loss {float(trainer.callback_metrics['loss']):.3f}")
