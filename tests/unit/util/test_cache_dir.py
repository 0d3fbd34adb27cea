"""The cache holds code: nobody else may be able to write there, and files of others are rejected.

Other owners are tested where the tests run as root, who alone can give files away; elsewhere the modes are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.errors import CacheUnavailableError, UntrustedCacheError
from nxd_infer.util.cache_dir import cache_dir

ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "way" / "cache"))
    (tmp_path / "way").mkdir(mode=0o755)
    return tmp_path / "way"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_the_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "a" and cache_dir().is_dir()
    monkeypatch.delenv("NXD_INFER_CACHE")
    assert cache_dir() == tmp_path / "b" / "nxd_infer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c" / ".cache" / "nxd_infer"


def test_directories_are_for_their_owner_alone(place, monkeypatch):
    before = os.umask(0o002)
    try:
        assert cache_dir("graphs") == place / "cache" / "graphs"
    finally:
        os.umask(before)
    assert mode(place / "cache") == mode(place / "cache" / "graphs") == 0o700 and mode(place) == 0o755
    (place / "cache" / "graphs").chmod(0o755)
    cache_dir("graphs")
    assert mode(place / "cache" / "graphs") == 0o700
    (place / "cache").chmod(0o755)  # it may hold other things that others read, and they cannot write
    cache_dir("graphs")
    assert mode(place / "cache") == 0o755
    monkeypatch.delenv("NXD_INFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    (place / "nxd_infer").mkdir(mode=0o755)
    assert mode(cache_dir()) == 0o700 and mode(place) == 0o755


@pytest.mark.parametrize(
    ("where", "bits"), [("way", 0o775), ("way/cache", 0o757), ("way/cache/graphs", 0o775), ("way/cache/native", 0o757)]
)
def test_a_directory_that_others_can_write_to_is_refused(place, tmp_path, where, bits):
    for name in ("graphs", "native"):
        cache_dir(name)
    directory = tmp_path / where
    if ROOT:
        os.chown(directory, -1, NOBODY)
    else:
        bits |= 0o002  # the group of who runs this may be theirs alone
    directory.chmod(bits)
    uses = {"native": lambda: cache_dir("native"), "graphs": lambda: compile_cache.fetch("digest", tmp_path / "graph")}
    for name, use in uses.items():
        if where.endswith(("native", "graphs")) and not where.endswith(name):
            continue
        with pytest.raises(UntrustedCacheError) as caught:
            use()
        said = str(caught.value)
        assert str(directory) in said and f"mode {bits:04o}" in said and "NXD_INFER_CACHE" in said
        assert f"`{'rm -r' if directory.parent.name == 'cache' else 'chmod go-w'} {directory}`" in said
    assert mode(directory) == bits  # nothing is tightened where others may have put something already


def test_a_sticky_directory_of_roots_is_no_danger(place, monkeypatch):
    """Such as ``/tmp``: there nobody can rename or remove what is ours."""
    if ROOT:
        place.chmod(0o1777)
    assert cache_dir("graphs").is_dir()
    (place / "link").symlink_to("cache/../cache")
    monkeypatch.setenv("NXD_INFER_CACHE", str(place / "link"))
    assert cache_dir("graphs").samefile(place / "cache" / "graphs")


def test_links_are_followed_step_by_step(place, tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "inner").mkdir(mode=0o700)
    (place / "cache").symlink_to(tmp_path / "open" / "inner")
    with pytest.raises(UntrustedCacheError, match=f"{tmp_path}/open belongs to"):
        cache_dir("graphs")
    (place / "cache").unlink()
    (place / "cache").symlink_to("cache")
    with pytest.raises(OSError, match="symbolic links"):
        cache_dir("graphs")
    monkeypatch.setenv("NXD_INFER_CACHE", str(place / "new"))
    (place / "new").symlink_to("made/below")  # a link to what is not there yet
    assert cache_dir("graphs").samefile(place / "made" / "below" / "graphs")


@pytest.mark.parametrize("where", ["way", "way/cache", "way/cache/graphs", "link"] if ROOT else [])
def test_what_belongs_to_another_is_refused(place, tmp_path, monkeypatch, where):
    cache_dir("graphs")
    if where == "link":
        (tmp_path / where).symlink_to(place / "cache")
        monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / where))
    os.chown(tmp_path / where, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(UntrustedCacheError, match=rf"{tmp_path / where} belongs to (nobody \()?65534") as caught:
        compile_cache.fetch("digest", tmp_path / "graph")
    assert "chmod" not in str(caught.value) and "rm -r" not in str(caught.value)  # we could not trust it anyway


def others(path: Path) -> None:
    """Make a file one that another user has written, or could write."""
    if ROOT:
        os.chown(path, NOBODY, NOBODY)
    else:
        path.chmod(0o666)


@pytest.mark.parametrize("where", ["cache", "cache/graphs"])
def test_a_directory_that_cannot_be_made_is_named_with_a_way_out(place, monkeypatch, where):
    """A file lies in its place, as nobody can make a directory there, root neither."""
    (place / where).parent.mkdir(exist_ok=True)
    (place / where).write_text("")
    with pytest.raises(CacheUnavailableError) as caught:
        cache_dir("graphs")
    assert str(caught.value) == (
        f"{place / where} cannot be used for the cache (Not a directory): set NXD_INFER_CACHE to a directory "
        "that you can write to"
    )


def test_a_planted_graph_is_not_taken(place, tmp_path):
    graph = tmp_path / "graph"
    graph.mkdir()
    (graph / "code.so").write_bytes(b"code")
    before = os.umask(0)
    try:
        compile_cache.store("digest", graph)
    finally:
        os.umask(before)
    assert compile_cache.fetch("digest", tmp_path / "mine")
    (entry,) = (place / "cache" / "graphs").glob("digest-*/entry.json")
    others(entry)
    with pytest.raises(UntrustedCacheError, match=str(entry)):
        compile_cache.fetch("digest", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
