"""GuideLLM, as its command: chats, several at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.clients.asked import MODEL

PACKAGES = ["guidellm"]


def load(url: str) -> list[dict[str, Any]]:
    """How many requests ended how."""
    report = Path(tempfile.mkdtemp()) / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={url.removesuffix('/v1')},model={MODEL}",
        "--profile": "kind=concurrent,streams=4",
        "--constraint": "kind=max_requests,count=20",
        "--tokenizer": f"kind=huggingface_auto,model={os.environ['MODEL_FOLDER']}",
        "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += [word for pair in options.items() for word in pair]
    subprocess.run(command, check=True, timeout=300)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return [benchmark["metrics"]["request_totals"]]
