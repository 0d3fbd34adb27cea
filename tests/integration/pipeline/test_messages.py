"""Transports without messages between two ranks: stages in lock step, over shared memory alone."""

from __future__ import annotations

import dataclasses
import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.comm.distributed import DistributedCollectives
from nxd_infer.context import current_context, make_context
from nxd_infer.errors import CollectiveError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.messages import StepMessages, messages_for
from nxd_infer.pipeline.schedule import schedule
from tests.integration.pipeline.test_model import SPEC, Backwards, data
from tests.support.pipeline.models import decoder, encoder, sentences, tokens
from tests.support.ranks import run_ranks

F64 = torch.float64
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {}),
    ("tied", 4, {"schedule": "gpipe"}),
    ("tied", 8, {}),
    ("bert", 4, {}),
    ("tied", 4, {"schedule": "zero-bubble"}),
    ("tied", 2, {"virtual_pipeline_size": 2}),
]


def compare() -> list[str]:
    found = []
    for family, count, options in CASES:
        if options.get("virtual_pipeline_size", 1) * current_context().pp.degree > 4:
            continue
        torch.manual_seed(3)
        make, batch = (encoder, sentences()) if family == "bert" else (partial(decoder, family), tokens())
        whole = make(F64)
        loss = whole(**batch)[0]
        loss.backward()
        torch.manual_seed(3)
        model = NxDPPModel(make(F64), auto_partition=True, num_microbatches=count, **options)
        got = float(model.run_train(**batch))
        apart = [float((p.grad - whole.get_parameter(n).grad).norm()) for n, p in model.local_named_parameters()]
        evaluated = float(model.run_eval(**batch))
        if max(apart) > 1e-10 or max(abs(one - float(loss.detach())) for one in (got, evaluated)) > 1e-10:
            found.append(f"{family} {count} {options}: {got}, {evaluated}, {float(loss)}, gradients {max(apart)}")
    if current_context().pp.degree == 2:  # a weight of a later stage than its user's
        torch.manual_seed(5)
        whole = Backwards().double()
        torch.manual_seed(5)
        model = NxDPPModel(
            Backwards().double(), pipeline_cuts=["blocks.1"], num_microbatches=4, output_loss_value_spec=SPEC
        )
        batch = {name: tensor.double() for name, tensor in data().items()}
        whole(**batch)["the_loss"].backward()
        model.run_train(**batch)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_lock_step(ranks: int):
    assert run_ranks(compare, ranks, collectives="shm", pp=ranks) == [[]] * ranks


def chosen() -> list[str]:
    """What messages go over: gloo's group, and a group of another library."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    context = current_context()
    given = [context, dataclasses.replace(context, collectives="another library")]
    groups = {"pp": dist.new_group([0, 1], backend="fake")}
    register_collectives(given[1].collectives, DistributedCollectives(given[1], groups, 5.0))
    found = [type(messages_for(one, schedule("1f1b", 2, 1), 2)).__name__ for one in given]
    unregister_collectives(given[1].collectives)
    return found


def test_only_gloo_tells_messages_apart_by_their_tags():
    assert run_ranks(chosen, 2, pp=2) == [["PointToPoint", "StepMessages"]] * 2


def test_a_message_that_never_came():
    messages = StepMessages(make_context(2, 0, pp=2), schedule("1f1b", 2, 1), 2)
    with pytest.raises(CollectiveError, match="a message of pipeline rank 1 is not there in the tick that needs it"):
        messages.recv(torch.empty(3), 1, 5).wait()
