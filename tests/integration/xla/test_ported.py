"""Programs of examples/ported with the real torch_xla, on its device: what plain PyTorch gives, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.xla.rig import in_a_process, require

require()

from nxd_infer.util.ports import free_port  # noqa: E402
from tests.integration.ported.test_programs import INFERENCE, TRAINING, numbers  # noqa: E402
from tests.support.ported import run  # noqa: E402

PROGRAMS = {program: expected for program, expected, runs in TRAINING if runs[0] == (1, "")}
TORCHRUN = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
ENVIRONMENT = {**TORCHRUN, "MASTER_PORT": free_port(), "PJRT_DEVICE": "CPU"}


@pytest.mark.parametrize(("program", "expected"), PROGRAMS.items(), ids=PROGRAMS)
def test_losses_are_those_of_plain_pytorch(
    program: str, expected: Callable[[], list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, str(value))
    shown = run(tmp_path, 1, program)
    assert numbers(shown, "losses") == pytest.approx(expected(), rel=1e-4)


def test_a_decoder_of_the_second_model_builder_has_the_tokens_of_transformers(tmp_path: Path):
    (expected,) = [tokens for program, _, tokens in INFERENCE if program == "model_builder_v2.py"]
    assert numbers(run(tmp_path, 1, "model_builder_v2.py", "--tp", 2), "tokens") == expected()


def test_a_checkpointed_module_drops_the_same_elements_again():
    shown = in_a_process("run_checkpointed")
    assert shown["calls"] == 4
    for found, expected in zip(shown["found"], shown["expected"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert shown["found"][0] != shown["found"][1]
