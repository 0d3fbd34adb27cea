"""Lightning's own callbacks on two ranks give what they give on one device, under an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch.callbacks as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.lightning import NeuronLTModule, NeuronXLAStrategy
from nxd_infer.parallel_layers import ParallelEmbedding
from tests.support.lightning.jobs import Rows, trainer_of
from tests.support.ranks import run_ranks
from tests.support.trainer.models import llama

STEPS = {"lr": 1e-2}


class Plain(LightningModule):
    """What a user had before: automatic optimization on one device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = llama()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], **STEPS)


class Ema(Callback):
    """As many write it: a copy in `setup`, swapped in at the end."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = AveragedModel(pl_module.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module.model)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for own, mean in zip(pl_module.model.parameters(), self.average.module.parameters(), strict=True):
            own.data.copy_(mean.data)


class Shadow(Callback):
    """Another: a dictionary by names."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.shadow = {name: param.detach().clone() for name, param in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, param in pl_module.named_parameters():
            self.shadow[name].lerp_(param.detach(), 0.5)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name, param in pl_module.named_parameters():
            param.data.copy_(self.shadow[name])


class Finetuning(pl.BaseFinetuning):
    """Trains the layers alone in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([m for m in pl_module.model.modules() if isinstance(m, (nn.Embedding, ParallelEmbedding))])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            modules = [m for m in pl_module.model.modules() if isinstance(m, (nn.Embedding, ParallelEmbedding))]
            self.unfreeze_and_add_param_group(modules, optimizer, lr=5e-3)


CALLBACKS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "swa": lambda: [pl.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)],
    "ema": lambda: [Ema()],
    "shadow": lambda: [Shadow()],
    "weight averaging": lambda: [pl.WeightAveraging()],
    "finetuning": lambda: [Finetuning()],
    "ema weight averaging": lambda: [pl.EMAWeightAveraging(decay=0.5)],
    "watching": lambda: [pl.Timer(), pl.ModelSummary(max_depth=-1), pl.DeviceStatsMonitor(), pl.LambdaCallback()],
}


def weights_after(trainer: Any, module: Any, rows: int = 4) -> dict[str, Tensor]:
    trainer.fit(module, DataLoader(Rows(8), rows))
    return nxd.trainer.gather_weights(module.model) if isinstance(module, NeuronLTModule) else module.model.state_dict()


def on_ranks(degrees: dict[str, int], root: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, callbacks in CALLBACKS.items():
        parallel_state.destroy_model_parallel()
        config = nxd.neuronx_distributed_config(**degrees, optimizer_config={"grad_clipping": False})
        torch.manual_seed(0)
        module = NeuronLTModule(llama, config, torch.optim.SGD, None, opt_kwargs=STEPS)
        trainer = trainer_of(
            NeuronXLAStrategy(config), *callbacks(), max_epochs=3, default_root_dir=root, logger=CSVLogger(root)
        )
        found[name] = weights_after(trainer, module)
    return found


@pytest.mark.parametrize("degrees", [{"tensor_parallel_size": 2}, {}], ids=["tp 2", "dp 2"])
def test_callbacks_do_what_they_do_on_one_device(degrees: dict[str, int], tmp_path: Any):
    found, _ = run_ranks(on_ranks, 2, degrees, str(tmp_path))
    for name, callbacks in CALLBACKS.items():
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=3,
            callbacks=callbacks(),
            logger=CSVLogger(tmp_path),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        expected = weights_after(trainer, Plain(), 4 if degrees else 8)
        assert found[name].keys() == expected.keys(), name
        for weight, value in expected.items():
            torch.testing.assert_close(found[name][weight], value, rtol=0, atol=1e-6, msg=f"{name}: {weight}")
