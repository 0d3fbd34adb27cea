"""docs/transformers.md: its program and its command run, its table and its plan are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.distributed import plan_registry
from tests.support.distributed.models import LOOSE, Case

transformers = pytest.importorskip("transformers")
PAGE = (Path(__file__).parents[3] / "docs/transformers.md").read_text()
PROGRAM, PLAN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BIN = Path(sys.executable).parent


def run(folder: Path, command: str) -> None:
    program, *arguments = command.split()
    done = subprocess.run([BIN / program, *arguments], cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.smoke
def test_the_program_and_the_command(tmp_path: Path):
    Case("llama", 3, 1, LOOSE).build().save_pretrained(tmp_path / "llama")
    (tmp_path / "tune.py").write_text(PROGRAM)
    run(tmp_path, re.match(r"# (torchrun .*)", PROGRAM)[1])
    run(tmp_path, re.search(r"^\$ (nxd-infer .*?) *#", PAGE, re.MULTILINE)[1])
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / n) for n in ("llama", "llama-tuned"))
    moved = [float((p - q).detach().abs().max()) for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(0 < distance <= 1.1e-4 for distance in moved)  # a step of AdamW, with its decay


def test_the_table_names_the_types():
    named = re.search(r"^\| model types \| (.*) \|$", PAGE, re.MULTILINE)[1].split(", ")
    manager = nxd.distributed.ParallelizersManager
    assert named == manager.get_supported_model_types()
    assert {manager.is_model_supported(kind) for kind in named} == {(True, True, True)}


def test_the_plan_is_that_of_llama(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_registry, "_REGISTERED", {})
    with torch.device("meta"):
        model = Case("llama", 4, 2).build()
    own = plan_registry.plan_for(model.config)
    exec(PLAN, {"nxd": nxd})
    written = plan_registry.plan_for(model.config)
    assert written is not own
    names = [name for name, _ in model.named_modules()]
    assert [written.style_of(name) for name in names] == [own.style_of(name) for name in names]
    assert written.stacks == own.stacks
