"""Train a recipe on this rank: steps, validations, checkpoints, logs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset

from nxd_infer import comm
from nxd_infer.comm.texts import gather_texts
from nxd_infer.context import current_context
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.parallel_layers.grads import Share, counted_spans, is_expert_parallel, total_norm
from nxd_infer.recipes import experiment
from nxd_infer.recipes.batches import Batches, sizes_of
from nxd_infer.recipes.checks import require_trainable
from nxd_infer.recipes.data.rows import Pairs
from nxd_infer.recipes.experiment import PREPARED, Keeper, Patience, log_dir_of, root_of
from nxd_infer.recipes.job import Job, begin_of, fitting, load_begin, make_job, write_merged
from nxd_infer.recipes.logs import Logs
from nxd_infer.recipes.models import CONFIG
from nxd_infer.recipes.preference import add_reference
from nxd_infer.recipes.prepare import Prepared, prepare
from nxd_infer.recipes.recipe import Loaded, time_limit
from nxd_infer.recipes.speed import Speed, Step
from nxd_infer.trainer import (
    ResumableLoader,
    TrainingProgress,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    wait_for_save,
)
from nxd_infer.trainer.first_rank import is_rank_zero
from nxd_infer.trainer.shutdown import give_up, outlast_save, shutdown
from nxd_infer.util.devices import transport_device
from nxd_server.text.tokenizer import Tokenizer

MODEL = "model"
"""The folder beside a job's checkpoints with its configuration and tokenizer: what a trace takes."""
SAMPLE_PROMPT = 16
"""Tokens of the validation data that a sample begins with."""
SAMPLE_PIECE = 64
"""Its length is a multiple of this, so that it divides over the ranks."""


@dataclass(frozen=True)
class Outcome:
    """What a job leaves. ``model`` is a model directory; it has weights if adapters were trained: the merged ones."""

    log_dir: Path
    model: Path
    checkpoints: Path


def train(loaded: Loaded, log_dir: Path | None = None, console: Console | None = None) -> Outcome:
    """Train on this rank; every rank of the job calls it. ``log_dir``: None where the first rank chooses it.

    ``console``: where the first rank shows its progress and says how it went; default: standard error.

    Raises RecipeError for what cannot be trained, before anything is written.
    """
    require_trainable(loaded)
    manager = loaded.recipe.exp_manager
    prepared = prepare(loaded, root_of(manager) / PREPARED)
    training = Training(loaded, prepared, log_dir, console)
    status = "failed"
    try:
        outcome = training.run()
        status = "success"
    finally:
        training.close(status)
    return outcome


