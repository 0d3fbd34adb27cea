"""The strategy: ranks, their groups and devices, their data, and what Lightning reduces over them.

Source: NxD Core training API, "Neuron XLA Strategy".
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor

from nxd_infer import compat
from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.random_state import random_state, restore_random_state
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.comm import functional as comm
from nxd_infer.comm.launched import launched_world, refuse_configured_xla, refuse_xla_device
from nxd_infer.comm.turns import largest
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.layout.files.values import pack
from nxd_infer.lightning.data import RankLoader, share_of
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.trainer.config import TrainConfig, initialize, require_degrees
from nxd_infer.util.devices import HOST, group_exists, transport_device

__all__ = ["NeuronXLAStrategy"]


class NeuronXLAStrategy(ParallelStrategy):
    """Trains over all ranks: tensor and pipeline parallel as configured, data parallel over the rest.

    The ranks are those of the process group or of the launcher (torchrun, Slurm). Without any, ``Trainer(devices=N)``
    starts ``N - 1`` more on this machine. They communicate over gloo, or over NCCL if each has a GPU.

    Every data-parallel rank gets its own part of each DataLoader's data, in the loader's order, and the ranks that
    share a model get the same. ``Trainer(use_distributed_sampler=False)``, and a DistributedSampler over
    ``data_parallel_size``, leave loaders as they are. A checkpoint of ``ModelCheckpoint`` is one of
    ``nxd_infer.save_checkpoint``; resumed at any step, training continues bit for bit.

    Args:
        nxd_config: what ``neuronx_distributed_config`` returns.
        tensor_parallel_size, pipeline_parallel_size: the degrees, if there is no ``nxd_config``.
        save_load_xser: all ranks write at the same time; False: eight.
        async_save: write checkpoints in the background, see ``save_checkpoint``.
        options: of ``ParallelStrategy``.

    Raises ParallelConfigError for degrees that differ from those of ``nxd_config``.

    For ``isinstance`` and ``issubclass`` it is one of Lightning's XLAStrategy, of which it has no code.
    """

    strategy_name = "neuron_xla"

    def __init__(
        self,
        nxd_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        save_load_xser: bool = True,
        *,
        async_save: bool = False,
        **options: Any,
    ):
        degrees = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        self.nxd_config = TrainConfig.of(degrees if nxd_config is None else nxd_config)
        for name, degree in degrees.items():
            if degree not in (1, self.nxd_config[name]):
                raise ParallelConfigError(f"{name}={degree}, but nxd_config has {self.nxd_config[name]}: leave it out")
        if options.get("cluster_environment") is None and LaunchedRanks.detect():
            options["cluster_environment"] = LaunchedRanks()
        super().__init__(**options)
        self.num_nodes = 1
        self._saving: dict[str, Any] = {"use_xser": save_load_xser, "async_save": async_save}
        self._unwanted: list[str] = []
        """Checkpoints to remove once a save that is being written is complete: until then they may be the only ones."""
        self._splits = True
        self._loaders: list[RankLoader] = []
        self._random: Any = None
        self._alone = False
        """Whether this rank has failed and the others have not: it must end without waiting for them."""

    # --- ranks ----------------------------------------------------------------------------------------

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that have data of their own."""
        return current_context().dp.degree

    @property
    def data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return current_context().dp.rank

    @property
    def num_processes(self) -> int:
        """Ranks on this machine, as ``Trainer(devices=)`` says."""
        return len(self.parallel_devices or [HOST])

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning reduces metrics over ranks."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank's model."""
        devices = self.parallel_devices or [HOST]
        return devices[min(self.local_rank, len(devices) - 1)]

    def set_world_ranks(self) -> None:
        """Tell Lightning this rank's number.

        Raises ParallelConfigError for XLA devices, and if the launcher started other ranks than the Trainer has.
        """
        refuse_xla_device(self.root_device)
        environment, here = self._environment, self.num_processes
        if not environment.creates_processes_externally:
            environment.set_global_rank(environment.node_rank() * here + environment.local_rank())
            environment.set_world_size(self.num_nodes * here)
        elif here > 1 and here * self.num_nodes != environment.world_size():
            raise ParallelConfigError(
                f"Trainer(devices={here}, num_nodes={self.num_nodes}), but {environment.world_size()} ranks were "
                "launched: leave devices out"
            )
        rank_zero_only.rank = self.global_rank

    @property
    def _environment(self) -> Any:
        assert self.cluster_environment is not None
        return self.cluster_environment

    def _configure_launcher(self) -> None:
        if self.num_processes > 1 and not self._environment.creates_processes_externally:
            self._launcher = RankLauncher(
                self._environment, self.num_processes, self.num_nodes, variables=self._variables
            )

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return what a rank of this machine finds the others by, and its share of the processors."""
        environment, here = self._environment, self.num_processes
        return {
            "MASTER_ADDR": str(environment.main_address),
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_nodes * here),
            "RANK": str(environment.node_rank() * here + local_rank),
            "LOCAL_RANK": str(local_rank),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // here)),
        }

    def setup_environment(self) -> None:
        """Join the other ranks, unless that is done.

        Raises ParallelConfigError for other degrees or devices, and NotInitializedError if PJRT_DEVICE asks for XLA's.
        """
        if not group_exists():
            refuse_configured_xla()  # one rank would train on the CPU without a word
        environment = self._environment
        if self.world_size > 1 and not group_exists():
            place = {"WORLD_SIZE": self.world_size, "RANK": self.global_rank, "LOCAL_RANK": self.local_rank}
            place |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": environment.main_port}
            os.environ.update({name: str(value) for name, value in place.items()})
        if self.world_size == 1 and not group_exists() and compat.is_installed():  # its scripts ask for ranks
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
        if self._launcher is not None and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(self._variables(0)["OMP_NUM_THREADS"]))
        initialize(self.nxd_config)
        require_degrees(self.nxd_config)
        several = self.world_size > 1 or transport_device() != HOST
        if group_exists() and several and transport_device().type != self.root_device.type:
            raise ParallelConfigError(
                f"the ranks communicate on {transport_device().type}, but Trainer(accelerator=) chose "
                f'{self.root_device.type}: leave accelerator out, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
            )
        if self._checkpoint_io is not None and type(self._checkpoint_io) is not TorchCheckpointIO:
            raise ParallelConfigError(
                f"{type(self._checkpoint_io).__name__} cannot save ranks that share a model: leave it out; "
                "NeuronXLAStrategy(async_save=True) writes in the background"
            )
        if current_context().tp.degree > 1 and any(isinstance(one, ModelPruning) for one in self._trainer.callbacks):
            raise ParallelConfigError(
                "ModelPruning chooses weights by their size within a tensor, of which each tensor-parallel rank has a "
                "part: prune the whole model before it is split, or train with tensor_parallel_size=1"
            )
        self._take_over_samplers()
        super().setup_environment()
        if (build := getattr(self._module, "build_model", None)) is not None:
            build()  # before any hook `setup`: callbacks that copy the model, or freeze parts of it, do so there

    # --- data -----------------------------------------------------------------------------------------

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _take_over_samplers(self) -> None:
        """Keep Lightning from shuffling the training data; for predictions, whose indices it notes, it splits."""
        connector = self._trainer._accelerator_connector
        if not hasattr(connector, "nxd_splits"):
            connector.nxd_splits = connector.use_distributed_sampler
        self._splits = connector.nxd_splits
        connector.use_distributed_sampler = self._splits and self._predicting

    @property
    def _predicting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.PREDICTING

    def process_dataloader(self, dataloader: object) -> object:
        """Give this rank its part of the batches."""
        if self._predicting:
            return dataloader
        mine = share_of(dataloader, current_context().dp, self._splits)
        if isinstance(mine, RankLoader) and self._trainer.training:
            self._loaders.append(mine)
        return mine

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._end_step()
        for loader in self._loaders:
            loader.batches.begin_step()

    def on_train_end(self) -> None:
        self._end_step()

    def _end_step(self) -> None:
        """Call what a script has given to the ``xm.add_step_closure`` of :mod:`nxd_infer.compat`."""
        if (steps := sys.modules.get("nxd_infer.compat.torch_xla.steps")) is not None:
            steps.sync()

    # --- model and optimizer --------------------------------------------------------------------------

    def model_to_device(self) -> None:
        self._module.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Raises ParallelConfigError for an optimizer that would train each rank for itself."""
        super().setup_optimizers(trainer)
        kinds = [type(one).__name__ for one in self.optimizers if not isinstance(one, NxDOptimizer)]
        if len(self.optimizers) > 1 or (kinds and current_context().world_size > 1):
            raise ParallelConfigError(
                f"configure_optimizers() returned {len(self.optimizers)} optimizer(s) "
                f"({', '.join(kinds) or 'parallel'}): return one, of nxd_infer.initialize_parallel_optimizer()"
            )

    def on_train_start(self) -> None:
        if self._random is not None:  # whatever was drawn since the checkpoint was loaded
            restore_random_state(self._random, "the loaded checkpoint")
            self._random = None

    # --- checkpoints ----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what the module holds beside its model, which has files of its own."""
        found = self._module.state_dict()
        return {name: value for name, value in found.items() if not name.startswith("model.")}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._module.load_state_dict(checkpoint["state_dict"], strict=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save under ``filepath``, a folder, all or nothing. Every rank calls it. Raises CheckpointError."""
        if self._trainer.state.status == TrainerStatus.INTERRUPTED and not self._all_are_interrupted():
            log.error("%s is not saved: a rank has failed, and the others hold the rest of it", filepath)
            return
        self._finish_saving()
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None
        folder, tag = os.path.split(self.broadcast(str(filepath)))
        kept = {name: value for name, value in checkpoint.items() if name != "optimizer_states"}
        for name in HPARAMS:
            if isinstance(kept.get(name), dict):
                kept[name] = _storable(kept[name])
        save_checkpoint(folder or ".", tag, self._module.model, optimizer, user_content=kept, **self._saving)

    def _all_are_interrupted(self) -> bool:
        """Whether every rank gets here within seconds, so that a save by all of them can end."""
        if self.world_size == 1 or not dist.is_initialized():
            return True
        store, key = dist.distributed_c10d._get_default_store(), f"nxd interrupted {self._trainer.global_step}"
        store.set(f"{key} {self.global_rank}", "")
        try:
            store.wait([f"{key} {rank}" for rank in range(self.world_size)], timedelta(seconds=LAST_SAVE_SECONDS))
        except RuntimeError:
            self._alone = True
            store.delete_key(f"{key} {self.global_rank}")  # whoever fails later need not wait for this one
        return not self._alone

    def load_checkpoint(self, checkpoint_path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Load the model and, to fit, the optimizer, the random state and the position; return Lightning's part.

        Raises CheckpointError for what is no checkpoint of a Trainer.
        """
        fits = self._trainer.state.fn == TrainerFn.FITTING
        path = str(checkpoint_path)
        folder, tag = (path, None) if os.path.exists(path) else (os.path.dirname(path) or ".", os.path.basename(path))
        self._finish_saving()
        if not has_checkpoint(folder, tag):
            raise CheckpointError(f"{path} is not a checkpoint of a Trainer with NeuronXLAStrategy")
        optimizer = self.optimizers[0] if fits and self.optimizers else None
        found = load_checkpoint(folder, tag, self._module.model, optimizer)
        if not isinstance(found, dict) or VERSION not in found:
            raise CheckpointError(f"{path} was not saved by a Trainer: load it with nxd_infer.load_checkpoint()")
        if fits:
            if self._trainer.max_steps != -1:
                begin_next_epoch(found["loops"]["fit_loop"])
            self._random = random_state()
            early = self._trainer.fit_loop._combined_loader
            if early is not None:  # by estimated_stepping_batches in configure_optimizers(); Lightning would restart it
                early._load_state_dicts(found["loops"]["fit_loop"]["state_dict"].get("combined_loader", []))
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._unwanted.append(str(filepath))
            if not self._saving["async_save"]:
                self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for an asynchronous save, then remove what is not wanted any more. Raises the save's CheckpointError."""
        wait_for_save()
        while self._unwanted:
            folder, tag = os.path.split(self._unwanted.pop())
            folders.remove(storage_of(folder or "."), tag)

    # --- collectives ----------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks: those that share a model have equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        op = str(reduce_op or "sum").rpartition(".")[2].lower()
        context = current_context()
        if op not in ("mean", "avg"):
            return comm.all_reduce(tensor, context, "dp", op)
        floating = tensor if tensor.is_floating_point() else tensor.float()
        return comm.all_reduce(floating, context, "dp") / context.dp.degree

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decided so."""
        if all:
            return not largest(current_context(), int(not decision))
        return bool(largest(current_context(), int(decision)))

    def barrier(self, name: str | None = None) -> None:
        if group_exists() and not self._alone:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not group_exists() or self.world_size == 1:
            return obj
        several = [obj]
        dist.broadcast_object_list(several, src, device=transport_device())
        return several[0]

    # --- the end --------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Wait for an asynchronous save. The model stays on its device, and the groups for the next call."""
        self._finish_saving()
        self._loaders.clear()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self._environment.teardown()


XLAStrategy.register(NeuronXLAStrategy)


def _choose_precision(connector: Any) -> Any:
    """Choose a Trainer's precision for NeuronXLAStrategy as for any strategy: Lightning would take XLA's."""
    strategy, plain = connector.strategy, isinstance(connector.strategy, NeuronXLAStrategy)
    connector.strategy = None if plain else strategy
    try:
        return _lightnings_choice(connector)
    finally:
        connector.strategy = strategy


_lightnings_choice = _AcceleratorConnector._check_and_init_precision
_AcceleratorConnector._check_and_init_precision = _choose_precision  # pyright: ignore


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the program again for each further rank of this machine, and ends all ranks if
    one fails. ``variables``: returns the environment variables of a rank, by its number on this machine.
    """

    def __init__(self, *place: Any, variables: Callable[[int], dict[str, str]]):
        super().__init__(*place)
        self._variables = variables

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` on all ranks: here directly, and elsewhere by the same program."""
        if self.procs:
            return function(*args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        if not os.path.exists(sys.argv[0]):
            raise ParallelConfigError(
                f"devices={self.num_processes} runs this program {self.num_processes} times, but an interactive "
                "session is not one: put it into a file, or start it with "
                f"`torchrun --nproc_per_node={self.num_processes}`"
            )
        for number in range(1, self.num_processes):
            environment = {**os.environ, **self._variables(number)}
            command = list(_basic_subprocess_cmd())  # this program, once more
            command[1:1] = compat.DOOR
            self.procs.append(subprocess.Popen(command, env=environment))  # nosec B603


class LaunchedRanks(TorchElasticEnvironment):
    """This process's place among ranks that somebody else has started: torchrun, or who made the process group."""

    @staticmethod
    def detect() -> bool:
        return group_exists() or ("RANK" in os.environ and launched_world() > 1)

    def world_size(self) -> int:
        return dist.get_world_size() if group_exists() else launched_world()

    def global_rank(self) -> int:
        return dist.get_rank() if group_exists() else int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.global_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))


log = logging.getLogger(__name__)

LAST_SAVE_SECONDS = 4.0
"""How long a rank with an exception waits for the others to have one, too, before it ends without a checkpoint."""
VERSION = "pytorch-lightning_version"
"""A key that every checkpoint of a Trainer has."""
HPARAMS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningModule.CHECKPOINT_HYPER_PARAMS_NAME)


def _storable(values: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without functions and others that only a pickle could store."""
    found = {}
    for name, value in values.items():
        try:
            pack(value, what=name)
        except CheckpointError:
            log.info("the checkpoint leaves out the hyperparameter %s, which cannot be stored", name)
        else:
            found[name] = value
    return found


def begin_next_epoch(fit_loop: dict[str, Any]) -> None:
    """Change the state of Lightning's loop, if it was saved at an epoch's end, to that of the next one's beginning.

    Resumed there with ``max_steps``, Lightning (2.5 and 2.6) would add a batch to the epoch that has ended.
    """
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counts in (epochs["current"], epochs["total"]):
            counts["completed"] = counts["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
