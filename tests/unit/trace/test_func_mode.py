"""What func mode does before and after its ranks run: what they are sent, what they may keep, whose failure is told."""

from __future__ import annotations

import importlib.util
import pickle

import pytest
import torch

from nxd_infer.errors import TraceConfigError, TraceError
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.ranks import from_function, one_rank
from nxd_infer.trace.ranks.from_function import Failure
from nxd_infer.trace.request import checked_request
from tests.support import traced_models as models


def test_of_several_failures_the_cause_is_raised():
    """A collective fails because of another rank, which raised, or ended without a word."""
    consequence = Failure(0, "CollectiveError", "a peer is gone")
    died = Failure(2, "", "the process of rank 2 was ended by SIGKILL")
    raised = Failure(3, "ValueError", "its own")
    # The other's end may be a consequence, or the other way round.
    for failures, cause in (([consequence, died], died), ([consequence, raised], raised), ([died, raised], raised)):
        error = from_function.error_of(failures)
        assert error.rank == cause.rank and cause.text in str(error)


def test_decision_18_meta_tensors_that_lost_their_weights_are_refused():
    """``load_state_dict`` says that all keys matched, and the module has no weights."""
    with torch.device("meta"):
        module = models.Plus()
    assert str(module.load_state_dict({"weight": torch.ones(4)})) == "<All keys matched successfully>"
    with pytest.raises(TraceError, match=r"'weight' of Plus is on the meta device.*checkpoint_loader_callable"):
        one_rank.require_values(module)


def test_decision_19_weights_are_stored_contiguously_whatever_their_strides():
    module = torch.nn.Linear(3, 4)
    module.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    module.register_buffer("row", torch.ones(1).expand(5))
    one_rank.require_values(module)
    assert module.weight.stride() == (3, 1) and module.row.stride() == (1,)
    assert torch.equal(module.weight, torch.arange(12.0).reshape(3, 4).t())


def test_decision_20_a_lambda_travels_with_cloudpickle_and_is_refused_without(monkeypatch):
    value = 3.0
    request = checked_request(TraceOptions(lambda: models.plus(value), torch.ones(4), metadata={"a": 1}))
    assert pickle.loads(from_function.pack(request)).options.func()[0].value == 3.0
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cloudpickle" else found(name))
    with pytest.raises(TraceConfigError, match="it is a lambda"):
        from_function.pack(request)

    def local():
        return models.plus()

    request.options.func = local
    with pytest.raises(TraceConfigError, match=r"local is defined inside another function.*top level of a module"):
        from_function.pack(request)
