"""``nxd-infer port``: which old names a program uses, what becomes of each, and the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nxd_infer.compat import port
from nxd_infer.compat.names import OLD
from nxd_infer.compat.port import examine, verdict
from nxd_infer.compat.views import View
from tests.support.e2e.command import ROOT, here, refused

PAGE = ROOT / "docs/migration.md"
LAYERS = "neuronx_distributed.parallel_layers.layers"
STATE = "neuronx_distributed.parallel_layers.parallel_state"


def found(tmp_path: Path, text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """``{name: (status, lines)}`` of a program."""
    path = tmp_path / "program.py"
    path.write_text(text)
    return {row.name: (row.status, row.lines) for row in examine([path])[1]}


@pytest.mark.parametrize(
    "text, name, line",
    [
        (f"from {LAYERS} import RowParallelLinear as R", f"{LAYERS}.RowParallelLinear", "1"),
        (f"import {LAYERS} as c\nc.RowParallelLinear", f"{LAYERS}.RowParallelLinear", "2"),
        ("import neuronx_distributed as nxd\nnxd.parallel_layers.layers.RowParallelLinear(4, 4)",
         f"{LAYERS}.RowParallelLinear", "2"),
        ("import neuronx_distributed as nxd\nlayers = nxd.parallel_layers.layers\nlayers.RowParallelLinear",
         f"{LAYERS}.RowParallelLinear", "3"),
        (f"def f():\n    return nxd.{LAYERS.partition('.')[2]}.SPMDRank\nimport neuronx_distributed as nxd",
         f"{LAYERS}.SPMDRank", "2"),
        (f"class A:\n    def f(self):\n        from {STATE} import get_tensor_model_parallel_rank as r\n        r()",
         f"{STATE}.get_tensor_model_parallel_rank", "3"),
    ],
)  # fmt: skip
def test_a_name_is_found_however_it_is_imported(tmp_path, text, name, line):
    status, lines = found(tmp_path, text)[name]
    assert status in ("works", "moved") and lines[0] == line


def test_what_is_no_use_of_an_old_name(tmp_path):
    text = """
import neuronx_distributed as nxd
from . import torch_xla
from .neuronx_distributed import x
TEXT = "neuronx_distributed.nowhere"  # neuronx_distributed.nowhere
def f(nxd):
    return nxd.nowhere
def g():
    for nxd in range(3):
        nxd.nowhere
