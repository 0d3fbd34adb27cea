"""Every collective on real ranks, over every transport, against a plain computation on the inputs of all ranks."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_infer.comm import all_gather, all_reduce, axis_rank, barrier, broadcast, reduce_scatter, shard
from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import current_context
from nxd_infer.errors import CollectiveError
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)
SHAPES = ((1,), (7,), (3, 5), (2, 1, 9), (0, 4), (33, 17))
BIG = (3, 12_007)
"""More than the 16 KiB slot that these tests use."""


def inputs(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What ``rank`` contributes; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**30), 2**30, shape, generator=generator).to(dtype)


def reference_sum(parts: list[Tensor]) -> Tensor:
    """In rank order, half precision in float32."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def same(a: Tensor, b: Tensor, what: object) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    assert torch.equal(a, b), (what, a, b)


def near(a: Tensor, b: Tensor, exact: bool, what: object) -> None:
    """Equal bit for bit where the order of addition is fixed, else up to rounding."""
    if exact:
        same(a, b, what)
    else:
        assert a.dtype == b.dtype and a.shape == b.shape, what
        torch.testing.assert_close(a, b, msg=str(what))


def shapes_for(dtype: torch.dtype, shapes: tuple) -> tuple:
    """All for one float and for one that is added in another type, else an odd one and a large one."""
    return shapes if dtype in (torch.float32, torch.bfloat16) else shapes[-2:]


def check_moves(shapes: tuple) -> None:
    here = current_context()
    degree, rank = here.tp.degree, here.tp.rank
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.uint8):
        for shape in shapes_for(dtype, shapes):
            parts = [inputs(r, shape, dtype) for r in range(degree)]
            x = parts[rank]
            for dim in range(-1, len(shape)):
                what = (dtype, shape, dim)
                gathered = all_gather(x, here, dim=dim)
                same(gathered, torch.cat(parts, dim), ("all_gather", *what))
                piece = shard(gathered, here, dim=dim)
                same(piece, x, ("shard", *what))
                piece.zero_()
                same(gathered, torch.cat(parts, dim), ("changing a piece changes the piece alone", *what))
            for src in range(degree):
                same(broadcast(x, here, src=src), parts[src], ("broadcast", dtype, shape, src))
            same(x, inputs(rank, shape, dtype), "inputs stay as they are")


def check_sums(shapes: tuple, exact: bool) -> list[Tensor]:
    here = current_context()
    degree, rank = here.tp.degree, here.tp.rank
    results = []
    for dtype in (*FLOATS, *INTEGERS):
        for shape in shapes_for(dtype, shapes):
            parts = [inputs(r, shape, dtype) for r in range(degree)]
            x = parts[rank]
            what = (dtype, shape)
            fixed = exact or not dtype.is_floating_point or degree == 2
            results.append(all_reduce(x, here))
            near(results[-1], reference_sum(parts), fixed, ("sum", *what))
            same(all_reduce(x, here, op="max"), torch.stack(parts).amax(0), ("max", *what))
            same(all_reduce(x, here, op="min"), torch.stack(parts).amin(0), ("min", *what))
            for dim in range(len(shape)):
                wide = [
                    torch.cat([inputs(r + 10 * i, shape, dtype) for i in range(degree)], dim) for r in range(degree)
                ]
                piece = reference_sum(wide).chunk(degree, dim)[rank]
                near(reduce_scatter(wide[rank], here, dim=dim), piece, fixed, ("reduce_scatter", *what, dim))
            same(x, inputs(rank, shape, dtype), "inputs stay as they are")
    flags = [inputs(r, (9,), torch.bool) for r in range(degree)]
    same(all_reduce(flags[rank], here, op="max"), torch.stack(flags).any(0), "any")
    same(all_reduce(flags[rank], here, op="min"), torch.stack(flags).all(0), "all")
    return results


