"""The ranks that exist before the Trainer does: of a process group, or of a launcher that sets RANK and WORLD_SIZE."""

from __future__ import annotations

import os

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from nxd_infer.comm.launched import launched_world
from nxd_infer.util.devices import group_exists


class LaunchedRanks(ClusterEnvironment):
    """This process's place among ranks that somebody else has started."""

    @staticmethod
    def detect() -> bool:
        return group_exists() or ("RANK" in os.environ and launched_world() > 1)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 0))

    def world_size(self) -> int:
        return dist.get_world_size() if group_exists() else launched_world()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank() if group_exists() else int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.global_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))
