"""Preference losses: a causal language model whose loss compares a chosen with a rejected answer.

Sources: Rafailov et al., "Direct Preference Optimization" (sigmoid); Zhao et al., "SLiC-HF" (hinge); Azar et al., "A
General Theoretical Paradigm to Understand Learning from Human Preferences" (ipo); Hong et al., "ORPO".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.schema import Dpo, Orpo


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
        logs = _next_token(logits, input_ids)
        counted = (targets[:, 1:] != IGNORED).to(logs.dtype)
        chosen = (attention_mask[0::2, 1:] != 0).to(logs.dtype)
        likelihood = -(logs[0::2] * chosen).sum() / chosen.sum()
        return Answers((logs * counted).sum(-1).view(-1, 2), counted.sum(-1).view(-1, 2), likelihood)


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each next token, [rows, S - 1], at least in float32."""
    wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide.transpose(1, 2), ids[:, 1:], reduction="none")


def with_preference(model: nn.Module, strategy: Dpo | Orpo) -> Any:
    """Give ``model``, which maps ids and a mask to logits, the ``forward`` of :class:`PreferenceModel`, in place."""
    kind = type(model)
    model.__class__ = type(f"Preference{kind.__name__}", (PreferenceModel, kind), {})
    object.__setattr__(model, "preference", preference_loss(strategy))
    return model
