"""The LightningModule of a parallel model.

Source: NxD Core training API, "Neuron Lightning Module".
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.lightning.strategy import NeuronXLAStrategy
from nxd_infer.modules.nxd_model import NxDModel
from nxd_infer.optimizer.groups import class_of
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.pipeline.pipeline import mean_over_data
from nxd_infer.trainer.config import TrainConfig
from nxd_infer.trainer.trainer import initialize_parallel_model, initialize_parallel_optimizer
from nxd_infer.util.options import whole_number

__all__ = ["NeuronLTModule"]

NONE_GIVEN: Mapping[str, Any] = MappingProxyType({})
NO_DECAY = ("bias", "LayerNorm")
BESIDE_THE_POINT = ("Using ModelCheckpoint with manual optimization", "You defined a `validation_step` but have no")
"""Lightning's warnings that a checkpoint holds the weights after the step, as it should, and of a step that is ours."""


class NeuronLTModule(LightningModule):
    """Builds ``model_fn(*model_args, **model_kwargs)`` over all ranks, and trains it, with NeuronXLAStrategy.

    ``model`` is the model of ``initialize_parallel_model``; it exists from ``setup`` on. ``training_step`` runs forward
    and backward of a batch (a mapping, a sequence or a tensor: the model's arguments) and, after ``grad_accum_steps``
    of them or at the end of an epoch, the optimizer and the scheduler. It logs ``loss``, the mean over all of that
    step's rows, ``grad_norm`` and ``global_step``. ``validation_step`` and ``test_step`` log ``val_loss`` and
    ``test_loss``, and ``predict_step`` returns the model's output. Override what should be different; optimization is
    manual, as Lightning names it.

    Args:
        model_fn: builds the model, or the whole of it on every rank of a pipeline.
        nxd_config: what ``neuronx_distributed_config`` returns. Clipping is ``max_grad_norm`` of its
            ``optimizer_config``.
        opt_cls: a ``torch.optim`` class or a ``functools.partial`` of one, called with the parameters, ``opt_args`` and
            ``opt_kwargs``.
        scheduler_cls: called with the optimizer, ``scheduler_args`` and ``scheduler_kwargs``; steps with the optimizer
            (ReduceLROnPlateau by its loss). None: a constant rate.
        grad_accum_steps: batches whose gradients a step averages. With a pipeline it must be 1: ``num_microbatches``
            does the same.
        log_rank0: accepted. Every rank has the loss, and rank 0 logs, without further communication.
        manual_opt: must be True.
        train_batch_size: accepted. A batch says how many rows it has.
        logging_interval: the optimizer steps of which one is logged.

    Raises ParallelConfigError for numbers below 1, ``manual_opt=False``, and ``opt_args`` that ``opt_cls`` does not
    have.
    """

    model: NxDModel

    def __init__(
        self,
        model_fn: Callable[..., nn.Module],
        nxd_config: Mapping[str, Any],
        opt_cls: type[torch.optim.Optimizer],
        scheduler_cls: Callable[..., Any] | None,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] = NONE_GIVEN,
        opt_args: Sequence[Any] = (),
        opt_kwargs: Mapping[str, Any] = NONE_GIVEN,
        scheduler_args: Sequence[Any] = (),
        scheduler_kwargs: Mapping[str, Any] = NONE_GIVEN,
        grad_accum_steps: int = 1,
        log_rank0: bool = False,
        manual_opt: bool = True,
        *,
        train_batch_size: int = 16,
        logging_interval: int = 1,
    ):
        super().__init__()
        if not manual_opt:
            raise ParallelConfigError("manual_opt=False is not supported: leave it out, or pass True")
        whole_number("grad_accum_steps", grad_accum_steps, ParallelConfigError, minimum=1)
        whole_number("logging_interval", logging_interval, ParallelConfigError, minimum=1)
        self.nxd_config = TrainConfig.of(nxd_config)
        if grad_accum_steps > 1 and self.nxd_config.pipeline_parallel_size > 1:
            raise ParallelConfigError(
                f"grad_accum_steps={grad_accum_steps} with a pipeline: pass batches {grad_accum_steps} times as large "
                "and pipeline_config={'num_microbatches': ...}, which accumulates over its microbatches"
            )
        self.automatic_optimization = False
        self.model_fn, self.model_args, self.model_kwargs = model_fn, tuple(model_args), dict(model_kwargs)
        self.opt_cls, self.opt_args, self.opt_kwargs = opt_cls, tuple(opt_args), dict(opt_kwargs)
        self.scheduler_cls = scheduler_cls
        self.scheduler_args, self.scheduler_kwargs = tuple(scheduler_args), dict(scheduler_kwargs)
        self.grad_accum_steps, self.log_rank0 = grad_accum_steps, log_rank0
        self.train_batch_size, self.logging_interval = train_batch_size, logging_interval
        self.averaged_loss: Tensor
        self.register_buffer("averaged_loss", torch.zeros(()), persistent=False)
        self.loss: Tensor | None = None
        """Loss of the last optimizer step, averaged over its batches and the data-parallel ranks."""
        self.should_print = False
        """Whether the last batch ended with an optimizer step."""

    # --- building -------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Build the model, once. Raises ParallelConfigError for another strategy."""
        if not isinstance(self.trainer.strategy, NeuronXLAStrategy):
            raise ParallelConfigError(
                f"{type(self).__name__} cannot train with {type(self.trainer.strategy).__name__}, which knows nothing "
                "of its ranks: pass Trainer(strategy=NeuronXLAStrategy(nxd_config))"
            )
        for text in BESIDE_THE_POINT:
            warnings.filterwarnings("ignore", text)
        self.build_model()

    def build_model(self) -> None:
        """Build the model over the ranks, unless it exists. The strategy does so before any callback's ``setup``."""
        if "model" not in self._modules:
            self.model = initialize_parallel_model(
                self.nxd_config, self.model_fn, *self.model_args, **self.model_kwargs
            )

    def configure_optimizers(self) -> Any:
        """Return the parallel optimizer of all parameters that are not frozen, and its scheduler."""
        trained = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = initialize_parallel_optimizer(
            self.nxd_config, self.opt_cls, trained, **self._named_opt_args(), **self.opt_kwargs
        )
        if self.scheduler_cls is None:
            return optimizer
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        return [optimizer], [{"scheduler": scheduler, "name": f"lr-{_name_of(self.opt_cls)}"}]

    def _named_opt_args(self) -> dict[str, Any]:
        names = list(inspect.signature(self.opt_cls).parameters)[1:]
        if len(self.opt_args) > len(names):
            raise ParallelConfigError(
                f"opt_args has {len(self.opt_args)} values, but {_name_of(self.opt_cls)} takes {len(names)} after the "
                "parameters"
            )
        return dict(zip(names, self.opt_args, strict=False))

    def get_param_groups_by_weight_decay(self) -> list[dict[str, Any]]:
        """Return the parameters in two groups: those decayed by 0.01; biases and LayerNorms, which are not."""
        named = list(self.model.named_parameters())
        decayed = [param for name, param in named if not any(part in name for part in NO_DECAY)]
        rest = [param for name, param in named if any(part in name for part in NO_DECAY)]
        return [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises CheckpointError: the model is built when a Trainer sets it up."""
        raise CheckpointError(
            f"{cls.__name__}.load_from_checkpoint() cannot build the model, which a Trainer sets up over its ranks: "
            "build the module and pass ckpt_path=... to fit(), validate(), test() or predict() of a Trainer, or load "
            "the weights alone into module.model with nxd_infer.load_checkpoint(ckpt_path, model=module.model)"
        )

    # --- steps ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Train on a batch; return its loss, detached."""
        loss = self._forward_and_backward(batch)
        self.averaged_loss += loss
        batches = batch_idx % self.grad_accum_steps + 1
        self.should_print = batches == self.grad_accum_steps or self.trainer.is_last_batch
        if self.should_print:
            self.loss = mean_over_data(self.averaged_loss / batches, current_context())
            self._step()
            self.averaged_loss = torch.zeros_like(self.averaged_loss)
            self.log("loss", self.loss, prog_bar=True)
            self.log("global_step", float(self.global_step))
        logs = self.should_print and self.global_step % self.logging_interval == 0
        self._log_under(self.global_step if logs else -1)
        return loss

    def _log_under(self, step: int) -> None:
        """Tell the loggers the step of what follows; -1: it is not written."""
        for logger in self.trainer.loggers:
            logger.print_step = step  # pyright: ignore

    def _forward_and_backward(self, batch: Any) -> Tensor:
        """Return the loss of a batch; its gradients are weighted for the step that it is a part of."""
        if self.nxd_config.pipeline_parallel_size > 1:  # its stages go backward microbatch by microbatch
            return _mean(_call(self.model.run_train, batch))
        loss = self.model._loss(_call(self.model, batch))
        # Lightning's own, which calls the hooks on_before_backward and on_after_backward.
        self.manual_backward(loss if self.grad_accum_steps == 1 else loss / self.grad_accum_steps)
        return loss.detach()

    def _step(self) -> None:
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, ReduceLROnPlateau):
            assert self.loss is not None  # of this step
            scheduler.step(float(self.loss))
        elif scheduler is not None and not isinstance(scheduler, SWALR):
            scheduler.step()
        if isinstance(optimizer.optimizer, NxDOptimizer):  # LearningRateMonitor reads the wrapped optimizer's rate
            optimizer.optimizer.hand_on_hyperparameters()
        norm = getattr(optimizer, "grad_norm", None)
        if norm is not None:
            self.log("grad_norm", norm)

    def on_train_epoch_end(self) -> None:
        """Step the scheduler that StochasticWeightAveraging has put in, which counts epochs."""
        if isinstance(scheduler := self.lr_schedulers(), SWALR):
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val_loss``."""
        self._evaluate("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test_loss``."""
        self._evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's output for a batch. A pipeline has none, so there it must be overridden."""
        return _call(self.model, batch)

    def _evaluate(self, name: str, batch: Any) -> None:
        loss = _mean(_call(self.model.run_eval, batch))
        self._log_under(self.global_step)  # also while gradients are accumulated
        self.log(name, loss, prog_bar=True, sync_dist=True, batch_size=_rows(batch))


def _name_of(opt_cls: Any) -> str:
    kind = class_of(opt_cls)
    return getattr(kind, "__name__", type(kind).__name__)


def _call(function: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(*batch) if isinstance(batch, Sequence) else function(batch)


def _mean(loss: Tensor | list[Tensor]) -> Tensor:
    """The loss of a batch; with ``return_mb_loss`` there is one for each of its microbatches."""
    return torch.stack(loss).mean() if isinstance(loss, list) else loss


def _rows(batch: Any) -> int:
    """The size of the first tensor of a batch along its first dimension; 1 without tensors."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), 1)
