"""The AI SDK under node: its providers for OpenAI's two routes and for servers that are like OpenAI's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.clients.asked import Verdict

PACKAGES = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"]
FOLDER = Path(sys.prefix) / "node"
"""Where `make clients-rig` puts what npm installs: a script finds it only from there."""


def _said(what: str, url: str) -> list[Any]:
    script = shutil.copy(Path(__file__).with_suffix(".mjs"), FOLDER)
    done = subprocess.run(["node", script, what, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chat(url: str) -> list[str]:
    return _said("chat", url)


def streaming(url: str) -> list[list[str]]:
    return _said("streaming", url)


def tools(url: str) -> list[str]:
    return _said("tools", url)


def structured_output(url: str) -> list[Any]:
    return [Verdict.model_validate(one) for one in _said("structured_output", url)]


def embeddings(url: str) -> list[list[float]]:
    return _said("embeddings", url)
