"""What a recipe trains on one rank, as plain PyTorch does: from where, what it leaves behind, what it refuses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.batches import Batches
from nxd_infer.recipes.job import Begin, make_job
from nxd_infer.recipes.loop import Training, train
from nxd_infer.recipes.plan import plan_of
from nxd_infer.recipes.prepare import prepare
from nxd_infer.recipes.recipe import load
from nxd_models import registry
from nxd_server.text.tokenizer import Tokenizer
from tests.support.e2e.command import here
from tests.support.recipes.indexed import write_indexed
from tests.support.recipes.jobs import alone, begun, write, write_pairs
from tests.support.tiny_models import write_tiny

SFT = "model_alignment_strategy: {sft: {packing: true}}\n"


@pytest.fixture
def folder(tmp_path):
    write_tiny("llama", tmp_path / "model")
    write_pairs(tmp_path)
    return tmp_path


OPTIM = (
    "model.optim={lr: 1e-2, weight_decay: 0.1, betas: [0.8, 0.9], eps: 1e-5, "
    "sched: {warmup_steps: 1, max_steps: 4, min_lr: 1e-3}}"
)
RATES = (0.0, 1e-2, 0.7e-2, 0.4e-2)
"""From 0 to the whole rate, and then down to a tenth."""


def plain(model_dir, rows, held_out) -> list[float]:
    """The losses of steps of four rows in plain PyTorch, and that of the validation after them."""

    def loss(of: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        ids, labels, mask, places = (
            torch.stack([row[name] for row in of]) for name in ("input_ids", "labels", "attention_mask", "position_ids")
        )
        return F.cross_entropy(model(ids, mask, None, places)[:, :-1].transpose(1, 2), labels[:, 1:])

    model = registry.load_model(model_dir, "generate", torch.float32).train()
    groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for param in model.parameters():
        groups[param.dim() > 1].append(param)
    decays = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decays, lr=0.0, betas=(0.8, 0.9), eps=1e-5)
    losses = []
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        found = loss([rows[4 * step + place] for place in range(4)])
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    model.eval()
    with torch.no_grad():
        return [*losses, loss(list(held_out)).item()]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_one_rank_is_the_plain_loop(folder, packing):
    """Rows of other numbers of counted tokens, in microbatches: the loss of a step is the mean over its tokens."""
    write_pairs(folder, 80)
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "val.jsonl").write_text("".join(lines[3::7]))
    file = write(folder, 1, f"model_alignment_strategy: {{sft: {{packing: {str(packing).lower()}}}}}\n")
    overrides = ["data.shuffle=false", "trainer.gradient_clip_val=0.5", f"data.val_dir={folder}/val.jsonl", OPTIM]
    overrides += [] if packing else ["model.activations_checkpoint_granularity=selective"]
    loaded = load(file, overrides)
    with use_context(make_context()):
        prepared = prepare(loaded, folder / "prepared")
        training = Training(loaded, prepared, folder / "log")
        found = [float(training.train_step(batch).loss) for batch in itertools.islice(training.loader, 4)]
        held_out = training.validate()
        training.logs.close()
        kept: Any = prepared.validation
        rows = [kept[number] for number in range(len(kept) // 4 * 4)]  # whole batches
        expected = plain(folder / "model", prepared.train, rows)
    assert [*found, held_out] == pytest.approx(expected, rel=1e-5)


def last_loss(file: Path, *overrides: str) -> float:
    with use_context(make_context()), begun(file, overrides) as training:
        training.run()
        return training.metrics["train_loss"]


@pytest.mark.parametrize(
    ("targets", "count"),
    [("q_proj, up_proj", 2), ("qkv_proj, gate_up_proj", 5)],  # the second as NxD Training's recipes have it
    ids=["parts", "joined"],
)
def test_a_trained_adapter_is_merged_for_serving(folder, targets, count):
    peft = f"{{lora_rank: 4, lora_dropout: 0.0, target_modules: [{targets}]}}"
    more = f"model_alignment_strategy: {{sft: {{}}, peft: {peft}}}\n"
    ids = torch.arange(5, 25)[None]
    with use_context(make_context()), begun(write(folder, 1, more)) as training:
        model = training.job.model
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        outcome = training.run()
        with torch.no_grad():
            merged = registry.load_model(outcome.model, "generate", torch.float32)(ids)
            assert (model.eval()(ids) - merged).abs().max() < 1e-5
    assert len(trained) == count * 2 * 2 and all("lora_" in name for name in trained)  # two factors, two layers


@pytest.mark.parametrize("peft", ["", ", peft: {lora_rank: 4, lora_dropout: 0.0}"], ids=["whole", "adapter"])
def test_a_resumed_job_is_on_the_weights_that_it_began_with(folder, peft):
    """An adapter's checkpoints hold no base weights: these come from where the job began."""

    def trained(name: str, steps: int, file, *overrides: str) -> float:
        log = [f"exp_manager.explicit_log_dir={folder}/{name}", "exp_manager.create_checkpoint_callback=true"]
        end = [f"trainer.max_steps={steps}", "model.optim.sched.max_steps=4", "exp_manager.resume_if_exists=true"]
        return last_loss(file, *log, *end, *overrides)

    trained("base", 2, write(folder), "model.optim.lr=0.05")
    file = write(folder, 1, f"model_alignment_strategy: {{sft: {{}}{peft}}}\n")
    begin = [f"exp_manager.resume_from_checkpoint={folder}/base/checkpoints", "model.weight_init_only=true"]
    undisturbed = trained("whole", 4, file, *begin)
    trained("halves", 2, file, *begin)
    assert trained("halves", 4, file, *begin) == undisturbed


