"""What a Trainer does beside training: validation, callbacks, loggers, a profiler, adapters; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.checkpoint.api import wait_for_save
from nxd_infer.checkpoint.folder import complete_checkpoints
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import ParallelConfigError
from nxd_infer.lightning import NeuronLTModule, NeuronTensorBoardLogger, NeuronTQDMProgressBar, NeuronXLAStrategy
from tests.support.lightning.jobs import Diary, Rows, module_of, one, small, trainer_of
from tests.support.ranks import run_ranks
from tests.support.trainer.models import llama


def tags(folder: Any) -> list[str]:
    return sorted(one.tag for one in complete_checkpoints(storage_of(folder)))


# --- two ranks --------------------------------------------------------------------------------------------


def everything(root: str) -> dict[str, Any]:
    """A job with all of Lightning's parts, stopped early, then evaluated from its best checkpoint."""
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config()
    stop = EarlyStopping("val_loss", patience=0, min_delta=10.0)  # never improves so much: stops after the 2nd epoch
    best = ModelCheckpoint(f"{root}/ckpts", "{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    logger = NeuronTensorBoardLogger(f"{root}/logs")
    module = module_of(config, accumulate=2)
    trainer = trainer_of(
        NeuronXLAStrategy(config, async_save=True),
        stop,
        best,
        LearningRateMonitor("step"),
        NeuronTQDMProgressBar(),
        logger=logger,
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        max_epochs=5,
        log_every_n_steps=1,
        profiler="simple",
    )
    train, held_out = DataLoader(Rows(), 2, shuffle=True), DataLoader(Rows(6), 2)
    trainer.fit(module, train, held_out)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.test(module, held_out, ckpt_path="best", verbose=False)
    guesses = trainer.predict(Predicting(module), DataLoader(torch.arange(5), 2))
    return {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "kept": tags(f"{root}/ckpts"),
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "metrics": fitted,
        "tested": tested,
        "guesses": guesses,
    }


class Hooks(Callback):
    """The hooks around a step's gradients, in the order in which they are called, and whether gradients were there."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self.called.append(f"before backward of {'a loss' if loss.requires_grad else 'nothing'}")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        there = all(weight.grad is not None for weight in module.model.parameters())
        self.called.append(f"after backward, {'with' if there else 'without'} gradients")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.called.append("before step")


def test_callbacks_see_the_gradients_and_a_validation_between_two_steps_is_logged(tmp_path: Path):
    """As with any module that trains by manual_backward(). While gradients are accumulated, training writes nothing."""
    parallel_state.destroy_model_parallel()
    config, hooks, logger = nxd.neuronx_distributed_config(), Hooks(), NeuronTensorBoardLogger(tmp_path)
    options: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 1, "log_every_n_steps": 1}
    trainer = trainer_of(NeuronXLAStrategy(config), hooks, logger=logger, num_sanity_val_steps=0, **options)
    trainer.fit(module_of(config, accumulate=2), DataLoader(Rows(4), 1), DataLoader(Rows(2), 1))
    backward = ["before backward of a loss", "after backward, with gradients"]
    assert hooks.called == [*backward, *backward, "before step"] * 2
    found = EventAccumulator(logger.log_dir).Reload()
    assert [scalar.step for scalar in found.Scalars("val_loss")] == [0, 1, 1, 2]
    assert [scalar.step for scalar in found.Scalars("loss")] == [1, 2]


class Predicting(NeuronLTModule):
    """Says which rows it was given."""

    def __init__(self, trained: NeuronLTModule):
        super().__init__(llama, trained.nxd_config, torch.optim.SGD, None)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.tolist()


def test_lightnings_own_parts_work_on_two_ranks(tmp_path: Path):
    first, second = run_ranks(everything, 2, str(tmp_path))
    assert (first["guesses"], second["guesses"]) == ([[0, 2], [4]], [[1, 3]])
    assert {**first, "guesses": 0} == {**second, "guesses": 0}
    assert (first["epochs"], first["steps"]) == (2, 4)  # 16 rows, of which a step takes 2 on 2 ranks, twice
    assert first["kept"] == sorted(["last.ckpt", first["best"]])
    assert first["tested"]["test_loss"] == pytest.approx(first["score"], rel=1e-6)  # the best one was loaded
    (version,) = tmp_path.glob("logs/*/*")
    assert len({path.name.split(".")[-2] for path in version.glob("events*")}) == 1  # one process wrote them
    scalars = EventAccumulator(str(version)).Reload()
    assert [one.step for one in scalars.Scalars("loss")] == [1, 2, 3, 4]
    assert scalars.Scalars("loss")[-1].value == pytest.approx(first["metrics"]["loss"])
    assert [one.step for one in scalars.Scalars("val_loss")] == [2, 4]
    assert {"grad_norm", "global_step"} <= set(scalars.Tags()["scalars"])
    rates = {one.step: one.value for one in scalars.Scalars("lr-AdamW")}
    assert [rates[step] for step in (0, 1, 2)] == pytest.approx([1e-2, 0.9e-2, 0.81e-2])
    assert [tag for tag in scalars.Tags()["scalars"] if tag.startswith("lr-")] == ["lr-AdamW"]


# --- one rank ---------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_stays_until_the_next_is_complete(tmp_path: Path):
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(tags(tmp_path))

    keep = ModelCheckpoint(tmp_path, "{step}", monitor="global_step", mode="max", save_top_k=1, every_n_train_steps=1)
    strategy = NeuronXLAStrategy(async_save=True)
    one(strategy, keep, Looks(), enable_checkpointing=True, max_epochs=1).fit(small(), DataLoader(Rows(), 4))
    assert all(seen[2:]), seen  # the first one may still be written at the first looks
    assert tags(tmp_path) == ["step=4.ckpt"]


def test_a_scheduler_that_asks_for_the_number_of_steps_resumes_at_its_place(tmp_path: Path):
    """Lightning has prepared the loader before the checkpoint is read, and would start it anew."""

    class Asks(NeuronLTModule):
        def configure_optimizers(self) -> Any:
            self.scheduler_kwargs = {"total_steps": int(self.trainer.estimated_stepping_batches), "max_lr": 0.01}
            return super().configure_optimizers()

    def job(resume: str | None = None) -> Diary:
        torch.manual_seed(0)
        config = nxd.neuronx_distributed_config()
        module = Asks(llama, config, torch.optim.AdamW, torch.optim.lr_scheduler.OneCycleLR)
        diary = Diary()
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        one(None, diary, keep, enable_checkpointing=True).fit(
            module, DataLoader(Rows(), 4, shuffle=True), ckpt_path=resume
        )
        return diary

    whole, rest = job(), job(f"{tmp_path}/step=3.ckpt")
    assert (rest.rows, rest.losses) == (whole.rows[3:], whole.losses[3:])


def test_precision():
    for precision, dtype in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)):
        module, diary = small(), Diary()
        options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "max_epochs": 3, "callbacks": [diary]}
        trainer = Trainer(strategy=NeuronXLAStrategy(module.nxd_config), precision=precision, **options)
        trainer.fit(module, DataLoader(Rows(), 4))
        assert {param.dtype for param in module.model.parameters()} == {dtype}
        assert diary.losses[-1] < diary.losses[0]


def test_hyperparameters_that_cannot_be_stored_are_left_out(tmp_path: Path):
    class Noted(NeuronLTModule):
        def __init__(self, model_fn: Any, size: int):
            super().__init__(model_fn, nxd.neuronx_distributed_config(), torch.optim.SGD, None, opt_args=(0.1,))
            self.save_hyperparameters()

    trainer = one(max_epochs=1)
    trainer.fit(Noted(llama, 3), DataLoader(Rows(), 4))
    trainer.save_checkpoint(tmp_path / "noted")
    wait_for_save()
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    found = nxd.load_checkpoint(tmp_path, "noted")
    assert found["hyper_parameters"] == {"size": 3}


class Lonely(NeuronLTModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def refused() -> list[str]:
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config()
    lonely = Lonely(llama, config, torch.optim.SGD, None)
    told = []
    for action in (
        lambda: one(NeuronXLAStrategy(config)).fit(lonely, DataLoader(Rows(), 4)),
        lambda: Trainer(strategy=NeuronXLAStrategy(), devices=4, accelerator="cpu"),
    ):
        with pytest.raises(ParallelConfigError) as caught:
            action()
        told.append(str(caught.value))
    return told


def test_what_the_launched_ranks_are_refused():
    """An optimizer that would train each rank for itself, and devices that the launcher did not start."""
    for lonely, other in run_ranks(refused, 2):
        assert "returned 1 optimizer(s) (SGD): return one, of nxd_infer.initialize_parallel_optimizer()" in lonely
        assert other == "Trainer(devices=4, num_nodes=1), but 2 ranks were launched: leave devices out"
