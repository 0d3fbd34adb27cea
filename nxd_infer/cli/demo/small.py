"""Train a small Llama from nothing, on text that ships with Python: what the demo does without a real model."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nxd_infer.checkpoint.export import consolidate_checkpoint
from nxd_infer.cli.console import console, spinner
from nxd_infer.cli.demo import training
from nxd_infer.cli.demo.made import MODEL, Made, Question
from nxd_infer.cli.demo.training import CHECKPOINTS, FIGURES, Trained
from nxd_infer.recipes.rank_processes import run_ranks
from nxd_infer.util.python_command import python_module

SAMPLED = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1}
GREEDY = {"max_tokens": 64, "temperature": 0}
PROMPTS = (
    ('The "with" statement is used to', SAMPLED),
    ("A function definition is an executable statement. Its execution", SAMPLED),
    ("If the expression list", GREEDY),
)
WRITES_PHRASES = 4.0
"""A loss, in nats per token, above which answers are loose words and newlines."""
SECONDS, TRAIN_TIMEOUT = 60.0, 180.0


def make(directory: Path, seconds: float, tp: int) -> Made:
    """Train on ``tp`` ranks for ``seconds``."""
    trained = train(directory, seconds, tp)
    if note := too_little(trained, seconds):
        console.print(note, markup=False)
    return Made(
        directory / MODEL,
        figures=[
            ("steps", f"{trained.steps}"),
            ("loss", f"{trained.first_loss:.2f} -> {trained.last_loss:.2f}"),
            ("loss on two held-out chapters", f"{trained.held_out_loss:.2f}"),
            (f"training, {tp} ranks", f"{trained.tokens_per_second:,.0f} tokens/s"),
        ],
        traced={
            "batch_sizes": [1, 4],
            "prompt_buckets": [32, 128],
            "max_len": 256,
            "dtype": "float32",
            "checkpoint": str(directory / CHECKPOINTS),
        },
        questions=[
            Question({"prompt": prompt, **how}, prompt, "greedy" if how is GREEDY else "temperature 0.7, seed 1")
            for prompt, how in PROMPTS
        ],
    )


def train(directory: Path, seconds: float, tp: int) -> Trained:
    """Train on ``tp`` rank processes, which save a checkpoint; write its full weights into the model directory."""
    with spinner("writing the text and its tokenizer"):
        training.prepare(directory)
    command = python_module(training.__name__, str(directory), str(seconds), str(os.getpid()))
    try:
        run_ranks(command, tp, directory / "training.log", seconds + TRAIN_TIMEOUT)
    finally:
        console.show_cursor()  # a killed rank leaves it hidden
    consolidate_checkpoint(directory / CHECKPOINTS, directory / MODEL)
    return Trained(**json.loads((directory / FIGURES).read_text()))


def too_little(trained: Trained, seconds: float) -> str:
    """Return a note if the model has learnt too little to write phrases; else ""."""
    if trained.last_loss < WRITES_PHRASES:
        return ""
    return (
        f"note: {trained.steps} steps in {seconds:g} s leave a loss of {trained.last_loss:.2f}. Answers are "
        f"loose words and newlines above a loss of {WRITES_PHRASES:g}: --seconds {5 * seconds:g} trains a better model"
    )
