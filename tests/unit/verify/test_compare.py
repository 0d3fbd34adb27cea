"""What verify accepts as equal."""

from __future__ import annotations

import math

import pytest
import torch

from nxd_infer.cli.console import table
from nxd_infer.errors import InputRangeError
from nxd_infer.verify.artifact import compare, default_tolerance, relative, verify_artifact


@pytest.mark.parametrize(
    ("ours", "reference", "difference"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, math.nan], [1.0, -math.inf], math.inf),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
    ],
)
def test_values_that_are_not_finite_must_be_the_same(ours, reference, difference):
    a, b = torch.tensor(ours), torch.tensor(reference)
    assert relative(a, b) == difference
    assert bool(compare("bucket", {"y": a}, {"y": b}, 0.1).wrong) == (difference > 0.1)


@pytest.mark.parametrize("tolerance", [math.nan, -1.0, math.inf])
def test_a_tolerance_that_is_no_number_is_refused(tmp_path, tolerance):
    with pytest.raises(InputRangeError, match="tolerance must be a number of at least 0, got"):
        verify_artifact(tmp_path, tmp_path, tolerance=tolerance)
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert compare("bucket", {"y": a}, {"y": b}, math.nan).wrong == "y", "nor is anything within it"


def test_a_title_is_printed_as_it_is(capsys):
    table("a[/v]", ("bucket",), [("b[/c]",)])
    told = capsys.readouterr().out
    assert "a[/v]" in told and "b[/c]" in told


def test_a_deep_model_in_half_precision_may_differ_more():
    assert default_tolerance("bfloat16", 30) > 0.053, "plain PyTorch's distance from float32, of SmolLM2"
    assert default_tolerance("bfloat16", 4) == 3e-2 and default_tolerance("float32", 80) == 1e-4
