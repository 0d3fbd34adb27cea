"""Preference losses and their gradients are those of trl, on the same batch; a rate is that of transformers."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.job import make_model
from nxd_infer.recipes.optim import rate_of
from nxd_infer.recipes.preference import PreferenceModel
from nxd_infer.recipes.schema import Dpo, Orpo, Sched
from tests.support.tiny_models import PAD, VOCAB_SIZE, write_tiny

PAIRS, LENGTH = 3, 24


def batch() -> dict[str, torch.Tensor]:
    """Pairs of answers of different lengths: rows [2 * pairs, S], a chosen one, then its rejected one."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB_SIZE, (2 * PAIRS, LENGTH), generator=generator)
    mask, targets = torch.ones_like(ids), ids.clone()
    for row in range(2 * PAIRS):
        prompt, size = 4 + row // 2, 12 + 2 * row
        ids[row, :prompt] = ids[row // 2 * 2, :prompt]
        mask[row, size:] = 0
        ids[row, size:] = PAD
        targets[row, :prompt] = targets[row, size:] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "targets": torch.where(targets == IGNORED, targets, ids)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The policy's directory, and the reference's."""
    root = tmp_path_factory.mktemp("preference")
    return write_tiny("llama", root / "policy", seed=0), write_tiny("llama", root / "reference", seed=1)


def ours(strategy, policy, reference) -> tuple[float, dict[str, torch.Tensor]]:
    inputs = batch()
    with use_context(make_context()):
        model = make_model(policy, policy, torch.float32, strategy)
        assert isinstance(model, PreferenceModel) and type(model).__name__ == "PreferenceCausalLM"
        if isinstance(strategy, Dpo):
            with torch.no_grad():
                base = make_model(reference, reference, torch.float32, strategy)
                inputs["reference"] = base.answers(**inputs).total.flatten()
        loss = model(**inputs)
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def theirs(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def in_trl_order(tensor: torch.Tensor) -> torch.Tensor:
    """All chosen rows, then all rejected ones."""
    return torch.cat([tensor[0::2], tensor[1::2]])


def a_trainer(kind, config, folder, tmp_path, reference=None, **more):
    import transformers

    datasets = pytest.importorskip("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token_id = PAD
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    arguments = config(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, **more
    )
    extra = {} if reference is None else {"ref_model": theirs(reference)}
    return kind(model=theirs(folder), args=arguments, train_dataset=data, processing_class=tokenizer, **extra)


def compare(found, expected, model) -> None:
    loss, grads = found
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    named = dict(model.named_parameters())
    assert set(named) == set(grads)
    for name, grad in grads.items():
        assert (grad - named[name].grad).abs().max() <= 1e-5, name


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_dpo_is_trls(folders, kind, tmp_path):
    trl = pytest.importorskip("trl")  # to import it takes as long as the import of most other tests together
    policy, reference = folders
    found = ours(Dpo(kl_beta=0.3, loss_type=kind), policy, reference)
    trainer = a_trainer(trl.DPOTrainer, trl.DPOConfig, policy, tmp_path, reference, beta=0.3, loss_type=[kind])
    inputs = batch()
    theirs_batch = {
        "input_ids": in_trl_order(inputs["input_ids"]),
        "attention_mask": in_trl_order(inputs["attention_mask"]),
        "completion_mask": in_trl_order((inputs["targets"] != IGNORED).long()),
    }
    trainer.model.train()
    compare(found, trainer._compute_loss(trainer.model, theirs_batch, False), trainer.model)


def test_orpo_is_trls(folders, tmp_path):
    orpo = pytest.importorskip("trl.experimental.orpo")
    policy, _ = folders
    found = ours(Orpo(beta=0.3), policy, policy)
    trainer = a_trainer(orpo.ORPOTrainer, orpo.ORPOConfig, policy, tmp_path, beta=0.3, max_length=LENGTH)
    inputs = batch()
    theirs_batch = {}
    for place, name in enumerate(("chosen", "rejected")):
        theirs_batch[f"{name}_input_ids"] = inputs["input_ids"][place::2]
        theirs_batch[f"{name}_attention_mask"] = inputs["attention_mask"][place::2]
        theirs_batch[f"{name}_labels"] = inputs["targets"][place::2]
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, theirs_batch)
    compare(found, loss, trainer.model)


def test_the_linear_rate_is_that_of_transformers():
    """Which NxD Training's schedule of this name is."""
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 3, 12)
    ours = rate_of(Sched(warmup_steps=3), lr=1.0, steps=12)
    assert [ours(step) for step in range(14)] == pytest.approx([theirs.lr_lambdas[0](step) for step in range(14)])
