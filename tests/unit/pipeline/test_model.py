"""NxDPPModel in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_infer.context import make_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.build import build_stage
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.stage import StandIn
from tests.support.pipeline.models import SPEC, Residual, data


def test_without_other_stages():
    """At pp 1 it runs the same microbatches in this process, and is called like the module."""
    torch.manual_seed(5)
    whole = Residual()
    torch.manual_seed(5)
    model = NxDPPModel(Residual(), num_microbatches=4, output_loss_value_spec=SPEC)
    loss = whole(**data())["the_loss"]
    loss.backward()
    torch.testing.assert_close(model.run_train(**data()), loss.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    torch.testing.assert_close(model.run_eval(**data()), loss.detach())
    torch.testing.assert_close(model(**data())["the_loss"], loss)
    assert model.bubble is not None and 0 <= model.bubble < 1


def test_a_module_of_another_rank_is_moved_by_name_only():
    """It stays without memory, and takes the dtype."""
    hidden = nn.Linear(2, 2, device="meta")
    model = nn.Sequential(StandIn(hidden), nn.Linear(2, 2)).to("cpu", torch.bfloat16)
    assert hidden.weight.is_meta and hidden.weight.dtype == model[1].weight.dtype == torch.bfloat16
    assert model.float().to("cpu")[1].weight.device.type == "cpu" and hidden.weight.dtype == torch.float32


def test_one_number_or_several():
    with pytest.raises(ParallelConfigError, match="gives one number, so return_mb_loss must be False"):
        PipelineOptions({"return_mb_loss": True, "broadcast_and_average_loss": True})


def test_what_is_told_without_ranks():
    def broken() -> nn.Module:
        raise ZeroDivisionError("a mistake of the user's")

    with pytest.raises(ParallelConfigError, match="Linear has no module with weights inside"):
        NxDPPModel(nn.Linear(4, 4))
    pp, options = make_context(8, 0, pp=8).pp, PipelineOptions({"auto_partition": True})
    with pytest.raises(ZeroDivisionError, match="a mistake of the user's"):
        build_stage(broken, options, pp)
    with pytest.raises(ParallelConfigError, match="8 pipeline stages, but the model has 4 transformer layers"):
        build_stage(Residual, options, pp)
