"""Each of our models as HLO: it breaks no documented limit of Neuron's, and its states take their own memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_infer.backends.hlo.files import PARTS_FILE, HloFile, PartsFile, read
from nxd_infer.backends.neuron import lint
from nxd_infer.backends.neuron.aliases import aliases_of
from nxd_infer.backends.neuron.hlo import Module
from nxd_infer.graph.stored import read_graph, write_graph
from tests.neuron.machines import HAS_XLA, NEEDS_XLA
from tests.tiny_models import DECODERS

if not HAS_XLA:
    pytest.skip(NEEDS_XLA, allow_module_level=True)

from nxd_infer.backends.hlo.lower import lower_directory
from nxd_infer.backends.hlo.parts import lower_graphs
from tests.backends.canonical import ranks_of
from tests.xla.cases import CASES


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_models_body_breaks_no_limit(
    name: str, degree: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family, options = CASES[name]
    (rank, *_) = ranks_of(family, degree, tmp_path_factory.getbasetemp() / "canonical", **options)
    (lowered,) = lower_graphs([rank.graph])
    directory = write_graph(rank.graph.ir(), lowered, tmp_path / "graph")
    seen: list[str] = []

    def look(module: str, table: HloFile) -> None:
        aliases = aliases_of(read_graph(directory), read(directory, PARTS_FILE, PartsFile), table)
        assert len(aliases) == (2 if family in DECODERS else 0), "the keys and values of one layer"
        assert lint.findings(Module(module), aliases) == []
        seen.append(module)

    lower_directory(directory, look)
    assert seen
