"""Train a small Llama from nothing, on text that ships with Python: what the demo does without a real model."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from nxd_infer.checkpoint.export import consolidate_checkpoint
from nxd_infer.cli.console import console, duration
from nxd_infer.cli.demo.corpus import split
from nxd_infer.cli.demo.made import MODEL, Made, Question, train_recipe
from nxd_infer.recipes.experiment import SCORES

RECIPE = Path(__file__).with_name("small.yaml")
CHECKPOINTS = "checkpoints"
SAMPLED = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1}
GREEDY = {"max_tokens": 64, "temperature": 0}
PROMPTS = (
    ('The "with" statement is used to', SAMPLED),
    ("A function definition is an executable statement. Its execution", SAMPLED),
    ("If the expression list", GREEDY),
)
WRITES_PHRASES = 3.6
"""A loss, in nats per token, above which answers are loose words and newlines."""
SECONDS = 60.0
STEPS_PER_SECOND = 8
"""About those of two cores; a faster machine is done sooner."""


def make(directory: Path, seconds: float, tp: int) -> Made:
    """Train on ``tp`` ranks, for at most ``seconds``."""
    shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # of an earlier demo
    text = directory / "text.jsonl"
    text.write_text("".join(json.dumps({"text": chapter}) + "\n" for chapter in split()[0]))
    start = time.monotonic()
    steps = max(1, int(STEPS_PER_SECOND * seconds))
    train_recipe(RECIPE, directory, seconds, tp, {"data.train_dir": str(text), "trainer.max_steps": steps})
    trained = time.monotonic()
    consolidate_checkpoint(directory / CHECKPOINTS, directory / MODEL)
    *_, loss = json.loads((directory / SCORES).read_text()).values()
    if loss > WRITES_PHRASES:
        console.print(
            f"note: {seconds:g} s leave a loss of {loss:.2f}. Answers are loose words and newlines above "
            f"{WRITES_PHRASES:g}: --seconds {5 * seconds:g} trains a better model",
            markup=False,
        )
    return Made(
        directory / MODEL,
        figures=[("loss", f"{loss:.2f}"), (f"training, {tp} rank{'s' * (tp > 1)}", duration(trained - start))],
        traced={"batch_sizes": [1, 4], "prompt_buckets": [32, 128], "max_len": 256, "dtype": "float32"},
        questions=[
            Question({"prompt": prompt, **how}, prompt, "greedy" if how is GREEDY else "temperature 0.7, seed 1")
            for prompt, how in PROMPTS
        ],
    )
