"""torch_xla is truly there and runs our layers: a training step on its device is the CPU's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from nxd_infer.util.python_command import child_environment

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip("torch_xla is not installed; `make test-xla` runs these", allow_module_level=True)

SECONDS = 300
PROGRAM = """
import json, torch, torch_xla
from torch import nn
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear

def steps(device):
    torch.manual_seed(0)
    model = nn.Sequential(ColumnParallelLinear(8, 12, gather_output=False), nn.Tanh(), RowParallelLinear(12, 4))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rows, losses = torch.linspace(-1, 1, 24).reshape(3, 8).to(device), []
    for _ in range(4):
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses, loss.device.type

ours, kind = steps(torch_xla.device())
print(json.dumps({"xla": ours, "kind": kind, "cpu": steps("cpu")[0]}))
"""


def test_layers_train_on_its_device_as_on_the_cpu() -> None:
    environment = {**child_environment(), "PJRT_DEVICE": "CPU"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kind"] == "xla" and found["xla"][3] < found["xla"][0]
    assert found["xla"] == pytest.approx(found["cpu"], abs=1e-6)
