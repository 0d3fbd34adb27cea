"""Building, caching, recognising and loading the native operator library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_infer import native
from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError
from tests.support.needs import needs_native
from tests.support.processes import wait_until

pytestmark = needs_native

ROOT = Path(__file__).parents[3]


def in_fresh_process(code: str, **environment: str) -> str:
    """Run code in a new interpreter, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(path: Path, text: str) -> str:
    """A program that stands for the compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_loading_registers_the_operators_once():
    library = native.load()
    assert native.availability().ok
    assert library is native.load()
    assert native.read_hash(library.path) == library.hash
    with pytest.raises(KeyError, match="no operator 'nothing'; it has"):
        library.op("nothing")


@pytest.fixture(scope="module")
def other_release(tmp_path_factory):
    """Sources that differ from ours, and the cache that holds what two builders at once made of them, after one that
    was killed. The collectives are enough: all sources take the compiler most of a minute."""
    root = tmp_path_factory.mktemp("release")
    changed = root / "csrc"
    others = shutil.ignore_patterns("attention", "generation", "packed")
    shutil.copytree(native.SOURCES, changed, ignore=others)
    with (changed / "collectives/reduce.cpp").open("a") as file:
        file.write("\n// another release\n")
    slow = script(root / "slow-g++", "sleep 600")
    quick = script(root / "quick-g++", f'exec {shutil.which("g++")} "$@" -O0')
    folder = root / "cache" / "native"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NXD_INFER_CACHE": str(root / "cache")}
    code = (
        "from pathlib import Path; from nxd_infer import native\n"
        f"native.SOURCES = Path({str(changed)!r}); native.load()"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], env={**env, "CXX": slow}, start_new_session=True)
    wait_until(lambda: list(folder.glob(".build-*")))
    os.killpg(builder.pid, 9)
    builder.wait(60)
    assert not list(folder.glob("*/libnxd.so"))
    assert list(folder.glob(".build-*"))

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**env, "CXX": quick},
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=600) for process in processes]
    return changed, root / "cache", [process.returncode for process in processes], told


def test_after_a_killed_builder_several_make_one_library(other_release):
    """The lock goes with its holder, a half-made library is never found, and of several builders one builds."""
    _, cache, statuses, told = other_release
    assert statuses == [0, 0]
    lines = [line for _, err in told for line in err.splitlines() if "building the native operators" in line]
    assert len(lines) == 1 and "minutes" in lines[0], "whoever waits for it can read why, in a log as well"
    assert not list((cache / "native").glob(".build-*")), "no scratch folder is left, the killed builder's neither"
    assert len([*(cache / "native").glob("*/libnxd.so")]) == 1


def test_two_libraries_of_different_contents_live_in_one_process(tmp_path, other_release):
    """As two artifacts of different releases do; a second copy of the same one is the same library."""
    changed, cache, *_ = other_release
    code = f"""
import shutil, torch
from pathlib import Path
from nxd_infer import native
from nxd_infer.comm.shm import create_segment
first = native.load_file({str(native.load().path)!r})
copy = Path({str(tmp_path)!r}) / "copy.so"
shutil.copy(first.path, copy)
assert native.load_file(copy) is first
native.SOURCES = Path({str(changed)!r})
second = native.load()
assert second.hash != first.hash and second.namespace != first.namespace
for library, rank in ((first, 0), (second, 1)):
    library.op("comm_init")("tp", create_segment(2), rank, 2, 0, 1.0)
    try:
        library.op("all_reduce")(torch.ones(2), "tp", "sum", 0)
    except RuntimeError as error:
        assert "connects 2 ranks, the call is for 0" in str(error)
print([library.op("axis_rank")("tp").item() for library in (first, second)])
"""
    assert in_fresh_process(code, NXD_INFER_CACHE=str(cache)).strip() == "[0, 1]"


def test_a_compiler_is_needed_to_build_and_not_to_load(tmp_path):
    """Where there is none, the reason is given; and once the library is there, nobody asks for one."""
    cache = native.load().path.parents[2]
    code = f"""
