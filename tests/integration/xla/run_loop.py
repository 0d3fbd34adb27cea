"""A training loop as neuronx_distributed's users wrote it, on the real torch_xla: ``run_loop.py PLACE BACKEND METHOD``.

PLACE: "xla", the device that torch_xla gives this process, or "cpu"; "plain": plain PyTorch, without the others.
Prints "losses" and those of the first rank.
"""

import json
import sys
import tempfile

import neuronx_distributed as nxd
import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend  # noqa: F401
from neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_state,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

IDS = torch.randint(16, (4, 3, 5), generator=torch.Generator().manual_seed(1))
LABELS = (IDS + 1) % 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = ParallelEmbedding(16, 8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.head = ColumnParallelLinear(8, 16, bias=False, gather_output=False)

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return parallel_cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()).mean()


def train(place, backend, method):
    torch.distributed.init_process_group(backend, init_method=method)
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=torch.distributed.get_world_size(),
        optimizer_config={"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 0.5},
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, Net)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)
    batches = [{"input_ids": rows, "labels": labels} for rows, labels in zip(IDS, LABELS, strict=True)]
    losses = []
    for batch in pl.MpDeviceLoader(batches, xm.xla_device()) if place == "xla" else batches:
        loss = model(**batch)
        assert loss.device.type == place
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if place == "xla":
        save_and_load(model)
    return [loss.item() for loss in losses] if parallel_state.get_tensor_model_parallel_rank() == 0 else None


def save_and_load(model):
    before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        nxd.save_checkpoint(folder, "end", model=model)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        nxd.load_checkpoint(folder, "end", model=model)
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in model.state_dict().items())


def train_plainly():
    torch.manual_seed(0)
    w = {name: param.detach().clone().requires_grad_() for name, param in Net().named_parameters()}
    optimizer, losses = torch.optim.AdamW(w.values(), lr=0.01), []
    for rows, labels in zip(IDS, LABELS, strict=True):
        hidden = F.embedding(rows, w["embedding.weight"])
        inner = torch.relu(F.linear(hidden, w["up.weight"], w["up.bias"]))
        hidden = hidden + F.linear(inner, w["down.weight"], w["down.bias"])
        loss = F.cross_entropy(F.linear(hidden, w["head.weight"]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


found = train_plainly() if sys.argv[1] == "plain" else train(*sys.argv[1:])
if found is not None:
    print(f"losses {json.dumps(found)}", flush=True)
