"""A Lightning script of neuronx_distributed's, unchanged: its names and keywords, on one rank without a launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import XLAPrecision
from lightning.pytorch.strategies import XLAStrategy
from neuronx_distributed.lightning import (
    NeuronHooksCallback, NeuronLTModule, NeuronTensorBoardLogger, NeuronTQDMProgressBar, NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from neuronx_distributed.parallel_layers import parallel_state
import neuronx_distributed as nxd

shown = []

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x):
        return (self.linear(x) - 1).square().mean()

class Module(NeuronLTModule):
    def setup(self, stage=None):
        super().setup()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        xm.add_step_closure(lambda loss: shown.append(loss.item()), (loss.detach(),))
        return loss

class Data(LightningDataModule):
    def setup(self, stage=None):
        self.rows = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.rows, batch_size=2,
            sampler=torch.utils.data.DistributedSampler(
                self.rows, num_replicas=parallel_state.get_data_parallel_size(),
                rank=parallel_state.get_data_parallel_rank(), shuffle=False,
            ),
        )

def trainer(strategy, plugins, folder):
    return Trainer(
        strategy=strategy, max_steps=4, log_every_n_steps=1, plugins=plugins,
        enable_model_summary=False, logger=logger,
        callbacks=[NeuronTQDMProgressBar(), NeuronHooksCallback(), ModelCheckpoint(folder, save_last=True)],
    )

folder = sys.argv[1]
logger = NeuronTensorBoardLogger(save_dir=folder + "/logs", log_rank0=False)
config = nxd.neuronx_distributed_config(tensor_parallel_size=1)
strategy, plugin = NeuronXLAStrategy(config), NeuronXLAPrecisionPlugin()
kinds = [issubclass(NeuronXLAStrategy, XLAStrategy), isinstance(strategy, XLAStrategy)]
kinds += [isinstance(plugin, XLAPrecision)]
module = Module(
    model_fn=Net, nxd_config=config, opt_cls=torch.optim.SGD, scheduler_cls=None, opt_kwargs={"lr": 0.1},
    train_batch_size=2, logging_interval=2, log_rank0=True, manual_opt=True,
)
trainer(strategy, [plugin], folder + "/a").fit(module, datamodule=Data())
place = [dist.get_rank(), dist.get_world_size(), parallel_state.get_data_parallel_size()]
other = trainer(NeuronXLAStrategy(), None, folder + "/b")
again = Module(Net, config, torch.optim.SGD, None, opt_kwargs={"lr": 0.1})
other.fit(again, datamodule=Data(), ckpt_path=None)
print(json.dumps({"losses": shown, "kinds": kinds, "place": place, "precision": type(other.precision_plugin).__name__}))
"""


def plain() -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in torch.rand(8, 4, generator=torch.Generator().manual_seed(1)).split(2):
        loss = (model(batch) - 1).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the config's default
        optimizer.step()
    return losses


def test_a_script_of_the_old_package_trains_and_saves(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "nxd_infer.compat", str(script), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["losses"] == pytest.approx(plain() * 2, abs=1e-6)
    # A strategy is one of XLA's; a Trainer without a plugin has no precision of XLA's for it.
    assert found["kinds"] == [True, True, True] and found["precision"] == "Precision" and found["place"] == [0, 1, 1]
    assert (tmp_path / "a/last.ckpt").is_dir() and (tmp_path / "b/last.ckpt").is_dir()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "logs").rglob("events*")).parent)).Reload()
    assert [event.step for event in events.Scalars("loss")][:2] == [2, 4]


TWO_RANKS = """
import sys
import torch
import torch_xla.core.xla_model as xm
from lightning.pytorch import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from neuronx_distributed.lightning import (
    NeuronHooksCallback, NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy
)
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
import neuronx_distributed as nxd

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 1, input_is_parallel=True)

    def forward(self, x):
        return (self.down(self.up(x)) - 1).square().mean()

class Module(NeuronLTModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(batch), sync_dist=True)

config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
module = Module(Net, config, torch.optim.AdamW, None, opt_kwargs={"lr": 0.1}, grad_accum_steps=2)
keeps = ModelCheckpoint(sys.argv[1], "{step}", monitor="loss", every_n_train_steps=2, save_top_k=2, save_last=True)
trainer = Trainer(
    strategy=NeuronXLAStrategy(config), devices=2, max_steps=6, val_check_interval=4, logger=False,
    plugins=[NeuronXLAPrecisionPlugin()], callbacks=[NeuronHooksCallback(), keeps], enable_model_summary=False,
)
loader = torch.utils.data.DataLoader(torch.rand(24, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)
trainer.fit(module, loader, loader)
xm.master_print("ended", xm.xrt_world_size(), get_tensor_model_parallel_size(), trainer.global_step)
"""


def test_the_trainer_starts_ranks_that_have_the_old_names(tmp_path: Path):
    """With a checkpoint of the other package's, every two steps, while gradients are accumulated and validated."""
    pytest.importorskip("pytorch_lightning")
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "nxd_infer.compat", str(script), str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "ended 2 2 6" and done.stdout.count("ended") == 1
    assert (tmp_path / "kept/last.ckpt").is_dir() and len(list((tmp_path / "kept").glob("step=*"))) == 2


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_without_our_strategy_finds_the_cpu(package: str, tmp_path: Path):
    pytest.importorskip(package)
    script = tmp_path / "script.py"
    text = "Trainer(logger=False, enable_checkpointing=False, default_root_dir='.')"
    script.write_text(f"import neuronx_distributed\nfrom {package} import Trainer\nprint({text}.accelerator)\n")
    command = [sys.executable, "-m", "nxd_infer.compat", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert "CPUAccelerator" in done.stdout, done.stderr[-3000:]
