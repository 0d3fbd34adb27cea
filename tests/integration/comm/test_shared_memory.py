"""Process groups whose ranks share memory: the same results, the same errors, and gloo where a rank cannot."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from nxd_infer import native
from nxd_infer.comm import all_reduce
from nxd_infer.comm.distributed import DistributedCollectives
from nxd_infer.comm.overlapped import start_all_gather, start_all_reduce, start_reduce_scatter
from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import current_context
from tests.integration.comm.test_collectives import BIG, SHAPES, assert_same_bits, everything
from tests.integration.comm.test_lost_peers import lose
from tests.support.needs import needs_native
from tests.support.ranks import run_ranks

pytestmark = needs_native


@pytest.fixture(scope="module", autouse=True)
def built():
    """Ranks share memory where the library is there already; here it is."""
    native.load()


def transport() -> DistributedCollectives:
    return cast(DistributedCollectives, collectives_of(current_context()))


def shares(axis: str = "tp", dtype: torch.dtype = torch.float32) -> bool:
    return transport().shared(axis, torch.empty(1, dtype=dtype)) is not None


def check_started() -> None:
    """What the optimizer starts beside its backward, and waits for later."""
    here, degree = current_context(), current_context().tp.degree
    ones = torch.ones(3 * degree)
    pending = start_all_reduce(ones, here, "tp"), start_reduce_scatter(ones.clone(), here, "tp")
    mine = torch.zeros(2 * degree)
    mine[2 * here.tp.rank : 2 * here.tp.rank + 2] = here.tp.rank + 1.0
    gathered = start_all_gather(mine, here, "tp").wait()
    assert pending[0].wait().tolist() == [degree] * 3 * degree
    assert pending[1].wait().tolist() == [degree] * 3
    assert gathered.tolist() == [1.0, 1.0, 2.0, 2.0]


def everything_shared() -> list:
    assert shares() and shares(dtype=torch.bool) and not shares(dtype=torch.complex64)
    check_started()
    return everything((SHAPES[2], BIG), exact=True)


def test_collectives_equal_a_plain_computation():
    assert_same_bits(run_ranks(everything_shared, 2, collectives="shared"))


def one_without_a_library() -> tuple[bool, bool]:
    """Rank 1 cannot: the group stays with gloo, and works."""
    assert not shares()
    transport().share_memory(native.load() if current_context().rank == 0 else None)
    without = shares()
    assert all_reduce(torch.ones(2), current_context()).tolist() == [2, 2]
    transport().share_memory(native.load())
    assert all_reduce(torch.ones(2), current_context()).tolist() == [2, 2]
    return without, shares()


def test_all_ranks_of_a_group_share_or_none():
    assert run_ranks(one_without_a_library, 2) == [(False, True)] * 2


def test_a_lost_peer_is_named_and_stays_lost():
    message, ranks, again, ranks_again = run_ranks(lose, 2, 1, collectives="shared", comm_timeout=600.0, lost=(1,))[0]
    assert message.startswith("nxd: rank(s) [1] did not reach all_reduce (number ")
    assert " on axis 'tp', called by rank 0) within " in message and "the process has ended" in message
    assert ranks == ranks_again == (1,) and again == message
