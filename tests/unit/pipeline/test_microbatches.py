"""The loss of a batch is the mean that the model itself takes, however its labels are spread over microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.errors import InputMismatchError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.microbatches import count_of, loss_weights, probes_of, split_batch


class Tagger(nn.Module):
    """A class for each of the positions of ``x`` [rows, positions, 4], with several kinds of means."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(x)
        if self.kind == "next":
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits.flatten(0, 1), labels.flatten()
        losses = F.cross_entropy(logits, labels, reduction="none")
        if self.kind == "over all":
            return losses.mean()
        if self.kind == "masked":
            return (F.cross_entropy(logits, labels.clamp(min=0), reduction="none") * (labels != -100)).sum() / (
                labels != -100
            ).sum()
        return losses.sum() / (labels != -100).sum()


def batch(rows: int = 6, positions: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (rows, positions), generator=generator)
    for row in range(rows):
        labels[row, : row % positions] = -100
    return {"x": torch.randn(rows, positions, 4, generator=generator, dtype=torch.float64), "labels": labels}


def check(model: nn.Module, inputs: dict[str, Any], count: int) -> None:
    """The loss of training and of evaluation and the gradient are those of the model itself."""
    loss = model(**inputs)
    loss.backward()
    wanted = model.layer.weight.grad
    model.zero_grad()
    pipelined = NxDPPModel(model, num_microbatches=count)
    assert float(pipelined.run_train(**inputs)) == pytest.approx(float(loss.detach()), rel=1e-12)
    torch.testing.assert_close(model.layer.weight.grad, wanted, rtol=1e-10, atol=1e-14)
    assert float(pipelined.run_eval(**inputs)) == pytest.approx(float(loss.detach()), rel=1e-12)


@pytest.mark.parametrize(("kind", "count"), [("this", 2), ("next", 3), ("over all", 6), ("next", 1)])
def test_the_mean_is_the_models_own(kind: str, count: int):
    check(Tagger(kind).double(), batch(), count)


@pytest.mark.parametrize("kind", ["this", "next", "masked"])
def test_a_microbatch_without_targets(kind: str):
    """Its own mean is NaN; that of the batch is not, nor are the gradients."""
    model, inputs = Tagger(kind).double(), batch()
    inputs["labels"][:2] = -100
    check(model, inputs, 3)
    first, *others = NxDPPModel(model, num_microbatches=3, return_mb_loss=True).run_eval(**inputs)
    assert first.isnan() and all(one > 0 for one in others)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), labels)


def test_classes_of_whole_rows():
    """One label a row: some ignored."""
    labels = torch.tensor([1, -100, -100, 2, 3, 4, 0, 1])
    check(Classifier().double(), {"x": torch.randn(8, 4, dtype=torch.float64), "labels": labels}, 2)


def test_what_cannot_be_probed_counts_equally():
    assert probes_of({"x": torch.ones(3)}) == {} == probes_of({"labels": torch.ones(3, 4)})
    assert count_of({}) is None and count_of({"all": 0.0, "last": 0.0, "first": 0.0}) is None
    parts = split_batch({"x": torch.ones(4, 2), "flag": True}, 2)
    assert [part["flag"] for part in parts] == [True, True] and parts[0]["x"].shape == (2, 2)
    assert loss_weights(parts, None).tolist() == [0.5, 0.5]
    sums = split_batch({"x": torch.ones(4, 2), "num_items_in_batch": 3}, 2)
    assert loss_weights(sums, None).tolist() == [1.0, 1.0]


def test_tensors_inside_of_inputs_are_split_too():
    parts = split_batch({"x": torch.arange(4), "more": {"y": [torch.arange(4) + 9, None]}, "scale": torch.tensor(2)}, 2)
    assert [part["more"]["y"][0].tolist() for part in parts] == [[9, 10], [11, 12]]
    assert all(part["more"]["y"][1] is None and part["scale"] == 2 for part in parts)
    with pytest.raises(InputMismatchError, match=r"'x' has 6 rows, which num_microbatches=4 does not divide: use one"):
        split_batch({"x": torch.ones(6)}, 4)
    with pytest.raises(InputMismatchError, match=r"'more'\['y'\]\[0\] has 3 rows, which num_microbatches=2 does not"):
        split_batch({"more": {"y": [torch.ones(3)]}}, 2)


def test_rows_of_one_tensor_are_not_those_of_another():
    """Such as the weights of classes, or positions that all rows share."""
    inputs = {"x": torch.ones(4, 3), "weights": torch.ones(8)}
    with pytest.raises(InputMismatchError, match=r"different numbers of rows \('x' 4, 'weights' 8\), .* as a buffer"):
        split_batch(inputs, 2)
    assert split_batch(inputs, 1)[0]["weights"].shape == (8,)
