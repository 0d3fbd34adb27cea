"""The order in which `make test` begins the files of tests, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import long, order

TESTS = Path(__file__).parents[1]


@pytest.mark.check
def test_the_longest_files_are_there_and_come_first(request):
    assert [name for name in order.LONGEST if not (TESTS / f"{name}.py").is_file()] == []
    places = [order.place(item.nodeid) for item in request.session.items]
    assert places == sorted(places) and len(set(order.LONGEST)) == len(order.LONGEST)


def test_the_quick_selection_is_found_by_its_words(request):
    """Files without them are not read for it."""
    files = {item.path for item in request.session.items if item.get_closest_marker("check")}
    assert files and [path for path in files if "mark.check" not in path.read_text()] == []


@pytest.mark.check
def test_what_is_left_to_the_long_run_exists():
    """A test that was renamed would come back unseen."""
    for name in long.LONG:
        file, _, test = name.partition("::")
        text = (TESTS / f"{file}.py").read_text()
        assert not test or f"def {test}(" in text, name
    assert long.is_long("tests/bench/test_train.py::test_everybody_trains_one_model")
    assert long.is_long("tests/models/test_t5.py::test_it_is_traced_verified_and_generates[tied, relu-2]")
    assert long.is_long("tests/pipeline/test_hugging_face.py::test_models_in_stages[4]")
    assert not long.is_long("tests/pipeline/test_hugging_face.py::test_models_in_stages[2]")
    assert not long.is_long("tests/models/test_t5.py::test_another")
