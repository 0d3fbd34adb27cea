"""Which backends there are, and that nobody outside knows."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_infer.backends import registry
from nxd_infer.errors import ArtifactBackendError, TraceConfigError
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.request import tracing_backend
from tests.support.backends.plugins import installed
from tests.support.neuron.machines import neuron_machine

ROOT = Path(__file__).parents[3]
PACKAGES = ("nxd_infer", "server/nxd_server", "models/nxd_models")


def test_backends_of_other_packages_are_found_by_their_entry_points() -> None:
    assert "lockstep" not in registry.names()
    with pytest.raises(ArtifactBackendError, match=r"there is no backend 'lockstep'; backends are cpu, "):
        registry.get("lockstep")
    with installed():
        assert {"cpu", "xla", "neuron", "lockstep", "broken"} == set(registry.names())
        assert registry.get("lockstep").name == "lockstep"
        assert registry.get("eager") is registry.get("inductor") is registry.get("cpu")
        with pytest.raises(ArtifactBackendError, match=r"'broken' of broken-backend cannot.*no_such_module"):
            registry.get("broken")
        with pytest.raises(TraceConfigError, match="no_such_module"):
            tracing_backend("broken")


def test_the_default_follows_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    operators = not registry.get("cpu").probe().limits
    assert registry.default() == ("cpu" if operators or not registry.get("xla").probe() else "xla")
    with neuron_machine(tmp_path):
        assert registry.default() == ("neuron" if registry.get("neuron").probe_compiler() else "cpu")
    monkeypatch.setenv(registry.VARIABLE, "eager")
    assert registry.default() == "eager" and TraceOptions(len, None).backend == "cpu"
    assert TraceOptions(len, None, backend="xla").backend == "xla"
    monkeypatch.setenv(registry.VARIABLE, "tpu")
    with pytest.raises(TraceConfigError, match=r"no backend 'tpu' \(NXD_INFER_BACKEND names it\); backends are cpu,"):
        TraceOptions(len, None)


def test_a_name_of_ours_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    other = importlib.metadata.EntryPoint("eager", "no_such_module:BACKEND", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [other])
    assert registry.get("eager").name == "cpu" and registry.names() == tuple(registry.BUILT_IN)


def test_what_starts_ranks_asks_backends_without_torch() -> None:
    code = (
        "import sys\nfrom nxd_infer.backends import registry\n"
        "for name in registry.BUILT_IN:\n"
        "    backend = registry.get(name)\n"
        "    backend.check_target({'arch': __import__('platform').machine(), 'revision': 1}, {})\n"
        "    assert backend.one_process is (name in ('xla', 'neuron'))\n"
        "assert not {'torch', 'torch_xla'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


NAMES = re.compile(
    r"\b(inductor|lockstep)\b|[\"'](eager|cpu|cuda|xla|neuron)(:\d+)?[\"']|\btorch\.cuda\b"
    r"|aot_?inductor|nxd_packed|packed(16|32)|x86-64|\bmarch\b",
    re.IGNORECASE,
)
HOMES = ("nxd_infer/backends/", "nxd_infer/comm/", "nxd_infer/compat/", "nxd_infer/util/devices.py")
"""The backends; the transports, each of which is for one kind of device; what old scripts call devices; and the one
place that asks torch for the host and for the device that this process trains on."""
CONTROL_GROUP = "nxd_infer/util/machine.py"
"""Linux calls a group of limits so."""


def test_no_backend_and_no_device_is_named_outside_of_the_backends() -> None:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(HOMES) or name == CONTROL_GROUP:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if NAMES.search(line) and "attn_implementation" not in line:  # a setting of transformers
                    found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
