"""A wheel carries the native operators: a machine without a C++ compiler traces with them and serves."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from nxd_server.http.page.files import FILES
from tests.support.needs import needs_native

ROOT = Path(__file__).parents[3]
MODEL = """
import torch

def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 3)
    return torch.nn.Sequential(*layers)
"""
TRACES = """
import shutil, torch
import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.backends.cpu import program
from model import build

assert not any(map(shutil.which, ("g++", "c++", "cc", "clang++"))) and nxd.__file__.startswith({place!r})
x = torch.ones(2, 128)
with nxd.trace.parallel_model_trace(build, (x,), artifact_dir={artifact!r}) as model:
    assert torch.allclose(model(x), build()(x), atol=1e-5)
assert str(native.load().path).startswith({place!r})
with nxd.trace.parallel_model_load({artifact!r}, in_process=True) as model:
    assert torch.allclose(model(x), build()(x), atol=1e-5) and program.prepare()
"""


@needs_native
def test_without_a_compiler_the_operators_of_a_wheel_trace_and_serve(tmp_path: Path) -> None:
    build = [sys.executable, ROOT / "deploy/wheel.py", tmp_path / "dist"]
    subprocess.run(build, check=True, timeout=300, cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "linux" in wheel.name
    place = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(place)
    assert all((place / file.relative_to(ROOT / "server")).exists() for file in FILES.values())
    (tmp_path / "model.py").write_text(MODEL)
    bare = tmp_path / "bin"
    bare.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CXX"},
        "PATH": str(bare),
        "PYTHONPATH": f"{place}:{tmp_path}",
        "NXD_INFER_CACHE": str(tmp_path / "cache"),
    }
    code = TRACES.format(place=str(place), artifact=str(tmp_path / "artifact"))
    command = [sys.executable, "-P", "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "slower" not in done.stderr and "building" not in done.stderr
    assert not list((tmp_path / "cache").glob("native/*"))
