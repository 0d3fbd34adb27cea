"""docs/neuron.md says what the package says: its errors, degrees, versions and commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nxd_infer.backends.neuron import backend, cores
from tests.support.neuron.contract import contract

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/neuron.md").read_text()
EXAMPLES = r"this inf2\.xlarge|inf2|\b\d+(?:\.\d+)?\b|SIG[A-Z]+|\.\.\."
"""What stands in the page for values of a message."""


def messages() -> str:
    """Every text of the backend, with ``{}`` for its values."""
    found = []
    for path in Path(backend.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def table(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_error_of_the_page_is_said() -> None:
    said = messages()
    assert "no such text" not in said and "needs {} cores and {} has" in said
    phrases = [phrase.strip() for what, _ in table("When it does not work") for phrase in what.split(";")]
    assert len(phrases) > 12
    lost = [each for each in phrases if re.sub(EXAMPLES, "{}", each.removeprefix("neuronx-cc ")) not in said]
    assert lost == []


def test_degrees_and_versions_are_those_of_the_package() -> None:
    for name, platform in (("Inf2", "inf2"), ("Trn1", "trn1")):
        *most, last = map(str, cores.DEGREES[platform])
        assert f"{', '.join(most)} and {last} on {name}" in PAGE
    extra = re.search(
        r'neuron = \[.*"torch-neuronx==([\d.]+)", "neuronx-cc==([\d.]+)"\]', (ROOT / "pyproject.toml").read_text()
    )
    assert extra is not None and f"{extra[1]}, {extra[2]} (SDK 2.31)" in PAGE
    assert contract()["sdk"].removeprefix("Neuron ") in PAGE
    assert extra[1] in (ROOT / "Dockerfile").read_text() and extra[2] in (ROOT / "Dockerfile").read_text()


def test_variables_of_the_page_are_the_packages() -> None:
    named = set(re.findall(r"`(NXD_INFER_NEURON_\w+|NEURON_RT_\w+?)(?:=\S+)?`", PAGE))
    said = messages()
    assert len(named) == 4 and all(name in said for name in named)
