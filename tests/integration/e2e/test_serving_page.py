"""docs/serving.md: its programs run, in their order, against the command that it prints for them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from nxd_infer.util.ports import free_port
from tests.integration.e2e.test_readme import PORT
from tests.support.e2e.command import ROOT
from tests.support.e2e.serving import serving
from tests.support.http.taught_model import taught

PAGE = (ROOT / "docs/serving.md").read_text()
SHORTER = {"--max-len 2048": "--max-len 320 --batch-sizes 1 --prompt-buckets 128 --dtype float32 --backend eager"}
"""For a model that is tiny."""


def test_the_programs_run_against_the_command(tmp_path):
    """With a tiny model in place of the one that the command before it downloads. What it says is its own affair."""
    ((name, serve),) = re.findall(r"^hf download \S+ --local-dir (\S+)\n(nxd-infer serve .*)$", PAGE, re.MULTILINE)
    taught(tmp_path / name)
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 4 and all(word in "".join(programs) for word in ("tools=", "reasoning_content", "parse("))
    port = free_port()
    for long, short in SHORTER.items():
        assert long in serve
        serve = serve.replace(long, short)
    with serving([*shlex.split(serve)[1:], "--keep", "kept", "--port", str(port)], port, tmp_path):
        program, env = "\n".join(programs).replace(PORT, str(port)), {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=env)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^kind='(rain|sun)' degrees=-?\d+$", done.stdout, re.MULTILINE), done.stdout
