"""A job under a Trainer and the same one in a plain loop, at the degrees in force or in one process."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import nxd_infer as nxd
from nxd_infer.context import LOCAL, use_context
from nxd_infer.lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy
from nxd_infer.testing.compare import pieces
from tests.support.trainer.models import CONFIG, llama

AdamW = torch.optim.AdamW
ROWS = 16


class Rows(Dataset):
    """Row i begins with token i, so that a batch says which rows it has."""

    def __init__(self, count: int = ROWS, length: int = 8):
        ids = torch.randint(0, CONFIG.vocab_size, (count, length), generator=torch.Generator().manual_seed(5))
        ids[:, 0] = torch.arange(count)
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Diary(Callback):
    """What happened on this rank: the rows of each batch, and the loss of each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch["input_ids"][:, 0].tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.should_print:
            self.losses.append(float(module.loss))


def module_of(config: Any, model_fn: Any = llama, *, accumulate: int = 1, lr: float = 1e-2) -> NeuronLTModule:
    return NeuronLTModule(
        model_fn,
        config,
        AdamW,
        torch.optim.lr_scheduler.ExponentialLR,
        opt_kwargs={"lr": lr},
        scheduler_args=(0.9,),
        grad_accum_steps=accumulate,
    )


def trainer_of(strategy: NeuronXLAStrategy, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(
        strategy=strategy,
        plugins=[NeuronXLAPrecisionPlugin()],
        callbacks=list(callbacks),
        **{**quiet, "accelerator": "cpu", "max_epochs": 2, **options},
    )


def one(strategy: Any = None, *callbacks: Callback, **options: Any) -> Trainer:
    return trainer_of(strategy or NeuronXLAStrategy(nxd.neuronx_distributed_config()), *callbacks, **options)


def small() -> NeuronLTModule:
    return module_of(nxd.neuronx_distributed_config())


def fit(
    rows: int, job: dict[str, Any], *callbacks: Callback, seed: int = 0, resume: str | None = None
) -> dict[str, Any]:
    """Two epochs under a Trainer, ``rows`` a batch on each data-parallel rank; ``job`` has options of all kinds.

    Returns what this rank saw, and its weights, rates and place at the end.
    """
    job = dict(job)
    model_fn, accumulate, shuffle = job.pop("model_fn", llama), job.pop("accumulate", 1), job.pop("shuffle", False)
    options = job.pop("trainer", {})
    config = nxd.neuronx_distributed_config(**job)
    diary = Diary()
    trainer = trainer_of(NeuronXLAStrategy(config), diary, *callbacks, **options)
    torch.manual_seed(seed)
    module = module_of(config, model_fn, accumulate=accumulate)
    trainer.fit(module, DataLoader(Rows(), rows, shuffle=shuffle), ckpt_path=resume)
    return {
        "rows": diary.rows,
        "losses": diary.losses,
        "weights": dict(module.model.state_dict()),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "at": (trainer.current_epoch, trainer.global_step),
    }


def plain(rows: int, model_fn: Any = llama, accumulate: int = 1, epochs: int = 2) -> list[float]:
    """The losses of two epochs in plain PyTorch, in this process."""
    with use_context(LOCAL):
        torch.manual_seed(0)
        model = model_fn().train()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(epochs):
            for batch in DataLoader(Rows(), rows):
                total = 0.0
                for part in pieces(batch, accumulate):
                    loss = model(**part)[0] / accumulate
                    loss.backward()
                    total += loss.item()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                losses.append(total)
        return losses
