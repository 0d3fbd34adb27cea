"""What a process that compiles a graph imports, most of it late: such processes are forked from one that has it."""

from __future__ import annotations

import torch._inductor.compile_fx
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.pad_mm
import torch.export._trace  # noqa: F401  # in a fork it is there already

from nxd_infer.backends.cpu import compiling

__all__ = ["compiling"]