def check_odd_tensors(exact: bool) -> None:
    here = current_context()
    degree, rank = here.tp.degree, here.tp.rank
    parts = [inputs(r, (6, 4), torch.float32) for r in range(degree)]
    strided = parts[rank].t()
    near(all_reduce(strided, here), reference_sum([p.t() for p in parts]), exact, "transposed")
    same(all_gather(strided, here, dim=1), torch.cat([p.t() for p in parts], 1), "transposed")
    same(
        shard(torch.arange(8 * degree).view(8, degree).t(), here, dim=1),
        torch.arange(8 * degree).view(8, degree).t().chunk(degree, 1)[rank],
        "t",
    )
    scalar = torch.tensor(float(rank + 1))
    same(all_reduce(scalar, here), torch.tensor(float(sum(range(1, degree + 1)))), "0-d")
    same(broadcast(scalar, here, src=degree - 1), torch.tensor(float(degree)), "0-d")
    same(axis_rank(here), torch.tensor(rank), "axis_rank")
    grown = torch.ones(3, requires_grad=True)
    same(all_reduce(grown, here), torch.full((3,), float(degree)), "needs grad")


def check_mail() -> None:
    here = current_context()
    degree, rank = here.tp.degree, here.tp.rank
    transport = collectives_of(here)
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        for shape in ((5,), (3, 70_001)):
            mine = inputs(rank, shape, dtype)
            following, before = (rank + 1) % degree, (rank - 1) % degree
            if rank % 2 == 0:
                transport.send(mine, "tp", following)
                got = transport.recv(torch.empty_like(mine), "tp", before)
            else:
                got = transport.recv(torch.empty_like(mine), "tp", before)
                transport.send(mine, "tp", following)
            same(got, inputs(before, shape, dtype), ("mail", dtype, shape))
    barrier(here)


def refusals() -> list[str]:
    here = current_context()
    found = []
    for action in (
        lambda: all_reduce(torch.ones(3, dtype=torch.bool), here),
        lambda: all_reduce(torch.ones(3), here, op="product"),
        lambda: reduce_scatter(torch.ones(7), here),
        lambda: shard(torch.ones(7), here),
        lambda: all_gather(torch.tensor(1.0), here),
        lambda: broadcast(torch.ones(1), here, src=2),
    ):
        try:
            action()
        except CollectiveError as error:
            found.append(str(error))
    same(all_reduce(torch.ones(1), here), torch.full((1,), float(here.tp.degree)), "still usable")
    return found


def check_nan_wins() -> None:
    here = current_context()
    values = [[1.0, float("nan"), 3.0], [float("nan"), 2.0, -1.0], [0.0, 0.0, 5.0], [9.0, 9.0, 9.0]]
    result = all_reduce(torch.tensor(values[here.rank]), here, op="max")
    assert result.isnan().tolist() == [True, True, False] and result[2] == 9


def check_rounds(rounds: int) -> None:
    """Calls of changing kinds and sizes with uneven work between them: a slot reused too early would show."""
    here = current_context()
    degree, rank = here.tp.degree, here.tp.rank
    pick, pace = random.Random(7), random.Random(rank)
    for number in range(rounds):
        kind, size = pick.randrange(3), pick.choice((1, 17, 300, 2048, 5000, 40_000))
        mine = torch.arange(size, dtype=torch.float32) + number + rank
        if pace.random() < 0.05:
            time.sleep(pace.random() * 2e-3)
        if kind == 0:
            total = degree * (torch.arange(size) + number) + degree * (degree - 1) // 2
            assert torch.equal(all_reduce(mine, here), total.float()), number
        elif kind == 1:
            whole = all_gather(mine, here, dim=0).view(degree, size)
            assert torch.equal(whole - whole[0], torch.arange(float(degree))[:, None].expand(degree, size)), number
        else:
            assert broadcast(mine, here, src=number % degree)[-1] == size - 1 + number + number % degree, number


