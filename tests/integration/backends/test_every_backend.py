"""What holds of every backend, ours and one of another package: trace, save, load, call, serve, lose a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.backends import registry
from nxd_infer.errors import (
    ArtifactVersionError,
    InputMismatchError,
    ModelClosedError,
    RankDiedError,
    RankFailedError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save
from nxd_infer.trace.recompile import parallel_model_recompile
from tests.support import traced_models as models
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import NAMES, installed
from tests.support.http.http_artifacts import real_server, trace_tiny
from tests.support.http.http_servers import wait_for

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
def traced(request: pytest.FixtureRequest) -> Iterator[TensorParallelModel]:
    """``models.net`` at degree 2."""
    with nxd.trace.parallel_model_trace(
        models.net, models.inputs(), tp_degree=2, backend=request.param, inline_weights_to_neff=False
    ) as model:
        yield model


@pytest.fixture
def model(traced: TensorParallelModel) -> TensorParallelModel:
    """Running, on the weights it was traced with, states as traced."""
    traced.update_weights(weights(0))
    traced.reset_states()
    return traced


def weights(seed: int) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in models.net(seed=seed)[0].named_parameters()}


def calls(model: TensorParallelModel, steps: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [model(*step)[0] for step in steps]


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_states_are_kept_over_calls_and_reset(model: TensorParallelModel) -> None:
    for _ in range(2):
        assert close(calls(model, STEPS), models.expected(STEPS))
        model.reset_states()


def test_a_process_runs_as_many_ranks_as_the_backend_says(model: TensorParallelModel) -> None:
    model(*STEPS[0])
    health = model.health()
    assert [rank.rank for rank in health] == [0, 1] and all(rank.alive for rank in health)
    one = registry.get(model.manifest.backend).one_process
    assert len({rank.pid for rank in health}) == (1 if one else 2)


def test_new_weights_replace_the_old_ones_and_states_stay(model: TensorParallelModel) -> None:
    first = calls(model, [STEPS[0]])
    model.update_weights(weights(1))
    model.reset_states()
    assert close(calls(model, STEPS), models.expected(STEPS, seed=1))
    before = calls(model, [STEPS[2]])
    model.update_weights(weights(0))
    model.update_weights(weights(1))
    assert close(calls(model, [STEPS[2]]), before), "the cache held what the steps had left in it"
    model.restart()
    assert close(calls(model, STEPS), models.expected(STEPS, seed=1))
    assert not close(first, before)


def test_wrong_inputs_are_refused_and_nothing_is_lost(model: TensorParallelModel) -> None:
    model(*STEPS[0])
    with pytest.raises(InputMismatchError):
        model.run_bucket(model.buckets[0].name, {"tokens": torch.tensor([1.0, 2.0]), "position": STEPS[0][1]})
    assert close(calls(model, STEPS[1:]), models.expected(STEPS)[1:])


def test_saved_and_loaded_it_computes_the_same(model: TensorParallelModel, tmp_path: Path) -> None:
    parallel_model_save(model, tmp_path / "saved")
    with parallel_model_load(tmp_path / "saved", backend=model.manifest.backend) as loaded:
        assert loaded.manifest.format == "1.1"
        assert close(calls(loaded, STEPS), models.expected(STEPS))


def test_a_killed_process_is_an_error_and_a_restart_goes_on(model: TensorParallelModel) -> None:
    model(*STEPS[0])
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
    assert close(calls(model, STEPS), models.expected(STEPS))


@pytest.mark.parametrize("target", NAMES)
def test_its_graphs_can_be_compiled_for_every_backend(model: TensorParallelModel, target: str, tmp_path: Path) -> None:
    parallel_model_save(model, tmp_path / "saved")
    report = parallel_model_recompile(tmp_path / "saved", tmp_path / "other", backend=target)
    assert report["graphs"] == len(model.manifest.graphs)
    whole = (tmp_path / "other" / "manifest.json").read_text()  # with the hash of every file
    if whole not in RIGHT:
        with parallel_model_load(tmp_path / "other", backend=target) as other:
            assert close(calls(other, STEPS), models.expected(STEPS))
        RIGHT.add(whole)


RIGHT: set[str] = set()
"""Manifests of artifacts that ran: what is made of another backend's graphs is often the same to the byte."""


def test_another_target_is_refused(model: TensorParallelModel, tmp_path: Path) -> None:
    parallel_model_save(model, tmp_path / "saved")
    with changed(tmp_path / "saved") as manifest:
        manifest["target"] = {**manifest["target"], "arch": "z80", "revision": 7}
    with pytest.raises(ArtifactVersionError, match=r"the artifact /.*(z80|another revision)"):
        load_artifact(tmp_path / "saved")


@pytest.mark.parametrize("backend", NAMES)
def test_a_server_generates_and_recovers(backend: str, tmp_path: Path) -> None:
    artifact = trace_tiny(
        "llama", "generate", tmp_path, backend=backend, batch_sizes=[2], prompt_buckets=[16], max_len=48
    )
    body = {"prompt": "the with", "max_tokens": 8, "temperature": 0}
    drawn = {**body, "temperature": 0.9, "seed": 5, "presence_penalty": 0.5}
    with real_server(artifact, "--recovery-timeout", "300") as server:

        def answers() -> list[str]:
            found = [server.post("/v1/completions", one) for one in (body, drawn)]
            assert [answer.status_code for answer in found] == [200, 200], found[0].text
            return [answer.json()["choices"][0]["text"] for answer in found]

        first = answers()
        ANSWERS.setdefault("all", first)
        assert first == ANSWERS["all"], "every backend gives the same tokens"
        pids = {rank["pid"] for rank in server.get("/health").json()["ranks"]}
        os.kill(min(pids), signal.SIGKILL)

        def recovered() -> bool:
            now = {rank["pid"] for rank in server.get("/health").json()["ranks"]}
            return bool(now) and pids.isdisjoint(now) and server.get("/readyz").status_code == 200

        wait_for(recovered, 600.0, "it did not recover")
        assert answers() == first


ANSWERS: dict[str, list[str]] = {}
"""What the first server answered."""
