"""Every family as HLO: one program for all ranks, within the limits of Neuron's, and right from that alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.xla.rig import in_a_process, require

require()

from tests.integration.xla.cases import CASES, Case, write_case  # noqa: E402
from tests.support.neuron.hlo_samples import made, plain, samples, stored  # noqa: E402
from tests.support.tiny_models import DECODERS  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Case]]:
    """Every case at degree 2: where it lies, and what it was lowered to."""
    place = tmp_path_factory.mktemp("hlo")
    models = tmp_path_factory.getbasetemp() / "canonical"
    return place, {name: write_case(name, 2, place / name, models) for name in CASES}


@pytest.fixture(scope="module")
def ran(written: tuple[Path, dict[str, Case]]) -> Iterator[dict[str, Any]]:
    yield in_a_process("run_cases", str(written[0]))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_one_program_that_breaks_no_limit(written: tuple[Path, dict[str, Case]], name: str) -> None:
    """And its states take their own memory."""
    case = written[1][name]
    assert len(set(case.hlo)) == 1
    kinds = {parameter.name.partition("_")[0].partition(":")[0] for parameter in case.table.parameters}
    assert kinds <= {"given", "made", "rank", "token"}
    assert case.findings == []
    assert len(case.aliases) == (2 if CASES[name][0] in DECODERS else 0), "the keys and values of one layer"


@pytest.mark.parametrize("name", CASES)
def test_from_its_hlo_alone_it_computes_what_eager_does(ran: dict[str, Any], name: str) -> None:
    """Prefill and decode, greedy and drawn, and tokens that a slot remembers."""
    assert ran["cases"][name]["outputs"] <= 1e-5
    assert ran["cases"][name]["states"] <= 1e-5


def test_each_program_is_compiled_once(ran: dict[str, Any]) -> None:
    """No value of any rank or step is in a program: it would be compiled again for another one."""
    assert ran["compiled"] == len(ran["cases"])


@pytest.mark.parametrize("name", samples())
def test_a_stored_module_is_the_one_that_torch_xla_makes(name: str) -> None:
    """Those of tests/support/neuron/hlo, which tests of the lint read."""
    assert plain(made(name)) == plain(stored(name))
