"""deploy/ray without Ray: the file of the cluster, the application and the page agree. `make test-ray` runs it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from nxd_infer.util.options import declared, defaults
from nxd_server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
RAY = ROOT / "deploy/ray"


def arguments() -> list[str]:
    """The fields of the application's Arguments."""
    tree = ast.parse((RAY / "application.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Arguments"]
    return [ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)]


def test_the_file_names_the_application_and_its_arguments():
    file = yaml.safe_load((RAY / "serve.yaml").read_text())
    (application,) = file["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((RAY / f"{module}.py").read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert application["route_prefix"] == "/"  # clients ask for /v1
    assert set(application["args"]) <= set(arguments())
    assert set(application["args"]["settings"]) <= set(declared(ServerSettings))
    assert file["http_options"]["request_timeout_s"] > defaults(ServerSettings)["request_timeout"]


def test_the_page_has_every_argument():
    page = (ROOT / "docs/deploying.md").read_text()
    table = re.search(r"^\| argument \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    assert table is not None and re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE) == arguments()
