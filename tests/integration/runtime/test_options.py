"""What a model is loaded with, and what is not done with it; no rank is started."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nxd_infer.errors import ArtifactError, InputMismatchError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel, TensorParallelNeuronModel, parallel_model_load
from nxd_infer.trace import api


def test_a_model_of_processes_is_not_copied(path):
    model = TensorParallelModel(load_artifact(path))
    assert TensorParallelNeuronModel is TensorParallelModel is api.TensorParallelNeuronModel
    assert isinstance(model, torch.nn.Module) and "b4_s8" in repr(model)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArtifactError, match="cannot be"):
            attempt(model)
    with pytest.raises(InputMismatchError, match="needs degree 1"):
        TensorParallelModel(model.artifact, in_process=True)


@pytest.mark.parametrize(
    "options",
    [
        {"call_timeout": float("nan")},
        {"start_timeout": float("inf")},
        {"threads_per_rank": 0},
        {"threads_per_rank": 2, "in_process": True},
    ],
)
def test_options_that_mean_nothing_are_refused(path, options):
    with pytest.raises(InputMismatchError, match=next(iter(options))):
        parallel_model_load(path, **options)
