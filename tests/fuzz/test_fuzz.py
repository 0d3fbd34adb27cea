"""Every parser of what others have written: the corpus, and some mutations of it that are always the same."""

from __future__ import annotations

import pytest
from hypothesis import Phase

from tests.fuzz import TARGETS
from tests.fuzz.target import CORPUS


def test_every_target_has_a_corpus():
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks_it(name, tmp_path):
    target = TARGETS[name](tmp_path)
    for path in target.folder.iterdir():
        taken = target.check(path.read_bytes())
        assert taken or not path.name.startswith("good"), path
    assert all(target.check(example) for example in target.made)

    def attempt(example: bytes) -> None:
        target.check(example)

    target.try_mutations(1, target.examples, attempt, Phase.generate)
