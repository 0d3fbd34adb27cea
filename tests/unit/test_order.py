"""The order in which `make test` begins the files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import order

TESTS = Path(__file__).parents[1]


@pytest.mark.check
def test_the_longest_files_are_there_and_come_first(request):
    assert [name for name in order.LONGEST if not (TESTS / f"{name}.py").is_file()] == []
    places = [order.place(item.nodeid) for item in request.session.items]
    assert places == sorted(places) and len(set(order.LONGEST)) == len(order.LONGEST)