import os
from nxd_infer import native
from nxd_infer.errors import BackendUnavailableError
try:
    native.load()
except BackendUnavailableError as error:
    print(error)
os.environ["CXX"] = "no-such-compiler"
print(native.availability())
os.environ["NXD_INFER_CACHE"] = {str(cache)!r}
print(native.availability().ok, native.load().path)
"""
    printed = in_fresh_process(code, NXD_INFER_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="").splitlines()
    assert "no C++ compiler" in printed[0]
    assert "ok=False" in printed[1] and "CXX='no-such-compiler' is not on the PATH" in printed[1]
    assert printed[2] == f"True {native.load().path}"


def test_a_planted_library_does_not_run(tmp_path):
    """What is in a directory that has been closed since may still be another's."""
    tmp_path.chmod(0o700)
    library = tmp_path / "native" / native.source_hash() / "libnxd.so"
    library.parent.mkdir(parents=True, mode=0o700)
    shutil.copyfile(native.load().path, library)
    if os.geteuid() == 0:
        os.chown(library, 65534, 65534)
    else:
        library.chmod(0o666)
    code = f"""
from nxd_infer import native
from nxd_infer.errors import UntrustedCacheError
try:
    native.load()
except UntrustedCacheError as error:
    print({str(library)!r} in str(error))
"""
    assert in_fresh_process(code, NXD_INFER_CACHE=str(tmp_path)) == "True\n"


def test_a_failing_compiler_is_quoted_and_remembered(tmp_path):
    broken = script(tmp_path / "broken-g++", "echo 'error: the disk is on fire' >&2\nexit 3")
    code = """
from nxd_infer import native
from nxd_infer.errors import BackendUnavailableError
assert native.availability().ok
try:
    native.load()
except BackendUnavailableError as error:
    print("disk is on fire" in str(error), "status 3" in str(error))
print(native.availability().ok, "disk is on fire" in native.availability().reason)
"""
    printed = in_fresh_process(code, NXD_INFER_CACHE=str(tmp_path / "cache"), CXX=broken).split()
    assert printed == ["True", "True", "False", "True"]


def test_a_file_that_is_no_library_is_refused_before_it_is_loaded(tmp_path):
    stray = tmp_path / "stray.so"
    stray.write_bytes(b"\x7fELF" + bytes(2000))
    with pytest.raises(ArtifactCorruptError, match="not a native library"):
        native.load_file(stray)
    (tmp_path / "empty.so").touch()
    with pytest.raises(ArtifactCorruptError, match="cannot be read"):
        native.load_file(tmp_path / "empty.so")
    with pytest.raises(ArtifactCorruptError, match="cannot be read"):
        native.load_file(tmp_path / "missing.so")
    cut = tmp_path / "cut.so"
    cut.write_bytes(native.load().path.read_bytes()[:-100])
    with pytest.raises(ArtifactCorruptError, match="cut short"):
        native.load_file(cut)


def test_a_library_for_another_torch_or_machine_is_not_called_damaged(tmp_path):
    source = tmp_path / "newer.cpp"
    source.write_text(
        'extern "C" int a_function_of_a_newer_torch();\n'
        'extern "C" __attribute__((used)) const char identity[] = "NXD-NATIVE-LIBRARY:0123456789abcdef:END";\n'
        "int result = a_function_of_a_newer_torch();\n"
    )
    newer = tmp_path / "newer.so"
    subprocess.run([native.find_compiler(), "-shared", "-fPIC", source, "-o", newer], check=True, timeout=60)
    with pytest.raises(ArtifactVersionError, match=r"newer\.so: undefined symbol: a_function_of_a_newer_torch"):
        native.load_file(newer)
    foreign = bytearray(newer.read_bytes())
    foreign[18:20] = (243).to_bytes(2, "little")  # RISC-V
    newer.write_bytes(foreign)
    with pytest.raises(ArtifactVersionError, match="cannot be loaded"):
        native.load_file(newer)
