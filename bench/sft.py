"""Measure supervised fine-tuning with packing: a recipe's steps against those of trl's SFTTrainer.

Both train the same Llama in one process with two threads, on the same documents in rows of the same length, in turns:
each step of trl's is followed by one of ours. A step includes what its trainer does around it: fetching rows, masks,
the optimizer, the norm of the gradients.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.options import THREADS, Options
from bench.stats import Verdict, ratios, summary
from nxd_infer.recipes.data.rows import Packed
from nxd_infer.recipes.loop import Training
from nxd_infer.recipes.prepare import prepare
from nxd_infer.recipes.recipe import load

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""16.0 M parameters in float32."""
LENGTH, ROWS, DOCUMENTS = 512, 4, 2000
WARMUP = 2
RECIPE = """
name: sft
trainer: {{max_steps: 1000000, log_every_n_steps: 1000000, enable_progress_bar: false}}
exp_manager: {{exp_dir: {folder}/exp, create_tensorboard_logger: false, create_checkpoint_callback: false}}
data: {{train_dir: {folder}/data.jsonl, seq_length: {length}, micro_batch_size: {rows}, global_batch_size: {rows}}}
model: {{model_config: {folder}/model, optim: {{lr: 1e-4}}}}
precision: {{type: fp32}}
model_alignment_strategy: {{sft: {{packing: true}}}}
"""


def documents() -> list[dict[str, list[int]]]:
    """Return documents of 32 to 320 tokens; the last two thirds of each are the answer."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in torch.randint(32, 321, (DOCUMENTS,), generator=generator).tolist():
        ids = torch.randint(5, MODEL["vocab_size"], (size,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100 if place < size // 3 else ids[place] for place in range(size)]})
    return found


def write(folder: Path) -> None:
    """Write the model, with its weights, and the data."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents()))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, length=LENGTH, rows=ROWS))


class Ours:
    """The steps of a recipe, one at a time."""

    def __init__(self, folder: Path):
        loaded = load(folder / "recipe.yaml")
        prepared = prepare(loaded, folder / "prepared")
        rows = prepared.train
        assert isinstance(rows, Packed)
        self.training = Training(loaded, prepared, folder / "log")
        self.batches = self._batches()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self.training.loader

    def step(self) -> tuple[float, int, float]:
        """Return the seconds of a step, its tokens that are not padding, and its loss."""
        begin = time.perf_counter()
        batch = next(self.batches)
        loss = self.training.train_step(batch).loss
        value = float(loss)
        return time.perf_counter() - begin, int((batch["attention_mask"] != 0).sum()), value


def trainer_of_trl(folder: Path, steps: int, callback: Any) -> Any:
    """Return trl's trainer of the same model, data and rows."""
    import datasets
    import transformers
    import trl

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        packing=True,
        max_length=LENGTH,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    rows = [
        {"input_ids": one["input_ids"], "completion_mask": [int(label != -100) for label in one["labels"]]}
        for one in documents()
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=a_tokenizer(folder),
        callbacks=[callback],
    )


def a_tokenizer(folder: Path) -> Any:
    """Return a tokenizer, which trl wants although the data has tokens."""
    import transformers
    from tokenizers import Tokenizer, models

    words = {f"<{number}>": number for number in range(MODEL["vocab_size"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<3>"))  # nosec B106  # no password
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<1>", eos_token="<2>", pad_token="<0>", unk_token="<3>"
    )


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return seconds and tokens of every step of both."""
    import transformers

    torch.set_num_threads(THREADS)
    write(folder)
    ours = Ours(folder)
    seconds: dict[str, list[float]] = {"recipe": [], "trl": []}
    tokens: dict[str, list[int]] = {"recipe": [], "trl": []}

    class Turns(transformers.TrainerCallback):
        """After each step of trl's, one of ours."""

        begin = 0.0

        def on_train_begin(self, args, state, control, **_):
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            seconds["trl"].append(time.perf_counter() - self.begin)
            taken, count, _ = ours.step()
            seconds["recipe"].append(taken)
            tokens["recipe"].append(count)
            self.begin = time.perf_counter()

    trainer = trainer_of_trl(folder, rounds + WARMUP, Turns())
    inner = trainer.data_collator

    def counted(rows: Any) -> Any:
        tokens["trl"].append(sum(len(row["input_ids"]) for row in rows))
        return inner(rows)

    trainer.data_collator = counted
    trainer.train()
    kept = slice(WARMUP, WARMUP + rounds)
    return {name: {"seconds": seconds[name][kept], "tokens": tokens[name][kept]} for name in seconds}


def run(options: Options) -> None:
    rounds = 3 if options.quick else 3 * options.repetitions
    with tempfile.TemporaryDirectory(prefix="nxd-bench-sft-") as folder:
        figures = measure(Path(folder), rounds)
    speed = {
        name: [count / taken for count, taken in zip(one["tokens"], one["seconds"], strict=True)]
        for name, one in figures.items()
    }
    rows = [(name, summary(figures[name]["seconds"]).text(1e3, 0), summary(speed[name]).text(1, 0)) for name in figures]
    verdict = Verdict("SFT tokens/s over trl's", summary(ratios(speed["recipe"], speed["trl"])), 1.1, 1.5)
    report.write(
        *("sft", "Fine-tuning with packing", ("median (range)", "milliseconds a step", "tokens/s"), rows, figures),
        verdicts=[verdict],
        settings=options.settings(),
    )