(lambda nxd: nxd.nowhere)(1)
"""
    assert found(tmp_path, text) == {"neuronx_distributed": ("works", ("2",))}


def test_absent_names_say_what_to_use_instead(tmp_path):
    rows = {name: verdict(name) for name in (f"{LAYERS}.RowParallelLiner", "transformers_neuronx.llama.Model")}
    assert [row.status for row in rows.values()] == ["absent", "absent"]
    assert [row.text for row in rows.values()] == [
        "nothing of that name; did you mean RowParallelLinear?", "`nxd-infer trace MODEL --tp N` and `nxd-infer serve`"
    ]  # fmt: skip
    assert verdict("neuronx_distributed.nowhere.x.Y").name == "neuronx_distributed.nowhere"
    assert verdict("neuronx_distributed.trainer.model.NxDModel.run_trian").text.endswith("did you mean run_train?")
    moved = verdict("neuronx_distributed.trace.trace.parallel_model_trace")
    assert (moved.status, moved.text) == ("moved", "nxd_infer.trace.api.parallel_model_trace")


def test_a_call_that_passes_what_is_not_taken(tmp_path):
    text = f"from {LAYERS} import RowParallelLinear as R, SPMDRank\n{{}}\nSPMDRank(*x, **y)"
    for call, said in {
        "R(4, 4, bais=True)": "got an unexpected keyword argument 'bais'",
        "R(4, 4, rank_ordering=[1, 2])": "rank_ordering=[1, 2] is not supported: leave it out, or pass None",
        "R(1, 2, 3, 4, 5, 6, 7, 8, 9)": "too many positional arguments",
    }.items():
        (tmp_path / "a.py").write_text(text.format(call))
        rows = examine([tmp_path])[1]
        assert [(row.lines, row.text) for row in rows if row.status == "refused"] == [(("2",), said)]
    for call in ("R(4, 4, bias=True)", "R(4, 4, rank_ordering=None)", "R(4, 4, rank_ordering=order)"):
        assert {status for status, _ in found(tmp_path, text.format(call)).values()} == {"works"}


def test_a_call_of_what_only_a_device_has(tmp_path):
    kernel = "neuronxcc.nki.kernels.attention.flash_fwd"
    text = "import neuronxcc.nki.kernels.attention as a\na.flash_fwd(1, 2, causal=True)"
    assert found(tmp_path, text)[kernel] == ("not here", ("2",))


def test_a_try_expects_an_import_to_fail(tmp_path):
    caught = "try:\n    import transformers_neuronx as t\nexcept {}:\n    t = None\n"
    for error, status in {"ImportError": 0, "(KeyError, ModuleNotFoundError)": 0, "ValueError": 1}.items():
        (tmp_path / "a.py").write_text(caught.format(error))
        done = here("port", tmp_path / "a.py")
        assert done.status == status and ("the program expects that" in done.out) == (status == 0)


def test_a_notebook_is_one_program_and_lines_are_those_of_its_cells(tmp_path):
    cells = [("code", f"!pip install x\nimport {LAYERS} as l\n"), ("markdown", "l.nowhere"), ("code", "%%bash\nl.no"),
             ("code", "%time x = 1\nif x:\n    files = !ls\nl.SPMDRank"), ("code", "x\nl.no more")]  # fmt: skip
    notebook = {"cells": [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in cells]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    rows = {row.name: row.lines for row in examine([tmp_path / "a.ipynb"])[1]}
    assert rows == {"(the cell)": ("cell 5, 2",), LAYERS: ("cell 1, 2",), f"{LAYERS}.SPMDRank": ("cell 4, 4",)}
    assert here("port", "--json", tmp_path / "a.ipynb").status == 1


def test_folders_the_programs_own_packages_and_files_that_cannot_be_read(tmp_path):
    own = tmp_path / "neuronx_distributed_inference"
    for folder in (own, tmp_path / ".hidden", tmp_path / "site-packages"):
        folder.mkdir()
        (folder / "__init__.py").write_text("import transformers_neuronx\n" if folder != own else "")
    (tmp_path / "a.py").write_text("import neuronx_distributed_inference\nfrom neuronx_distributed.trainer import *\n")
    (tmp_path / "b.py").write_text("print 'old'\n")
    files, rows = examine([tmp_path])
    assert [(row.status, Path(row.file).name) for row in rows] == [
        ("unchecked", "a.py"), ("unreadable", "b.py")
    ] and files == 3  # fmt: skip
    assert "line 1" in rows[1].text
    refused(here("port", tmp_path / "nowhere.py"), "there is no", "nowhere.py")


def test_the_report_as_text_and_as_json(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f"import {LAYERS} as l\nl.SPMDRank(4)\nl.SPMDRank(2)\nl.gone\n")
    done = here("port", path)
    assert done.status == 1 and done.out.splitlines() == [
        str(path),
        f"  1     works   {LAYERS}",
        f"  2, 3  works   {LAYERS}.SPMDRank",
        f"  4     absent  {LAYERS}.gone      nothing of that name",
        "3 names in 1 file: works 2, absent 1",
        "(works: as before; absent: the import, or the attribute, fails)",
    ]
    told = json.loads(here("port", "--json", path).out)
    assert told["counts"] == {"works": 2, "absent": 1} and told["files"] == 1
    assert told["names"][2] == {
        "name": f"{LAYERS}.gone", "status": "absent", "text": "nothing of that name", "file": str(path), "lines": ["4"],
        "guarded": False, "stops": True,
    }  # fmt: skip
    path.write_text("import neuronx_distributed\n")
    assert "\n1 name in 1 file: works 1\n" in here("port", path).out
    path.write_text("import torch\n")
    assert here("port", path).out == "0 names in 1 file: nothing to do\n" and here("port", path).status == 0


def test_every_name_of_the_table_is_judged_as_an_import_finds_it():
    judged = {f"{path}.{name}": hasattr(View(path), name) for path in OLD for name in OLD[path].names}
    assert {name: verdict(name).status != "absent" for name in judged} == judged
    for path, module in OLD.items():
        assert all(verdict(f"{path}.{name}").status == "not here" for name in module.device)
        assert all(verdict(f"{path}.{name}").status == "differs" for name in module.differs)


def with_table(page: str) -> str:
    """``docs/migration.md`` with the present table."""
    return re.sub(r"(?ms)^\| name \| here .*?(?=^$)", lambda _: f"{port.table()}\n", page)


def test_the_documentation_has_the_table():
    assert PAGE.read_text() == with_table(PAGE.read_text()), f"run: python {Path(__file__).relative_to(ROOT)}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
