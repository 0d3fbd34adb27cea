"""The "Sample usage" of the training API and of the API reference, a job that is started twice: the second resumes.

    torchrun --nproc_per_node=2 -m nxd_infer.compat sample_usage.py 2

The degree is the argument; ``for`` stands where the documents say "(training loop):". No process group is initialised.
"""

import sys

import torch
from model import get_model, tokens
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

total_steps = 0
torch.manual_seed(0)

import neuronx_distributed as nxd

# create config
nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=int(sys.argv[1]),
    optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
)

# every data-parallel rank its rows
inputs = tokens().chunk(nxd.parallel_state.get_data_parallel_size())[nxd.parallel_state.get_data_parallel_rank()]

# wrap model
model = nxd.initialize_parallel_model(nxd_config, get_model)

# wrap optimizer
optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-3)

scheduler = StepLR(optimizer, 1, 0.5)

# loading checkpoint (auto-resume)
user_content = nxd.load_checkpoint("ckpts", model=model, optimizer=optimizer, scheduler=scheduler)

for _ in range(2):
    loss = model.run_train(inputs)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    total_steps += 1

# saving checkpoint
nxd.save_checkpoint(
    "ckpts",
    nxd_config=nxd_config,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    user_content={"total_steps": total_steps},
)

dp, tp = nxd.parallel_state.get_data_parallel_size(), nxd.parallel_state.get_tensor_model_parallel_size()
line = f"found {user_content} loss {loss.item():.6f} lr {scheduler.get_last_lr()[0]} dp {dp} tp {tp}"
sys.stdout.write(line + "\n")  # at once: the processes share it
