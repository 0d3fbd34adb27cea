"""Weights that one server has hashed, another does not hash again while the machine runs and they are unchanged.

What was read shows by a byte that is changed through a mapping whose page is dirty already: no stamp shows that.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nxd_infer.artifact import verified
from nxd_infer.artifact.manifest import weight_name
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.runtime.load import load_artifact

DAMAGED = r"rank_00\.safetensors of .* is altered"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "_YOUNG", 0)
    return tmp_path / "cache" / "verified"


def flipper(file: Path) -> Iterator[None]:
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        mapping[-1] = mapping[-1]
        while True:
            yield
            mapping[-1] ^= 1


@pytest.fixture
def flip(artifact: Path) -> Callable[[], None]:
    """Changes the last byte of a rank's weights."""
    steps = flipper(artifact / weight_name(0))
    next(steps)
    return lambda: next(steps)


def start(artifact: Path) -> None:
    """What a server does."""
    load_artifact(artifact, later=True).verify(again=False)


def test_unchanged_weights_are_hashed_once_until_the_machine_starts_again(artifact, flip, monkeypatch):
    start(artifact)
    flip()
    start(artifact)
    with pytest.raises(ArtifactCorruptError, match=DAMAGED):
        load_artifact(artifact)
    monkeypatch.setattr(verified, "_boot", lambda: "another")
    with pytest.raises(ArtifactCorruptError, match=DAMAGED):
        start(artifact)


def test_weights_that_were_just_written_when_hashing_began_are_not_remembered(artifact, monkeypatch):
    monkeypatch.setattr(verified, "_YOUNG", 10)
    files, name = load_artifact(artifact).manifest.files, weight_name(0)
    stamps = verified.verify_files(artifact, files, [name])
    verified.remember(artifact, files, stamps, begin=stamps[name][-1] + 10)
    assert verified.recalled(artifact, files) == {}
    verified.remember(artifact, files, stamps, begin=stamps[name][-1] + 11)
    assert verified.recalled(artifact, files) == stamps


def test_weights_that_were_written_to_are_hashed_and_so_is_code(artifact):
    start(artifact)
    for file in (artifact / weight_name(0), next((artifact / "graphs").rglob("*.json"))):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ArtifactCorruptError, match=rf"{file.name} of .* is altered"):
            start(artifact)
        file.write_bytes(data)
        start(artifact)
    steps = flipper(file)
    next(steps)
    start(artifact)
    next(steps)
    with pytest.raises(ArtifactCorruptError, match=rf"{file.name} of .* is altered"):
        start(artifact)


@pytest.mark.parametrize("spoil", ["young", "shared", "no record", "no cache"])
def test_without_a_record_to_trust_they_are_hashed(artifact, cache, flip, spoil, monkeypatch):
    if spoil == "young":
        monkeypatch.setattr(verified, "_YOUNG", 3600 * 10**9)
    elif spoil == "no cache":
        cache.parent.write_text("a file")
    start(artifact)
    for record in cache.glob("*") if cache.is_dir() else ():
        if spoil == "shared":
            record.chmod(0o666)
        elif spoil == "no record":
            record.write_text('{"boot": 1, "files": []}')
    flip()
    with pytest.raises(ArtifactCorruptError, match=DAMAGED):
        start(artifact)