def test_a_checkpoint_has_the_validation_loss_of_its_own_weights(folder):
    """Or none, if it is saved between two validations; the last one is measured."""
    checkpoints = (
        "{monitor: val_loss, mode: min, save_top_k: -1, every_n_train_steps: 1, filename: '{step}-{val_loss}'}"
    )
    overrides = [
        f"exp_manager.explicit_log_dir={folder}/log",
        "exp_manager.create_checkpoint_callback=true",
        f"exp_manager.checkpoint_callback_params={checkpoints}",
        f"data.val_dir={folder}/data.jsonl",
        "trainer.val_check_interval=2",
        "trainer.max_steps=5",
        "model.optim.lr=0.05",
    ]
    last_loss(write(folder), *overrides)
    scores = json.loads((folder / "log/scores.json").read_text())
    assert [name.split("-")[0] for name in scores] == [f"step={step}" for step in range(1, 6)]
    assert all(float(name.split("val_loss=")[1]) == pytest.approx(score, nan_ok=True) for name, score in scores.items())
    measured = [score for score in scores.values() if not math.isnan(score)]
    assert [math.isnan(score) for score in scores.values()] == [True, False, True, False, False]
    assert len(set(measured)) == 3


def test_a_validation_may_have_fewer_rows_than_a_step(folder):
    """Its loss is that of the same rows in batches of one."""
    rows = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "val.jsonl").write_text("".join(rows[:3]))
    few = [f"data.val_dir={folder}/val.jsonl", "model_alignment_strategy.sft.packing=false"]
    found = []
    for size in (4, 1):
        overrides = [*few, f"data.global_batch_size={size}"]
        with use_context(make_context()), begun(write(folder), overrides, folder / "log") as training:
            found.append(training.validate())
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_an_early_end_watches_the_loss_of_steps_that_are_not_logged(folder):
    manager = "exp_manager.early_stopping_callback_params"
    overrides = [
        f"data.val_dir={folder}/data.jsonl",
        "trainer.max_steps=6",
        "trainer.val_check_interval=2",
        "trainer.log_every_n_steps=100",
        "exp_manager.create_early_stopping_callback=true",
        f"{manager}={{monitor: train_loss, patience: 1, min_delta: 1000}}",
    ]
    with use_context(make_context()), begun(write(folder), overrides, folder / "log") as training:
        logged: list[dict[str, Any]] = []
        training.logs.log = lambda step, numbers: logged.append({"step": step, **numbers})  # type: ignore[assignment]
        training.run()
    assert training.step == 4 and training.patience.waited == 1
    assert [sorted(one) for one in logged] == [["step", "val_loss"]] * 2


def test_a_job_says_where_it_goes_on(folder, capsys):
    log_dir = folder / "log"
    log = [f"exp_manager.explicit_log_dir={log_dir}", "exp_manager.create_checkpoint_callback=true"]

    def said(*overrides: str) -> list[str]:
        """All lines but those of the progress."""
        with use_context(make_context()):
            train(load(write(folder), [*log, "exp_manager.resume_if_exists=true", *overrides]))
        return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("tiny ")]

    done = f"trained tiny: {log_dir}"
    assert said("trainer.max_steps=1") == [done]
    going_on = f"going on at step 1 of {log_dir}/checkpoints/step=1-consumed_samples=4"
    assert said("trainer.max_steps=2") == [going_on, done]
    assert said("trainer.max_steps=2") == [f"nothing to do: trainer.max_steps = 2 is reached in {log_dir}"]


