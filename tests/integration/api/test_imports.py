"""``import nxd_infer`` loads torch late, and nothing optional."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONAL = {
    "fastapi", "uvicorn", "transformers", "tokenizers", "typer", "rich", "pydantic", "torch_xla",
    "torch_neuronx", "lightning", "prometheus_client", "jinja2", "nxd_server", "nxd_models",
}  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_library_loads_nothing_optional():
    """Torch is the only dependency it may need, and that only when a submodule is touched; never its compiler."""
    assert loaded_by("import nxd_infer; nxd_infer.errors") & (OPTIONAL | {"torch"}) == set()
    found = loaded_by(
        "import os; before = dict(os.environ)\n"
        "import nxd_infer; nxd_infer.parallel_layers.ColumnParallelLinear\n"
        "import nxd_infer.native, nxd_infer.comm.shm, torch\n"
        "assert not torch.distributed.is_initialized() and dict(os.environ) == before"
    )
    assert found & (OPTIONAL | {"torch._dynamo", "torch._inductor"}) == set()


def test_what_starts_ranks_and_serves_tokens_needs_no_torch():
    """Its import takes a second, which the ranks take as well: they would begin theirs only afterwards."""
    modules = loaded_by(
        "import nxd_infer.runtime.rank_model, nxd_infer.runtime.rank_process.main, nxd_infer.cli.main\n"
        "import nxd_server.app.run, nxd_server.http.server\n"
        "import nxd_server.engine.generation_engine, nxd_server.text.chat_template, nxd_server.text.tokenizer"
    )
    assert {"nxd_server", "fastapi", "numpy"} <= modules
    assert "torch" not in modules
