"""The options, targets and cache of the inductor backend: nothing is compiled."""

from __future__ import annotations

import os

import pytest

from nxd_infer import backends
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.cpu.target import cpu_target
from nxd_infer.errors import TraceConfigError
from nxd_infer.util.machine import cpu_features
from tests.support.needs import needs_inductor

inductor = backends.get("inductor")


@needs_inductor
def test_options_are_checked_and_completed():
    base = inductor.options({})
    assert base["cpp.dynamic_threads"] is True and base["cpp.march"]
    assert "threads" not in inductor.target(base)
    fixed = inductor.options({"cpp.threads": 2, "max_autotune": True})
    assert (fixed["cpp.threads"], fixed["cpp.dynamic_threads"], fixed["max_autotune"]) == (2, False, True)
    assert inductor.target(fixed)["threads"] == 2
    native = inductor.options({"cpu_target": "native"})
    assert native["cpp.march"] == "native" and set(inductor.target(native)["cpu_features"])


def test_cpu_targets_are_levels_and_refused_where_the_machine_is_lower():
    if "avx2" in cpu_features():
        v3 = cpu_target("x86-64-v3", cpu_features(), "x86_64")
        assert (v3.march, v3.simdlen) == ("x86-64-v3", 256) and "avx512f" not in v3.features
    assert cpu_target(None, frozenset(), "x86_64").features == ()
    assert cpu_target(None, frozenset({"asimd"}), "aarch64").features == ("asimd",)
    with pytest.raises(TraceConfigError, match=r"needs .*avx2.* which this machine lacks"):
        cpu_target("x86-64-v3", frozenset(), "x86_64")
    with pytest.raises(TraceConfigError, match="this machine is aarch64"):
        cpu_target("x86-64-v3", frozenset(), "aarch64")


def test_decision_16_the_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    for number in range(3):
        graph = tmp_path / f"graph{number}"
        graph.mkdir()
        (graph / "code").write_bytes(bytes(1000))
        compile_cache.store(f"digest{number}", graph)
        os.utime(
            next((tmp_path / "cache" / "graphs").glob(f"digest{number}-*")) / compile_cache.ENTRY, (number, number)
        )
    assert compile_cache.fetch("digest0", tmp_path / "out")  # used now: the newest
    compile_cache.prune(2500)
    left = {path.name.split("-")[0] for path in (tmp_path / "cache" / "graphs").glob("digest*")}
    assert left == {"digest0", "digest2"}
    assert (tmp_path / "out" / "code").stat().st_size == 1000
    assert not compile_cache.fetch("digest1", tmp_path / "none")
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")
    assert not compile_cache.fetch("digest0", tmp_path / "none")


def test_the_limit_of_the_cache_is_a_size(monkeypatch):
    sizes = {"": 4 << 30, "1000": 1000, "4G": 4 << 30, " 500m ": 500 << 20, "2KiB": 2048, "1TB": 1 << 40, "0": 0}
    for text, size in sizes.items():
        monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", text)
        assert compile_cache.cache_limit() == size, text
    for text in ("4 gigabytes", "-1", "1.5G", "G"):
        monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", text)
        with pytest.raises(TraceConfigError, match=rf"NXD_INFER_CACHE_LIMIT='{text}' is not a size"):
            compile_cache.cache_limit()
