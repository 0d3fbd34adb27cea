"""The reference of DPO: what the model that the training begins with says of every pair, computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import RecipeError
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.recipes.data.rows import Pairs
from nxd_infer.recipes.job import Job
from nxd_infer.recipes.preference import PreferenceModel
from nxd_infer.trainer.first_rank import is_rank_zero

FILE = "reference.safetensors"
AT_A_TIME = 4
"""Pairs of one pass."""


def add_reference(
    job: Job,
    sets: Mapping[str, Pairs],
    log_dir: Path,
    autocast: Callable[[], AbstractContextManager[None]],
    fresh: bool,
) -> None:
    """Give each set the log-probabilities [pairs, 2] of its answers. Every rank calls it.

    A first start (``fresh``) computes them, each data-parallel rank its share, and keeps them in ``log_dir``; a resumed
    job, whose model has moved on, reads them there.
    """
    path = log_dir / FILE
    if fresh:
        found = {name: _computed(job, pairs, autocast) for name, pairs in sets.items()}
        if is_rank_zero():
            log_dir.mkdir(parents=True, exist_ok=True)
            save_file(found, path)
    elif path.is_file():
        found = load_file(path)
    else:
        raise RecipeError(f"{path} is missing: the reference's probabilities are those of the job's first start")
    for name, pairs in sets.items():
        if name not in found or len(found[name]) != len(pairs):
            raise RecipeError(f"{path} is of other data than the recipe's {name} data: start a new version")
        pairs.reference = found[name]


@torch.no_grad()
def _computed(job: Job, pairs: Pairs, autocast: Callable[[], AbstractContextManager[None]]) -> Tensor:
    context = current_context()
    module = job.model.local_module()
    model = module.get_base_model() if isinstance(module, LoRAModel) else module
    assert isinstance(model, PreferenceModel)
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    found = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    mine = range(context.dp.rank, len(pairs), context.dp.degree)
    for at in range(0, len(mine), AT_A_TIME):
        numbers = list(mine[at : at + AT_A_TIME])
        rows = [pairs[number] for number in numbers]
        batch = {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}
        with autocast():
            answers = model.answers(**batch)
        found[numbers] = answers.total.double()
    model.train(training)
    return comm.all_reduce(found, context, "dp").float().cpu()
