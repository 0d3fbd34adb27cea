"""The small modules that tests of the lint read, tests/support/neuron/hlo, are those that torch_xla makes."""

from __future__ import annotations

import pytest

from tests.integration.xla.rig import require

require()

from tests.support.neuron.hlo_samples import made, plain, samples, stored  # noqa: E402


@pytest.mark.parametrize("name", samples())
def test_a_stored_module_is_the_one_that_torch_xla_makes(name: str) -> None:
    assert plain(made(name)) == plain(stored(name))
