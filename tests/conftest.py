"""What every test process needs: two at once (pytest-xdist) must not claim the same cores. A cache to count in.

Tests of ``tests/unit`` are marked ``unit``; the files that take longest, by ``durations.json``, begin first.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import durations, shared
from tests.support.skips import pytest_sessionfinish as pytest_sessionfinish

# How long an example takes, or is made, says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts behind it (`make test &`) so, and what tests start would inherit it: Ctrl-C is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled code is kept whatever the environment says: else each of the hundreds of processes that tests start would
# compile what it imports of this package, and each collection all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected stays, and takes long to scan: while more is collected, and in every test.
gc.disable()

# Threads that wait for a loop's end would spin, on cores that other processes of the tests need. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# XLA compiles in half the time so, what is small and runs a few times. xla/test_serving does without.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# The stand-in for torch_xla, which some tests ask for, is no device for transformers. Read when that loads.
os.environ.setdefault("USE_TORCH_XLA", "0")

# Inductor's kernels are compiled as for users; what calls them takes three quarters of its time to compile so.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Ranks of a test share this machine: each would want a GPU of its own.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each process would pin its ranks to the same cores and time out there; the kernel places them better.
    os.environ.setdefault("NXD_INFER_PIN", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def old_names(request: pytest.FixtureRequest) -> None:
    """Modules of tests/*/seeds use the names of neuronx_distributed; elsewhere nothing answers them at first."""
    from nxd_infer import compat

    (compat.install if request.path.parent.name == "seeds" else compat.uninstall)()


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A module's own cache of compiled graphs, whose compiles it may count; the native operators keep theirs."""
    from nxd_infer.util.cache_dir import cache_dir

    directory = tmp_path_factory.mktemp("cache")
    (directory / "native").symlink_to(cache_dir("native"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_INFER_CACHE", str(directory))
        yield directory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="measure tests/durations.json again")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of `make test`, files that have none of it: what they import takes half of a collection's time."""
    if config.option.markexpr != "unit or smoke" or not collection_path.match("integration/*/test_*.py"):
        return None
    return "mark.smoke" not in collection_path.read_text() or None


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests
    if shared.VARIABLE not in os.environ:
        config.pluginmanager.register(shared.Folder())
    if config.option.write_durations:
        config.pluginmanager.register(durations.Writer(config))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -durations.seconds(item.nodeid))
    for item in items:
        if item.nodeid.startswith("tests/unit/"):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
