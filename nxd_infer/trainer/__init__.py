"""Training: a configuration, a model wrapper and an optimizer wrapper.

::

    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd.initialize_parallel_model(nxd_config, get_model, config)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    loss = model.run_train(**batch)
    optimizer.step()
    optimizer.zero_grad()
"""

from nxd_infer.checkpoint import api as checkpoint  # trainer.checkpoint and trainer.model are names of the documents
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.source import gather_weights
from nxd_infer.modules import nxd_model as model
from nxd_infer.modules.nxd_model import NxDModel
from nxd_infer.trainer.config import TrainConfig, neuronx_distributed_config
from nxd_infer.trainer.data import ResumableLoader
from nxd_infer.trainer.optimizer import NxDOptimizer
from nxd_infer.trainer.progress import TrainingProgress
from nxd_infer.trainer.shutdown import shutdown
from nxd_infer.trainer.tensorboard import TensorBoardLogger
from nxd_infer.trainer.trainer import initialize_parallel_model, initialize_parallel_optimizer

__all__ = [
    "NxDModel", "NxDOptimizer", "ResumableLoader", "TensorBoardLogger", "TrainConfig", "TrainingProgress", "checkpoint",
    "gather_weights", "has_checkpoint", "initialize_parallel_model", "initialize_parallel_optimizer", "load_checkpoint",
    "model", "neuronx_distributed_config", "save_checkpoint", "shutdown", "wait_for_save",
]  # fmt: skip
