"""Run a program of examples/ported on ranks that are forked from a process that has imported what all of them do."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import wait
from pathlib import Path

import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert
import transformers.models.clip.modeling_clip
import transformers.models.gpt_neox.modeling_gpt_neox
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import nxd_infer.trainer  # noqa: F401
from nxd_infer.processes.child import end_all
from nxd_infer.processes.command import environment_of_caller, python_of_caller
from nxd_infer.processes.start import start
from nxd_infer.util.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples/ported"
_DOOR = (
    "import os; os.chdir(sys.argv.pop(1)); sys.path.insert(0, os.path.dirname(sys.argv[1])); "
    "from nxd_infer.compat import main; main()"
)
SECONDS = 300


def run(cwd: Path, ranks: int, program: str, *options: object) -> str:
    """Run it as ``python -m nxd_infer.compat`` does, with several ranks as torchrun starts them; what rank 0 shows."""
    cwd.mkdir(parents=True, exist_ok=True)
    environment = {**environment_of_caller(), "OMP_NUM_THREADS": "1"}
    port, children = str(free_port()), []
    with contextlib.ExitStack() as opened:
        opened.callback(end_all, children)
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            launched = {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
            children.append(
                start(
                    python_of_caller(_DOOR, str(cwd), str(EXAMPLES / program), *map(str, options)),
                    imports="tests.support.ported",
                    importing=environment,
                    environment={**environment, **({**launched, "MASTER_PORT": port} if ranks > 1 else {})},
                    check=lambda: None,  # a test has a time limit
                    output=opened.enter_context(open(cwd / f"rank{rank}.txt", "w")),
                )
            )
        ended = True
        while ended and any(child.returncode is None for child in children) and not any(c.returncode for c in children):
            ended = wait([child.sentinel for child in children if child.returncode is None], SECONDS)
        shown = [(cwd / f"rank{rank}.txt").read_text() for rank in range(ranks)]
        assert all(child.returncode == 0 for child in children), "\n".join(text[-3000:] for text in shown)
    return shown[0]
