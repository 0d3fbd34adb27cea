"""What holds of every backend, ours and one of another package: states, calls, new weights, a lost process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_infer.backends import registry
from nxd_infer.errors import (
    ArtifactVersionError,
    InputMismatchError,
    ModelClosedError,
    RankDiedError,
    RankFailedError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel, parallel_model_load
from tests.support import traced_models as models
from tests.support.backends import small_traces
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import NAMES, installed

STEPS = [
    (torch.tensor([3, 20]), torch.tensor([0, 0])),
    (torch.tensor([7, 1]), torch.tensor([1, 1])),
    (torch.tensor([9, 9]), torch.tensor([2, 4])),
]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture(scope="module", params=NAMES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``models.net`` at degree 2."""
    if request.param == "cpu":
        return small_traces.net()
    path = tmp_path_factory.mktemp(request.param) / "artifact"
    small_traces.trace_net(backend=request.param, artifact_dir=path).close()
    return path


@pytest.fixture(scope="module")
def model(artifact: Path) -> Iterator[TensorParallelModel]:
    with parallel_model_load(artifact) as model:
        yield model


def weights(seed: int) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in models.net(seed=seed)[0].named_parameters()}


def calls(model: TensorParallelModel, steps: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [model(*step)[0] for step in steps]


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_compiler_workdir_holds_what_was_made_also_from_the_cache(name: str, tmp_path: Path) -> None:
    made = []
    for work in (tmp_path / "first", tmp_path / "again"):
        with small_traces.trace_net(backend=name, compiler_workdir=work) as model:
            folders = {f"bucket_0-{digest[:8]}" for digest in model.manifest.graphs}
            assert work.name == "first" or model.trace_report["compiled"] == 0
        files = [path for folder in sorted(folders) for path in sorted((work / folder).rglob("*")) if path.is_file()]
        made.append({str(path.relative_to(work)): path.read_bytes() for path in files})
    assert made[0] == made[1] and {Path(path).parts[0] for path in made[0]} == folders


def test_states_are_kept_over_calls_reset_and_untouched_by_wrong_inputs(model: TensorParallelModel) -> None:
    model.update_weights(weights(0))
    model.reset_states()
    assert close(calls(model, STEPS), models.expected(STEPS))
    model.reset_states()
    model(*STEPS[0])
    with pytest.raises(InputMismatchError):
        model.run_bucket(model.buckets[0].name, {"tokens": torch.tensor([1.0, 2.0]), "position": STEPS[0][1]})
    assert close(calls(model, STEPS[1:]), models.expected(STEPS)[1:])
    health = model.health()
    assert [rank.rank for rank in health] == [0, 1] and all(rank.alive for rank in health)
    one = registry.get(model.manifest.backend).one_process
    assert len({rank.pid for rank in health}) == (1 if one else 2)


def test_new_weights_replace_the_old_ones_states_stay_and_a_killed_process_is_an_error(
    model: TensorParallelModel,
) -> None:
    model.update_weights(weights(0))
    model.reset_states()
    first = calls(model, [STEPS[0]])
    model.update_weights(weights(1))
    model.reset_states()
    assert close(calls(model, STEPS), models.expected(STEPS, seed=1))
    before = calls(model, [STEPS[2]])
    model.update_weights(weights(0))
    model.update_weights(weights(1))
    assert close(calls(model, [STEPS[2]]), before), "the cache held what the steps had left in it"
    assert not close(first, before)
    pid = model.health()[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((RankDiedError, RankFailedError, ModelClosedError)):
        for _ in range(1000):
            model(*STEPS[0])
    assert isinstance(model.failure, (RankDiedError, RankFailedError))
    with pytest.raises(ModelClosedError):
        model(*STEPS[0])
    model.restart()
    assert close(calls(model, STEPS), models.expected(STEPS, seed=1))


def test_another_target_is_refused(artifact: Path, tmp_path: Path) -> None:
    copy = small_traces.copied(artifact, tmp_path / "copy")
    with changed(copy) as manifest:
        manifest["target"] = {**manifest["target"], "arch": "z80", "revision": 7}
    with pytest.raises(ArtifactVersionError, match=r"the artifact /.*(z80|another revision)"):
        load_artifact(copy)