class Training:
    """A job in progress."""

    def __init__(self, loaded: Loaded, prepared: Prepared, log_dir: Path | None, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False)
        self.loaded, self.recipe, self.prepared = loaded, loaded.recipe, prepared
        recipe = self.recipe
        alignment, self.pairs = recipe.model_alignment_strategy, recipe.model_alignment_strategy.pairs is not None
        self.dp, self.parts = recipe.data_parallel_size, recipe.microbatches
        rows = recipe.data.micro_batch_size * self.parts
        whole_step = rows * self.dp
        train: Dataset = prepared.train
        count = len(train)  # pyright: ignore[reportArgumentType]
        if count < whole_step:
            had = f"the data has {count} rows of {recipe.seq_length} tokens; the nearest is {max(1, count)}"
            raise loaded.tree.error("data.global_batch_size", f"= {whole_step}, but {had}")
        trainer = recipe.trainer
        epoch = count // whole_step
        self.steps = min((n for n in (trainer.max_steps, trainer.max_epochs * epoch) if n > 0), default=0)
        begin = begin_of(loaded)
        self.job: Job = make_job(loaded, prepared.model, begin, self.steps or epoch)
        self.context = current_context()
        self.device = next(self.job.model.parameters()).device
        self.log_dir = self._agreed_log_dir(log_dir)
        shuffle = recipe.data.shuffle
        if shuffle is None:
            shuffle = not loaded.recipe.is_pretraining or recipe.data.dataloader_type == "cyclic"
        self.loader = ResumableLoader(train, rows, shuffle=shuffle, seed=recipe.seed)
        self.step, self.saved_at = 0, time.monotonic()
        self.seconds_left = time_limit(loaded)
        self.keeper = Keeper(recipe.exp_manager.checkpoint_callback_params, self.log_dir)
        self.patience = Patience(recipe.exp_manager.early_stopping_callback_params)
        self.metrics: dict[str, float] = {}
        self.recovered = False
        resumes = recipe.exp_manager.resume_if_exists and has_checkpoint(self.keeper.folder)
        manager = recipe.exp_manager
        if manager.resume_if_exists and not (resumes or manager.resume_ignore_no_checkpoint):
            problem = f"= False: {self.keeper.folder} has no checkpoint to resume from"
            raise loaded.tree.error("exp_manager.resume_ignore_no_checkpoint", problem)
        if not resumes or alignment.peft is not None:
            load_begin(loaded, self.job, begin, weights_only=resumes)
        if alignment.dpo is not None:
            named = (("train", train), ("validation", prepared.validation))
            sets = {name: pairs for name, pairs in named if isinstance(pairs, Pairs)}
            add_reference(self.job.model, sets, self.log_dir, self._autocast, fresh=not resumes)
        if resumes:
            self._resume()
        raw = json.loads((prepared.model / CONFIG).read_text())
        if is_rank_zero():  # now: a start that cannot go on leaves the folder as it was
            experiment.write_recipe(loaded, self.log_dir)
            shutil.copytree(prepared.model, self.log_dir / MODEL, dirs_exist_ok=True)
            named = {"dtype": str(self.job.kinds.weights).removeprefix("torch.")}
            kept = {name: value for name, value in raw.items() if name != "torch_dtype"}
            (self.log_dir / MODEL / CONFIG).write_text(json.dumps(kept | named, indent=1))
        pipelined = self.context.pp.degree > 1
        self.batches = Batches(type(self._plain()).forward, self.context, self.parts, pairs=self.pairs, whole=pipelined)
        self.logs = Logs(recipe.exp_manager, self.log_dir, self.step)
        self.speed = Speed(self.job.model, raw, self.job.kinds.products, recipe.world_size)

    # --- beginning --------------------------------------------------------------------------------------

    def _agreed_log_dir(self, given: Path | None) -> Path:
        """Return the first rank's choice, on every rank."""
        text = str(given or log_dir_of(self.recipe.exp_manager))
        for axis in ("tp", "dp", "pp"):
            text = gather_texts(text, self.context, axis)[0]
        return Path(text)

    def _plain(self) -> nn.Module:
        module = self.job.model.local_module()
        return module.get_base_model() if isinstance(module, LoRAModel) else module

    def _resume(self) -> None:
        job = self.job
        with fitting(self.loaded, "resume_if_exists", self.keeper.newest):
            content = load_checkpoint(
                self.keeper.folder,
                model=job.model,
                optimizer=job.optimizer,
                scheduler=job.scheduler,
                dataloader=self.loader,
            )
        self.step, self.recovered = content["step"], True
        self.patience.best, self.patience.waited = content["best"], content["waited"]
        self.metrics = content["metrics"]

    # --- the loop ---------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the end, save, and return where everything is."""
        trainer, manager = self.recipe.trainer, self.recipe.exp_manager
        deadline = time.monotonic() + self.seconds_left
        done = bool(self.steps) and self.step >= self.steps
        before = self.step
        for note in self.prepared.notes:
            self._say(f"note: {note}")
        if self.recovered and not done:
            self._say(f"going on at step {self.step} of {self.keeper.newest}")
        if trainer.num_sanity_val_steps and not self.recovered and not done:
            self.validate(trainer.num_sanity_val_steps)
        saved = self.step if self.recovered else -1
        total = None if done or not self.steps else self.steps
        progress = TrainingProgress(total, initial=self.step, description=self.recipe.name, console=self.console)
        if not trainer.enable_progress_bar:
            progress.close()
        with progress:
            while not done:
                for batch in self.loader:
                    taken = self.train_step(batch)
                    progress.step(taken.loss, tokens=int(taken.tokens))
                    self._log_step(taken)
                    late = deadline < math.inf and self._agreed(time.monotonic() > deadline)
                    done = late or (bool(self.steps) and self.step >= self.steps)
                    ended = self._ended_epoch()
                    validated = self._validates(ended, last=done and not late)
                    if validated:
                        value = self.validate()
                        if manager.create_early_stopping_callback and value is not None:
                            done = done or self.patience.stops(self.metrics[self.patience.options.monitor])
                    if self._saves(validated, ended) and not done:
                        saved = self.save()
                    if done:
                        break
                if trainer.max_epochs > 0 and self.loader.epoch >= trainer.max_epochs:
                    done = True
        if self._keeps():
            if saved != self.step:
                self.save()
            wait_for_save()
            if is_rank_zero():
                self.keeper.prune()
        write_merged(self.job.model, self.log_dir / MODEL)
        reached = "max_steps" if self.steps == trainer.max_steps else "max_epochs"
        nothing = f"nothing to do: trainer.{reached} = {getattr(trainer, reached)} is reached in {self.log_dir}"
        self._say(f"trained {self.recipe.name}: {self.log_dir}" if self.step > before else nothing)
        return Outcome(self.log_dir, self.log_dir / MODEL, self.keeper.folder)

    def _say(self, text: str) -> None:
        if is_rank_zero():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def train_step(self, batch: dict[str, Tensor]) -> Step:
        """Train on this rank's rows of a step."""
        begin = time.perf_counter()
        model, optimizer = self.job.model, self.job.optimizer
        rate = optimizer.param_groups[0]["lr"]
        losses = []
        for part in self.batches.prepared(batch, self.device):
            with self._autocast():
                losses.append(model.run_train(**part))
        optimizer.step()
        optimizer.zero_grad()
        self.job.scheduler.step()
        self.step += 1
        loss = torch.stack(losses).sum().double()
        totals = torch.cat([loss[None] / self.dp, sizes_of(batch).to(loss.device)])
        loss, tokens, squares = comm.all_reduce(totals, self.context, "dp").unbind()
        return Step(loss, rate, time.perf_counter() - begin, tokens, squares)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.kinds.autocast):
            yield

    def _agreed(self, here: bool) -> bool:
        """Whether it is so on the first rank: clocks differ, and all ranks do the same."""
        flag = torch.tensor([int(here)], device=transport_device())
        for axis in ("tp", "dp", "pp"):
            flag = comm.broadcast(flag, self.context, axis)
        return bool(flag)

    def _ended_epoch(self) -> int | None:
        """Return the number of the epoch, from 1, that ends with the last step; None within one."""
        whole = len(self.loader) * self.loader.batch_size * self.dp
        return self.loader.epoch + 1 if self.loader.state_dict()["samples"] >= whole else None

    # --- numbers ----------------------------------------------------------------------------------------

    def _log_step(self, taken: Step) -> None:
        manager = self.recipe.exp_manager
        self.metrics.pop("val_loss", None)  # it is of the weights before
        self.metrics |= {"step": self.step, "consumed_samples": self.step * self.recipe.data.global_batch_size}
        logged = self.step % self.recipe.trainer.log_every_n_steps == 0
        if logged or experiment.watches_loss(manager):
            self.metrics["train_loss"] = self.metrics["reduced_train_loss"] = float(taken.loss)
        if not logged:
            return
        numbers: dict[str, float | Tensor | None] = {
            "loss": taken.loss,
            "lr": taken.rate,
            "consumed_samples": self.metrics["consumed_samples"],
            "tokens_per_second": self.speed.tokens_per_second(taken),
        }
        if manager.log_gradient_norm:
            numbers["gradient_norm"] = self.job.optimizer.grad_norm
        if manager.log_parameter_norm:
            numbers["parameter_norm"] = self.parameter_norm()
        if manager.log_step_timing:
            numbers["seconds_per_step"] = taken.seconds
            numbers["mfu"] = self.speed.mfu(taken)
        if manager.enable_recovery_time_instrumentation and self.recovered:
            numbers["recovery_seconds"] = time.time() - psutil.Process().create_time()
            self.recovered = False
        self.logs.log(self.step, numbers)

    def parameter_norm(self) -> Tensor:
        """Return the 2-norm of all parameters. Every rank calls it."""
        shares = [
            Share(param.detach(), counted_spans(param), "ep" if is_expert_parallel(param) else None)
            for param in self.job.model.parameters()
        ]
        return total_norm(shares, 2.0, self.context)

    # --- validation -------------------------------------------------------------------------------------

    def _validates(self, ended: int | None, last: bool) -> bool:
        if self.prepared.validation is None or self.recipe.trainer.limit_val_batches == 0:
            return False
        return experiment.validates(self.recipe.trainer, self.step, len(self.loader), ended, last)

    def validate(self, most: int | None = None) -> float | None:
        """Return the loss over the validation data, as on every rank; None without any."""
        rows = self.prepared.validation
        if rows is None:
            return None
        loader = ResumableLoader(rows, self._validation_rows(rows))
        limit = self.recipe.trainer.limit_val_batches
        count = limit if isinstance(limit, int) else max(1, round(min(limit, 1.0) * len(loader)))
        count = min(len(loader), count if most is None else most)
        total = weight = 0.0
        for _, batch in zip(range(count), loader, strict=False):
            parts = self.batches.prepared(batch, self.device, loader.batch_size // self.recipe.data.micro_batch_size)
            with self._autocast():
                losses = torch.stack([self.job.model.run_eval(**part) for part in parts])
            loss = comm.all_reduce(losses.detach().sum()[None], self.context, "dp") / self.dp
            share = 1.0 if self.pairs else float(self.batches.items(batch["labels"].to(self.device)))
            total, weight = total + float(loss) * share, weight + share
        self.metrics["val_loss"] = total / weight
        self.logs.log(self.step, {"val_loss": self.metrics["val_loss"]})
        tokens = self.recipe.exp_manager.generate_samples
        if tokens and not self.pairs and self.context.pp.degree == 1:
            text = sample(self._plain(), self.prepared.model, rows[0]["input_ids"], tokens, self.device)
            self.logs.text(self.step, "sample", text)
        return self.metrics["val_loss"]

    def _validation_rows(self, rows: Dataset) -> int:
        """Return the rows per rank of a validation's batch: as in training, or as many as there are."""
        count = len(rows)  # pyright: ignore[reportArgumentType]
        least = self.recipe.data.micro_batch_size * (self.parts if self.context.pp.degree > 1 else 1)
        wanted = self.recipe.data.micro_batch_size * self.parts
        if count >= wanted * self.dp:
            return wanted
        if count < least * self.dp:
            problem = f"has {count} rows, which do not fill a batch of {least * self.dp}"
            raise self.loaded.tree.error("data.val_dir", problem)
        return least

    # --- checkpoints ------------------------------------------------------------------------------------

    def _keeps(self) -> bool:
        manager = self.recipe.exp_manager
        return manager.create_checkpoint_callback and manager.checkpoint_callback_params.save_top_k != 0

    def _saves(self, validated: bool, ended: int | None) -> bool:
        callback = self.recipe.exp_manager.checkpoint_callback_params
        interval = callback.train_time_interval
        late = interval is not None and self._agreed(time.monotonic() - self.saved_at >= interval)
        return self._keeps() and experiment.saves(callback, self.step, ended, late, validated)

    def save(self) -> int:
        """Save a checkpoint, and remove those that do not stay; return its step."""
        callback, job = self.recipe.exp_manager.checkpoint_callback_params, self.job
        numbers = {**self.metrics, "epoch": self.loader.epoch}
        tag = experiment.checkpoint_name(callback, numbers)
        if is_rank_zero():
            monitor = "step" if callback.monitor == "global_step" else callback.monitor
            self.keeper.add(tag, numbers.get(monitor, math.nan))
        waiting = {"best": self.patience.best, "waited": self.patience.waited}
        self.logs.flush()  # a job that goes on behind this step writes none of them again
        save_checkpoint(
            self.keeper.folder,
            tag,
            model=job.model,
            optimizer=job.optimizer,
            scheduler=job.scheduler,
            dataloader=self.loader,
            user_content={"step": self.step, "metrics": self.metrics, **waiting},
            use_xser=self.recipe.exp_manager.save_xser,
            async_save=self.recipe.exp_manager.async_checkpointing,
        )
        if is_rank_zero():
            self.keeper.prune()
        self.saved_at = time.monotonic()
        return self.step

    def close(self, status: str) -> None:
        """Close the logs, wait for all ranks, and leave the process group; after a failure only for a save."""
        self.logs.close(status)
        if status == "success":
            shutdown()
        else:
            give_up(self.context)
            outlast_save(self.keeper.folder, self.context.rank)


@torch.no_grad()
def sample(model: nn.Module, model_dir: Path, ids: Tensor, count: int, device: torch.device) -> str:
    """Return the start of ``ids`` and ``count`` further tokens, the likeliest each, as text. Every rank calls it."""
    training = model.training
    model.eval()
    begin = min(SAMPLE_PROMPT, len(ids))
    known = torch.zeros(1, -(-(begin + count) // SAMPLE_PIECE) * SAMPLE_PIECE, dtype=torch.int64, device=device)
    known[0, :begin] = ids[:begin]  # a causal model does not see the zeros after it
    try:
        for place in range(begin, begin + count):
            known[0, place] = model(known)[0, place - 1].argmax()
    finally:
        model.train(training)
    found = known[0, : begin + count].tolist()
    try:
        return Tokenizer.from_dir(model_dir).decode(found)
    except ValueError:  # token ids alone
        return " ".join(map(str, found))