def test_a_start_that_does_not_fit_the_checkpoint_changes_nothing(folder):
    log_dir = folder / "log"
    log = [f"exp_manager.explicit_log_dir={log_dir}", "exp_manager.create_checkpoint_callback=true"]
    overrides = [*log, "exp_manager.resume_if_exists=true", "trainer.max_steps=1"]
    file = write(folder)
    last_loss(file, *overrides)
    before = {path: path.read_bytes() for path in (log_dir / "recipe.json", log_dir / "model/config.json")}
    told = (
        rf"command line: exp_manager\.resume_if_exists goes on from {log_dir}/checkpoints/step=1-consumed_samples=4, "
        r"which does not fit this recipe's model \(unexpected: model\.layers\.1.*\): choose another exp_manager\.name, "
        r"or set exp_manager\.resume_if_exists=false"
    )
    with pytest.raises(RecipeError, match=told), use_context(make_context()):
        train(load(file, [*overrides, "model.num_layers=1"]), log_dir)
    assert {path: path.read_bytes() for path in before} == before
    begin = [f"exp_manager.resume_from_checkpoint={log_dir}/checkpoints", "model.num_layers=1"]
    with (
        pytest.raises(RecipeError, match=r"resume_from_checkpoint goes on from .*: name a"),
        use_context(make_context()),
    ):
        train(load(file, begin), folder / "other")


def test_megatrons_files_train(folder):
    documents = [[5 + (n * k) % 250 for k in range(1, 40)] for n in range(1, 60)]
    write_indexed(folder / "corpus_document", documents)
    file = write(folder)
    overrides = ["~data.train_dir", f"data.data_prefix=[1.0, {folder}/corpus_document]", "data.splits_string='90,10'"]
    loaded = load(file, overrides)
    prepared = prepare(loaded, folder / "prepared")
    assert prepared.validation is not None and len(prepared.validation) == 59 * 39 // 480  # type: ignore[arg-type]
    first = alone(file, overrides, 1)[0]
    assert 4 < first < 8  # of a new model with 288 tokens
    write_indexed(folder / "corpus_document", [[5, 6, 288, 7] * 20] * 60)
    with pytest.raises(RecipeError, match="there is no token 288 in a vocabulary of 288: take the tokenizer"):
        alone(file, overrides, 1)


def test_the_ends_of_documents_do_not_count_if_that_is_asked_for(folder):
    """Also if the end is that of a tokenizer which is made from the data, and not one of config.json."""
    (folder / "data.jsonl").write_text('{"text": "one text"}\n' * 60)
    model = ["~model.model_config", "model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2"]
    overrides = [*model, "data.tokenizer={type: trained, vocab_size: 264}", "data.eod_mask_loss=true"]
    prepared = prepare(load(write(folder), overrides), folder / "prepared")
    end = json.loads((prepared.model / "config.json").read_text())["eos_token_id"]
    row = prepared.train[0]
    ends = row["input_ids"] == end
    assert ends.any() and (row["labels"][ends] == IGNORED).all() and (row["labels"][~ends] != IGNORED).all()


def test_data_that_does_not_fit_is_refused(folder):
    for overrides, message in (
        (["data.global_batch_size=400", "data.micro_batch_size=400"], "rows of 48 tokens; the nearest is"),
        (["data.seq_length=512"], "the nearest is 256"),
        (["model.vocab_size=64"], "less than the tokenizer's"),
        (["model.moe={capacity_factor: 1.0, dropless: false}"], "only experts with 0.0 are trained here"),
    ):
        with pytest.raises(RecipeError, match=message), use_context(make_context()):
            train(load(write(folder), overrides))
    assert not [path for path in folder.rglob(".*") if path.is_dir()]


