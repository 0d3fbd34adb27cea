"""Which cores a model gets, and what is said when it gets none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_infer.backends.neuron import backend, cores, runtime
from nxd_infer.errors import BackendUnavailableError
from tests.support.neuron.machines import described

taken: list[cores.Claim] = []


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cores.ROOT, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(backend, "_claims", [])  # of models that this process ran before
    for name in (cores.VISIBLE, cores.COUNT):
        monkeypatch.delenv(name, raising=False)
    yield
    for claim in taken:
        claim.close()
    taken.clear()
    os.environ.pop(cores.VISIBLE, None)


def claimed(degree: int) -> str:
    """What the runtime is told; the variable is the user's again afterwards, as in another process."""
    before = os.environ.get(cores.VISIBLE)
    taken.append(cores.claim(degree))
    told = os.environ.pop(cores.VISIBLE)
    if before is not None:
        os.environ[cores.VISIBLE] = before
    return told


def test_groups_start_at_a_multiple_and_no_core_is_given_twice(tmp_path: Path) -> None:
    described(tmp_path, "inf2.24xlarge", 6)
    assert [claimed(degree) for degree in (2, 4, 1, 1, 4)] == ["0-1", "4-7", "2", "3", "8-11"]
    with pytest.raises(BackendUnavailableError, match=r"all groups of 2 among the cores 0, 1.* are in use by other"):
        cores.claim(2)
    taken.pop(1).close()
    assert claimed(2) == "4-5"


@pytest.mark.parametrize(
    ("text", "degree", "told"),
    [("0-3", 2, "0-1"), ("2-3", 2, "2-3"), ("1-5", 4, None), ("3,4,5,6,7", 4, "4-7"), ("5", 1, "5"), ("1,2", 2, None)],
)
def test_the_users_cores_are_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, degree: int, told: str | None
) -> None:
    described(tmp_path)
    monkeypatch.setenv(cores.VISIBLE, text)
    if told is not None:
        assert claimed(degree) == told
        return
    with pytest.raises(
        BackendUnavailableError, match=rf"starts a group of {degree}.* multiple of {degree}, so set {cores.VISIBLE}"
    ):
        cores.claim(degree)


def test_a_number_of_cores_counts_unless_cores_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described(tmp_path)
    monkeypatch.setenv(cores.COUNT, "2")
    with pytest.raises(BackendUnavailableError, match=rf"needs 4 cores .* has 24 of which {cores.COUNT} leaves 2"):
        cores.claim(4)
    monkeypatch.setenv(cores.VISIBLE, "4-7")
    assert claimed(4) == "4-7"
    assert cores.COUNT not in os.environ


def test_a_number_of_cores_is_of_any_that_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the runtime has it: each of several processes gets its own."""
    described(tmp_path, "inf2.24xlarge", 6)
    told = []
    for _ in range(3):
        monkeypatch.setenv(cores.COUNT, "2")
        told.append(claimed(2))
    assert told == ["0-1", "2-3", "4-5"]


@pytest.mark.parametrize(
    ("variables", "degree", "text"),
    [
        ({}, 24, r"needs 24 cores and this inf2.8xlarge has 2: trace it for fewer ranks, or take a larger instance"),
        ({cores.VISIBLE: "0-8"}, 2, r"VISIBLE_CORES=0-8 names the core 2 and this inf2.8xlarge has 2: name cores from"),
        ({cores.VISIBLE: "a-b"}, 2, r"'a-b' is not a list of cores: write it as 0-3, or 0,1"),
        ({cores.VISIBLE: "3-1"}, 2, r"'3-1' is not a list of cores"),
        ({cores.COUNT: "4"}, 2, r"NUM_CORES=4 and this inf2.8xlarge has 2 cores: give at most that many"),
        ({cores.COUNT: "two"}, 2, r"NUM_CORES='two' is not a number of cores: give one such as 2, or unset it"),
    ],
)
def test_too_few_cores_and_what_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], degree: int, text: str
) -> None:
    described(tmp_path, "inf2.8xlarge", 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendUnavailableError, match=text):
        cores.claim(degree)


def test_cores_are_not_kept_where_the_runtime_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second model is told the same, instead of being placed without a runtime."""

    def missing() -> None:
        raise BackendUnavailableError("torch_neuronx lacks something")

    described(tmp_path, "inf2.xlarge", 1)
    monkeypatch.setattr(runtime, "load", missing)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="torch_neuronx lacks something"):
            backend._start(2)
    assert claimed(2) == "0-1"


def test_machines_that_share_a_cache_have_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods keep artifacts, and the cache, on one volume; each has a device of its own, whose cores are 0 and 1."""
    described(tmp_path, "inf2.xlarge", 1)
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    assert claimed(2) == "0-1"
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    assert claimed(2) == "0-1"


def test_where_nothing_can_be_locked_the_runtime_says_what_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path, "inf2.xlarge", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert [claimed(2), claimed(2)] == ["0-1", "0-1"]
