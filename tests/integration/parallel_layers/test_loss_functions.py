"""parallel_cross_entropy is F.cross_entropy over the whole vocabulary; random streams; a penalty on gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear, parallel_cross_entropy
from nxd_infer.parallel_layers.loss_functions import from_parallel_logits_to_logprobs
from nxd_infer.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from tests.support.parallel_layers.compare import LIMITS, error, failures, piece
from tests.support.ranks import run_ranks

VOCABULARY = 12


def compare(
    found: dict[str, float],
    name: str,
    logits: Tensor,
    labels: Tensor,
    smoothing: float,
    real: int = VOCABULARY,
    scale: float = 1.0,
) -> Tensor:
    """The losses and their gradients beside those of the whole vocabulary in ``real`` columns; the rank's gradient."""
    mine = piece(logits, -1).clone().requires_grad_()
    given = mine.detach().clone()
    whole = logits[..., :real].to(torch.promote_types(logits.dtype, torch.float32)).clone().requires_grad_()
    loss = parallel_cross_entropy(mine, labels, smoothing, vocab_size=real)
    expected = F.cross_entropy(
        whole.reshape(-1, real), labels.reshape(-1), reduction="none", label_smoothing=smoothing
    ).view(labels.shape)
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(labels.shape)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert whole.grad is not None and mine.grad is not None
    found[name] = error(loss / scale, expected / scale)
    found[f"{name} grad"] = error(mine.grad, piece(F.pad(whole.grad, (0, VOCABULARY - real)), -1).to(logits.dtype))
    found[f"{name} logits kept"] = 0.0 if torch.equal(mine.detach(), given) else 9.0
    return mine.grad


def loss_cases(dtype: torch.dtype) -> list[str]:
    found: dict[str, float] = {}
    shapes = itertools.cycle(((5,), (2, 3), (2, 3, 4)))
    for (smoothing, ignored), shape in zip(itertools.product((0.0, 0.1, 1.0), (False, True)), shapes, strict=False):
        torch.manual_seed(sum(shape))
        labels = torch.randint(0, VOCABULARY, shape)
        if ignored:
            labels.view(-1)[0] = -100
        name = f"{shape} smoothing={smoothing} ignored={ignored}"
        compare(found, name, torch.randn(*shape, VOCABULARY, dtype=dtype) * 3, labels, smoothing)
    for smoothing in (0.0, 0.1):  # filling at the end of the last ranks takes no part, and gets no gradient
        labels = torch.randint(0, VOCABULARY - 3, (2, 3))
        padded = torch.randn(2, 3, VOCABULARY, dtype=dtype)
        compare(found, f"padded {smoothing}", padded, labels, smoothing, VOCABULARY - 3)
    found |= logprobs(dtype)
    low, three = torch.randn(3, VOCABULARY).bfloat16(), torch.tensor([1, 2, 3])
    expected = F.cross_entropy(low.float(), three, reduction="none")
    in_float32 = {"bfloat16": error(parallel_cross_entropy(piece(low, -1), three), expected)}
    labels = torch.tensor([0, 3, -100, VOCABULARY - 1])
    for kind, smoothing in ((torch.float32, 0.1), (torch.bfloat16, 0.0)):  # finite, and equal relative to the loss
        large = (torch.randn(4, VOCABULARY) * 1e4).to(kind)
        grad = compare(in_float32, f"1e4 {kind}", large, labels, smoothing, scale=1e4)
        in_float32[f"1e4 {kind} ignored"] = grad[2].abs().sum().item()
    return failures(found, LIMITS[dtype]) + failures(in_float32, 1e-6)


def logprobs(dtype: torch.dtype) -> dict[str, float]:
    logits, ids = torch.randn(2, 5, VOCABULARY, dtype=dtype), torch.randint(0, VOCABULARY, (2, 5))
    whole, mine = logits.clone().requires_grad_(), piece(logits, -1).clone().requires_grad_()
    expected = whole.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    expected.sum().backward()
    from_parallel_logits_to_logprobs(mine, ids, inference=False).sum().backward()
    found = from_parallel_logits_to_logprobs(vocab_parallel_logits=piece(logits, -1), target=ids)
    return {"logprobs": error(found, expected), "logprobs grad": error(mine.grad, piece(whole.grad, -1))}


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)], ids=str)
def test_cross_entropy(tp: int, dtype: torch.dtype):
    for rank, bad in enumerate(run_ranks(loss_cases, tp, dtype) if tp > 1 else [loss_cases(dtype)]):
        assert not bad, f"rank {rank}: " + "; ".join(bad)


def draws() -> dict[str, torch.Tensor]:
    model_parallel_xla_manual_seed(5)
    tracker = get_xla_rng_tracker()
    shared = torch.rand(4)
    with tracker.fork():
        own = torch.rand(4)
    more = torch.rand(4)
    saved = tracker.get_states()
    with tracker.fork():
        later = torch.rand(4)
    tracker.set_states(saved)
    with tracker.fork():
        again = torch.rand(4)
    assert torch.equal(later, again) and not torch.equal(own, later)
    torch.manual_seed(5)
    assert torch.equal(torch.cat([shared, more]), torch.rand(8))
    return {"shared": shared, "own": own, "rank": torch.tensor(current_context().tp.rank)}


def test_random_streams():
    first, second = run_ranks(draws, 2)
    assert torch.equal(first["shared"], second["shared"])
    assert not torch.equal(first["own"], second["own"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + self.down(torch.tanh(self.up(x)))


def penalised() -> tuple[float, Tensor, Tensor]:
    """The penalty on the norm of an input's gradient, and the penalty's own gradients."""
    model = Block()
    x = (torch.arange(30, dtype=torch.float64).reshape(5, 6) / 10).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    penalty = (grad.norm(dim=-1) - 1).pow(2).mean()
    penalty.backward()
    assert x.grad is not None and model.up.weight.grad is not None
    return penalty.item(), x.grad, model.up.weight.grad


def test_gradient_penalty_over_ranks():
    alone = penalised()
    both = run_ranks(penalised, 2)
    for penalty, of_input, _ in both:
        assert penalty == pytest.approx(alone[0], rel=1e-12)
        torch.testing.assert_close(of_input, alone[1])
    torch.testing.assert_close(torch.cat([found[2] for found in both]), alone[2])
