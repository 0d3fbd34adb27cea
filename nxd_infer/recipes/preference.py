"""Preference losses: a causal language model whose loss compares a chosen with a rejected answer.

Sources: Rafailov et al., "Direct Preference Optimization" (sigmoid); Zhao et al., "SLiC-HF" (hinge); Azar et al., "A
General Theoretical Paradigm to Understand Learning from Human Preferences" (ipo); Hong et al., "ORPO".

The reference of DPO is the model that the training begins with: what it says of every pair is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import RecipeError
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.data.rows import Pairs
from nxd_infer.recipes.schema import Dpo, Orpo
from nxd_infer.trainer import NxDModel
from nxd_infer.trainer.first_rank import is_rank_zero

REFERENCE = "reference.safetensors"
AT_A_TIME = 4
"""Pairs of one pass."""


@dataclass(frozen=True)
class Answers:
    """What the model says of pairs of answers: log-probabilities of their tokens, [pairs, 2]: chosen, rejected."""

    total: Tensor
    tokens: Tensor
    """How many tokens each answer has."""
    likelihood: Tensor
    """Mean cross entropy of the chosen rows, prompts included: one number."""


Loss = Callable[[Answers, Tensor | None], Tensor]
"""``(answers, log-probabilities of the reference [pairs, 2] or None)`` to the mean loss."""


def preference_loss(strategy: Dpo | Orpo) -> Loss:
    """Return the loss of a recipe's section."""
    if isinstance(strategy, Orpo):
        return partial(orpo_loss, beta=strategy.beta)
    return partial(dpo_loss, beta=strategy.kl_beta, kind=strategy.loss_type)


def dpo_loss(answers: Answers, reference: Tensor | None, *, beta: float, kind: str = "sigmoid") -> Tensor:
    """Return the mean DPO loss of the pairs."""
    if reference is None:
        raise ValueError("DPO needs the reference's log-probabilities")
    ratio = answers.total - reference
    if kind == "ipo":
        ratio = ratio / answers.tokens
    margin = ratio[:, 0] - ratio[:, 1]
    if kind == "ipo":
        losses = (margin - 1 / (2 * beta)).square()
    elif kind == "hinge":
        losses = F.relu(1 - beta * margin)
    else:
        losses = -F.logsigmoid(beta * margin)
    return losses.mean()


def orpo_loss(answers: Answers, reference: Tensor | None = None, *, beta: float) -> Tensor:
    """Return the mean ORPO loss: the chosen rows' cross entropy, and ``beta`` times the odds ratio's."""
    mean = answers.total / answers.tokens
    odds = mean - _log_of_rest(mean)
    return answers.likelihood - beta * F.logsigmoid(odds[:, 0] - odds[:, 1]).mean()


def _log_of_rest(logs: Tensor) -> Tensor:
    """Return ``log(1 - exp(logs))``, exact where ``logs`` is near zero and where it is far."""
    near = logs > -0.6931471805599453
    return torch.where(near, torch.log(-torch.expm1(logs)), torch.log1p(-torch.exp(logs)))


class PreferenceModel(nn.Module):
    """The mixin of a causal language model that is trained on pairs: its ``forward`` returns their loss."""

    preference: Loss

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        targets: Tensor,
        reference: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Return the mean loss of pairs times ``share``. Rows [2 * pairs, S]: a chosen answer, then its rejected one.

        ``targets`` are the ids of the answers' tokens, else -100; ``reference`` [2 * pairs] are log-probabilities.
        """
        answers = self.answers(input_ids, attention_mask, targets)
        return share * self.preference(answers, None if reference is None else reference.view(-1, 2))

    def answers(self, input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Answers:
        logits = super().forward(input_ids, attention_mask)  # pyright: ignore[reportAttributeAccessIssue]
        wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        logs = -F.cross_entropy(wide.transpose(1, 2), input_ids[:, 1:], reduction="none")  # of each next token
        counted = (targets[:, 1:] != IGNORED).to(logs.dtype)
        chosen = (attention_mask[0::2, 1:] != 0).to(logs.dtype)
        likelihood = -(logs[0::2] * chosen).sum() / chosen.sum()
        return Answers((logs * counted).sum(-1).view(-1, 2), counted.sum(-1).view(-1, 2), likelihood)


def with_preference(model: nn.Module, strategy: Dpo | Orpo) -> Any:
    """Give ``model``, which maps ids and a mask to logits, the ``forward`` of :class:`PreferenceModel`, in place."""
    kind = type(model)
    model.__class__ = type(f"Preference{kind.__name__}", (PreferenceModel, kind), {})
    object.__setattr__(model, "preference", preference_loss(strategy))
    return model


def add_reference(
    wrapped: NxDModel,
    sets: Mapping[str, Pairs],
    log_dir: Path,
    autocast: Callable[[], AbstractContextManager[None]],
    fresh: bool,
) -> None:
    """Give each set the log-probabilities [pairs, 2] of its answers. Every rank calls it.

    A first start (``fresh``) computes them, each data-parallel rank its share, and keeps them in ``log_dir``; a resumed
    job, whose model has moved on, reads them there.
    """
    path = log_dir / REFERENCE
    if fresh:
        stored = {name: _computed(wrapped, pairs, autocast) for name, pairs in sets.items()}
        if is_rank_zero():
            log_dir.mkdir(parents=True, exist_ok=True)
            save_file(stored, path)
    elif path.is_file():
        stored = load_file(path)
    else:
        raise RecipeError(f"{path} is missing: the reference's probabilities are those of the job's first start")
    for name, pairs in sets.items():
        if name not in stored or len(stored[name]) != len(pairs):
            raise RecipeError(f"{path} is of other data than the recipe's {name} data: start a new version")
        pairs.reference = stored[name]


@torch.no_grad()
def _computed(wrapped: NxDModel, pairs: Pairs, autocast: Callable[[], AbstractContextManager[None]]) -> Tensor:
    context = current_context()
    module = wrapped.local_module()
    model = module.get_base_model() if isinstance(module, LoRAModel) else module
    assert isinstance(model, PreferenceModel)
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    totals = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    own = range(context.dp.rank, len(pairs), context.dp.degree)
    for at in range(0, len(own), AT_A_TIME):
        numbers = list(own[at : at + AT_A_TIME])
        rows = [pairs[number] for number in numbers]
        batch = {name: torch.cat([row[name] for row in rows]).to(device) for name in rows[0]}
        with autocast():
            answers = model.answers(**batch)
        totals[numbers] = answers.total.double()
    model.train(training)
    return comm.all_reduce(totals, context, "dp").float().cpu()
