"""What ranks of tests are forked with: torch's compiler is what any optimizer's first step imports."""

# ruff: noqa: F401
from __future__ import annotations

import torch._dynamo
import torch.distributed

import nxd_infer.parallel_state
import nxd_infer.trainer
import tests.support.ranks
