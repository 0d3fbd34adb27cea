"""The clients, and the table of docs/clients.md: ``python -m tests.integration.clients.table`` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
CLIENTS = sorted(path for path in HERE.glob("*.py") if re.search("^PACKAGES = ", path.read_text(), re.MULTILINE))
"""The file of each client: its packages, and a function for each of the things that it does."""
PAGE = HERE.parents[2] / "docs/clients.md"
BEGIN = "| client | tested |\n|---|---|\n"


def functions_of(client: Path) -> list[str]:
    return re.findall(r"^def ([a-z]\w+)\(url", client.read_text(), re.MULTILINE)


def _versions() -> dict[str, str]:
    pinned = re.findall(r"^([\w-]+)\S*==(\S+)$", (HERE / "requirements.txt").read_text(), re.MULTILINE)
    return dict(pinned) | json.loads((HERE / "package.json").read_text())["dependencies"]


def _row(client: Path) -> str:
    text, versions = client.read_text(), _versions()
    named = re.findall('"([^"]+)"', text.split("PACKAGES = [")[1].split("]")[0])
    packages = ", ".join(f"{name} {versions[name]}" for name in named)
    return f"| {packages} | {', '.join(functions_of(client)).replace('_', ' ')} |\n"


def with_table(page: str) -> str:
    """The page, with the table of these clients in place of its own."""
    return re.sub(re.escape(BEGIN) + r"(?:\|.*\n)*", lambda _: BEGIN + "".join(map(_row, CLIENTS)), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
