"""What the demo trains, and how that is traced and asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nxd_infer.cli import train
from nxd_infer.util.machine import computes_bfloat16

MODEL = "model"
"""The model directory in the demo's folder."""


class Question(NamedTuple):
    """A request to the server, and what is printed above its answer."""

    request: Mapping[str, Any]
    title: str
    note: str


@dataclass(frozen=True)
class Made:
    """A model directory with trained weights."""

    directory: Path
    figures: Sequence[tuple[str, str]]
    """Rows for the table at the end."""
    traced: Mapping[str, Any]
    """Options of the trace."""
    questions: Sequence[Question]


def train_recipe(recipe: Path, directory: Path, seconds: float | None, tp: int, settings: Mapping[str, Any]) -> None:
    """Train a recipe with more ``settings`` on ``tp`` ranks, for at most ``seconds``; the model is in ``directory``."""
    common = {
        "exp_manager.explicit_log_dir": str(directory),
        "trainer.devices": tp,
        "distributed_strategy.tensor_model_parallel_size": tp,
        "trainer.max_time": seconds,
        "precision.type": "mixed_precision" if computes_bfloat16() else "fp32",
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**common, **settings}.items()]
    train.run(recipe, overrides, check=False, chip=None, trace_out=None)