def everything(shapes: tuple, exact: bool) -> list[Tensor]:
    check_moves(shapes)
    check_odd_tensors(exact)
    check_mail()
    barrier(current_context())
    return check_sums(shapes, exact)


def everything_in_shared_memory(shapes: tuple) -> list[Tensor]:
    check_nan_wins()
    check_rounds(1000)
    return everything(shapes, exact=True)


def assert_same_bits(results: list[list[Tensor]]) -> None:
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.smoke
def test_shared_memory_collectives_equal_a_plain_computation():
    assert_same_bits(run_ranks(everything_in_shared_memory, 4, (*SHAPES, BIG), collectives="shm", capacity=16384))


@pytest.mark.smoke
def test_distributed_collectives_equal_a_plain_computation():
    assert_same_bits(run_ranks(everything, 4, (*SHAPES, BIG), False))


def shared_work(shapes: tuple, numels: dict[torch.dtype, int]) -> list[Tensor]:
    """And sums of ones, which must be the degree everywhere, the last value too."""
    here = current_context()
    for dtype, numel in numels.items():
        torch.full((numel,), 77, dtype=dtype)  # what lies in the memory that the result gets
        assert (all_reduce(torch.ones(numel, dtype=dtype), here) == here.tp.degree).all(), dtype
    return check_sums(shapes, exact=True)


@pytest.mark.parametrize("world", [2, 4])
def test_large_tensors_take_the_shared_work_path(world):
    """Pieces above 64 KiB with a ragged end; sizes whose equal share is whole cache lines and that do not divide."""
    numels = {torch.bfloat16: 32_769, torch.float16: 32_769, torch.uint8: 65_537, torch.float32: 16_385}
    found = run_ranks(shared_work, world, ((100_003,),), numels, collectives="shm", capacity=131072)
    assert_same_bits(found)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_refused_call_names_the_reason_and_leaves_the_group_usable(transport):
    for found in run_ranks(refusals, 2, collectives=transport):
        assert len(found) == 6
        assert "booleans have no sum" in found[0]
        assert "'product'" in found[1]
        assert "does not divide by 2" in found[2] and "does not divide by 2" in found[3]
        assert "dimension -1 of a tensor of 0 dimensions" in found[4]
        assert "source rank 2 is not one of the 2 ranks" in found[5]


def several_axes() -> tuple:
    here = current_context()
    x = torch.tensor([10.0**here.rank])
    return tuple(all_reduce(x, here, axis).item() for axis in ("tp", "dp", "pp"))


@pytest.mark.parametrize("transport", ["shm", "gloo", "shared"])
def test_axes_keep_to_their_groups(transport):
    found = run_ranks(several_axes, 4, tp=2, collectives=transport)  # tp pairs neighbours, dp pairs rank and rank + 2
    assert found == [(11, 101, 1), (11, 1010, 10), (1100, 101, 100), (1100, 1010, 1000)]
    found = run_ranks(several_axes, 4, tp=2, pp=2, collectives=transport)
    assert [f[2] for f in found] == [101, 1010, 101, 1010] and [f[1] for f in found] == [1, 10, 100, 1000]


def work_beside_a_wait(folder: str) -> bool:
    """Rank 1 comes when a thread of rank 0, which waits for it, has worked: never, if that holds up its threads."""
    here, worked = current_context(), Path(folder) / "worked"
    if here.rank == 1:
        wait_until(worked.exists)
        barrier(here)
        return True

    def work() -> None:
        for _ in range(20):
            time.sleep(0.01)  # rank 0 waits by then
        worked.touch()

    thread = threading.Thread(target=work)
    thread.start()
    barrier(here)
    thread.join()
    return worked.exists()


def test_other_threads_run_while_a_rank_waits(tmp_path):
    assert run_ranks(work_beside_a_wait, 2, str(tmp_path), collectives="shm", comm_timeout=60) == [True, True]
