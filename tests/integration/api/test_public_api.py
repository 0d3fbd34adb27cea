"""The public names and their signatures are a promise: a change shows up here and in the diff of the snapshot.

After a wanted change:  python tests/integration/api/test_public_api.py > tests/integration/api/public_api.txt
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("public_api.txt")
MODULES = (
    "nxd_infer", "nxd_infer.trace", "nxd_infer.runtime", "nxd_infer.artifact", "nxd_infer.parallel_layers",
    "nxd_infer.parallel_layers.grads", "nxd_infer.parallel_layers.layer_norm", "nxd_infer.parallel_layers.layers",
    "nxd_infer.parallel_layers.loss_functions", "nxd_infer.parallel_layers.mappings",
    "nxd_infer.parallel_layers.pad", "nxd_infer.parallel_layers.sequence_parallel", "nxd_infer.parallel_state",
    "nxd_infer.trainer", "nxd_infer.lightning", "nxd_infer.distributed", "nxd_infer.checkpoint",
    "nxd_infer.checkpoint.api", "nxd_infer.optimizer", "nxd_infer.testing", "nxd_infer.verify", "nxd_infer.modules",
    "nxd_infer.modules.lora", "nxd_infer.modules.moe", "nxd_infer.layout", "nxd_infer.comm", "nxd_infer.context",
    "nxd_infer.errors", "nxd_infer.compat", "nxd_server", "nxd_server.engine", "nxd_models.registry",
    "nxd_models.serving.task_plan", "nxd_models.serving.tasks", "nxd_models.spec",
)  # fmt: skip


def public_names(module) -> list[str]:
    """``__all__``, or what the module itself defines without a leading underscore."""
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(declared)
    own = lambda value: getattr(value, "__module__", None) == module.__name__  # noqa: E731
    return sorted(name for name, value in vars(module).items() if not name.startswith("_") and own(value))


def signature(value: object) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return ""


def describe(value: object) -> list[str]:
    """One line for a function, one more for each public method of a class."""
    if inspect.ismodule(value):
        return [" (module)"]
    if isinstance(value, type):
        # What torch defines is worded differently by each release.
        foreign = issubclass(value, BaseException) or str(getattr(value.__init__, "__module__", "")).startswith("torch")
        lines = [f" class{'' if foreign else signature(value)}"]
        for name, member in sorted(vars(value).items()):
            if not name.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, (staticmethod, property))
            ):
                lines.append(f"    .{name}{'' if isinstance(member, property) else signature(getattr(value, name))}")
        return lines
    return [signature(value) if callable(value) else " (value)"]


def snapshot() -> str:
    lines, seen = [], set()  # methods are listed where a class comes first
    for name in MODULES:
        module = importlib.import_module(name)
        lines.append(f"[{name}]")
        for public in public_names(module):
            value = getattr(module, public)
            first, *rest = describe(value)
            lines += [f"{public}{first}", *([] if id(value) in seen else rest)]
            seen.add(id(value))
        lines.append("")
    return "\n".join(lines)


def test_the_public_api_is_the_one_written_down():
    # In a process of its own, so that what other tests import or patch has no influence.
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SNAPSHOT.read_text().strip()


if __name__ == "__main__":
    print(snapshot())
