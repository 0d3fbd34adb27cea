"""The shared memory of a group as its parent sees it."""

from __future__ import annotations

import mmap
import os

import pytest

from nxd_infer.comm.shm import (
    RankCounters,
    create_segment,
    read_counters,
    typed_error,
)
from nxd_infer.errors import CollectiveError, CollectiveTimeoutError, ParallelConfigError


@pytest.fixture
def segment():
    fd = create_segment(3)
    yield fd
    os.close(fd)


def test_a_new_segment_counts_from_zero(segment):
    nothing = [RankCounters(rank, pid=0, collectives=0) for rank in range(3)]
    assert read_counters(segment) == nothing
    with mmap.mmap(segment, 0) as mapped:
        assert read_counters(mapped) == nothing
    assert not os.get_inheritable(segment), "only those it is passed to get it"


@pytest.mark.parametrize(("degree", "capacity"), [(0, 4096), (65, 4096), (2, 0), (2, -1)])
def test_an_impossible_segment_is_refused(degree, capacity):
    with pytest.raises(ParallelConfigError):
        create_segment(degree, capacity)


def test_a_descriptor_of_something_else_is_refused(tmp_path):
    with (tmp_path / "file").open("wb+") as file:
        with pytest.raises(CollectiveError, match="not a segment"):
            read_counters(file.fileno())
        file.write(bytes(8192))
        file.flush()
        with pytest.raises(CollectiveError, match="not a segment"):
            read_counters(file.fileno())


def test_a_native_message_becomes_a_typed_error():
    text = "nxd: rank(s) [1, 3] did not reach all_gather (number 7 on axis 'tp', called by rank 0) within 30.0 s"
    error = typed_error(f"prefix added by a graph: {text}\nException raised from ...")
    assert isinstance(error, CollectiveTimeoutError) and error.ranks == (1, 3) and str(error) == text
    other = typed_error("nxd: the ranks of axis 'tp' went apart")
    assert type(other) is CollectiveError
    assert str(typed_error("anything else")) == "anything else"
