"""Which backends there are: ours, and those of other packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from nxd_infer.backends import registry
from nxd_infer.errors import ArtifactBackendError, TraceConfigError
from nxd_infer.trace.check import tracing_backend
from tests.support.backends.plugins import installed


def test_backends_of_other_packages_are_found_by_their_entry_points() -> None:
    assert "lockstep" not in registry.names()
    with pytest.raises(ArtifactBackendError, match=r"there is no backend 'lockstep'; backends are .*eager"):
        registry.get("lockstep")
    with installed():
        assert {"inductor", "eager", "xla", "neuron", "lockstep", "broken"} == set(registry.names())
        assert registry.get("lockstep").name == "lockstep"
        assert registry.get("eager").name == "eager"
        with pytest.raises(ArtifactBackendError, match=r"'broken' of broken-backend cannot.*no_such_module"):
            registry.get("broken")
        with pytest.raises(TraceConfigError, match="no_such_module"):
            tracing_backend("broken")


def test_a_name_of_ours_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    other = importlib.metadata.EntryPoint("eager", "no_such_module:BACKEND", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [other])
    assert registry.get("eager").name == "eager" and registry.names() == tuple(registry.BUILT_IN)


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