@pytest.mark.parametrize("strategy", ["{sft: {}}", "{sft: {packing: true}}"], ids=["padded", "packed"])
def test_what_the_length_of_rows_cuts_off_is_said(folder, capsys, strategy):
    """By a training, also one that finds its data prepared, and by a plan; that nothing is left is an error."""
    rows = [{"prompt": "a " * (5 + 30 * (n % 2)), "completion": "b " * 9} for n in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write(folder, 1, f"model_alignment_strategy: {strategy}\n")
    told = "data.train_dir: 4 of 8 documents are cut at 26 tokens (data.seq_length), which leaves out 76 that count"
    for _ in range(2):
        with use_context(make_context()):
            train(load(file, ["data.seq_length=26", "data.global_batch_size=1", "trainer.max_steps=1"]))
        assert f"note: {told} in the loss; in 4 nothing is left to learn" in capsys.readouterr().err
    plan = here("train", file, "--check", "data.seq_length=26")
    assert f"note: of the first 1,000 records, {told}" in plan.out
    assert " cut " not in here("train", file, "--check", "data.seq_length=128").out
    told = r"data\.train_dir has no token that counts in the loss: all that counts lies behind data\.seq_length = 6"
    with pytest.raises(RecipeError, match=told):
        train(load(file, ["data.seq_length=6"]))
    done = here("train", file, "--check", "data.seq_length=6")
    assert done.status == 1 and told.replace("\\", "") in done.err


def test_what_another_version_prepared_is_not_used(folder, monkeypatch):
    """It may have read the same records otherwise."""
    (folder / "data.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    file = write(folder, 1)
    for version in ("0.1.0", "0.1.0", "0.2.0"):
        monkeypatch.setattr("nxd_infer.recipes.prepare.VERSION", version)
        prepare(load(file), folder / "prepared")
    assert len([path for path in (folder / "prepared").iterdir() if path.is_dir()]) == 2


def test_columns_and_splits_of_a_repository_are_those_of_the_recipe(folder):
    """Training reads the split train, a validation its own; columns that nothing reads are named, or left out."""
    (folder / "repo").mkdir()
    for split, text in (("train", "a"), ("test", "b")):
        rows = [{"prompt": f"{text} ", "completion": text * 3, "source": "x"}] * 8
        (folder / f"repo/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write(folder, 1, "model_alignment_strategy: {sft: {}}\n")
    overrides = [f"data.train_dir={folder}/repo", f"data.val_dir={folder}/repo"]
    with pytest.raises(RecipeError, match=r"record 0 has source beside prompt .* data.ignore_columns=\[source\]"):
        prepare(load(file, overrides), folder / "prepared")
    overrides += ["data.ignore_columns=[source]"]
    with pytest.raises(RecipeError, match=r"there are train, test: choose one by data\.val_split"):
        prepare(load(file, overrides), folder / "prepared")
    prepared = prepare(load(file, [*overrides, "data.val_split=test"]), folder / "prepared")
    decode = Tokenizer.from_dir(prepared.model).decode
    assert prepared.validation is not None
    read = [decode(rows[0]["input_ids"].tolist()) for rows in (prepared.train, prepared.validation)]
    assert read == ["a aaa", "b bbb"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gemma2", r"no causal language model for model_type 'gemma2': train it with nxd_infer\.distributed"),
        ("t5", "no causal language model for model_type 't5'"),
        ("mamba", "no causal language model for model_type 'mamba'"),
        ("mambo", "model_type = 'mambo': this architecture is not defined here"),
    ],
)
def test_a_model_that_recipes_do_not_train_is_refused(tmp_path, kind, told):
    """A model of transformers can be traced, but its module takes no labels."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": kind}))
    write_pairs(tmp_path)
    with pytest.raises(RecipeError, match=rf"\.yaml:7: model\.model_config: .*{told}"):
        train(load(write(tmp_path)))


def test_sequences_that_no_layer_would_split_are_refused(tmp_path):
    raw = {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_attention_heads": 2, "vocab_size": 64}))
    file = write(tmp_path, 2, "distributed_strategy: {tensor_model_parallel_size: 2, sequence_parallel: true}\n")
    told = r"\.yaml:10: distributed_strategy\.sequence_parallel = True, but no layer of this model splits sequences"
    with pytest.raises(RecipeError, match=told), use_context(make_context(2, tp=2)):
        make_job(load(file), tmp_path, Begin(), 1)
    with use_context(make_context(2, tp=2)):
        make_job(load(file, ["distributed_strategy.sequence_parallel=false"]), tmp_path, Begin(), 1)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ("q_proj, embed_tokens", "be merged into it: leave it out of target_modules$"),  # the model that a job leaves
        ("nothing", r"\bq_proj\b"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_the_first_step(tmp_path, targets, told):
    write_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    more = f"model_alignment_strategy:\n  peft:\n    lora_rank: 4\n    target_modules: [{targets}]\n"
    loaded = load(write(tmp_path, 1, more))
    told = rf"\.yaml:13: model_alignment_strategy\.peft\.target_modules does not fit the model: .*{told}"
    for refused in (lambda: plan_of(loaded), lambda: make_job(loaded, tmp_path / "model", Begin(), 1)):
        with pytest.raises(RecipeError, match=told), use_context(make_context()):
            refused()


@pytest.mark.parametrize(("parts", "ranks"), [(2, 1), (1, 2)])
def test_a_model_whose_losses_do_not_add_up_is_refused(parts, ranks):
    def forward(input_ids, labels): ...

    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    with pytest.raises(RecipeError, match="takes no num_items_in_batch"):
        Batches(forward, make_context(ranks), parts, pairs=False, whole=False).prepared(batch, torch.device("cpu"))
    (call,) = Batches(forward, make_context(), 1, pairs=False, whole=False).prepared(batch, torch.device("cpu"))
    assert set(call) == {"input_ids", "labels"}
