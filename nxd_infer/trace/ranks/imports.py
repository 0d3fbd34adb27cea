"""What a rank process of func mode imports, with what the first export would import: ranks are forked from a process
that has it."""

from __future__ import annotations

import torch._dynamo
import torch.export._trace
import torch.onnx  # noqa: F401  # in a fork it is there already

from nxd_infer.trace.ranks import process_main

__all__ = ["process_main"]
