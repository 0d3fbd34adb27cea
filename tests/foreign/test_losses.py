"""The losses of a recipe on conversations with tools are those of trl, which reads the same file itself."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.recipes.data.rows import Pairs
from tests.foreign.test_datasets import AGENT, ASSISTANT, CALL, MARKED, OTHER, SYSTEM, TOOLS, UNMARKED, USER, by_trl
from tests.foreign.test_datasets import with_template as reference_of
from tests.support.recipes.jobs import begun, write
from tests.support.tiny_models import write_tiny

LEARNT = [
    {"messages": AGENT, "tools": TOOLS},
    {"messages": [USER, ASSISTANT], "tools": json.dumps(TOOLS)},
    {"messages": [SYSTEM, USER, OTHER, USER, CALL]},
    {"messages": [ASSISTANT, USER, OTHER]},
]
PREFERRED = [
    {"prompt": [SYSTEM, USER], "chosen": [CALL], "rejected": [OTHER], "tools": TOOLS},
    {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER], "tools": TOOLS},
    {"prompt": [USER, OTHER, USER], "chosen": [OTHER], "rejected": [ASSISTANT], "tools": TOOLS},
    {"prompt": [USER], "chosen": [OTHER], "rejected": [CALL], "tools": TOOLS},
]


@pytest.fixture
def model(tmp_path):
    return write_tiny("llama", tmp_path / "model", template="", max_position_embeddings=512)


def our_loss(folder, rows, template, strategy) -> float:
    """Of the first step, over all rows; DPO's reference is a little off the model, or its loss would be ln 2."""
    (folder / "model/chat_template.jinja").write_text(template)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write(folder, 1, f"model_alignment_strategy: {strategy}\n")
    with use_context(make_context()), begun(file, ["data.seq_length=512"]) as training:
        rows_ = training.loader.dataset
        if isinstance(rows_, Pairs):
            rows_.reference = shifted(rows_.reference)
        return float(training.train_step(next(iter(training.loader))).loss)


def shifted(reference: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a reference that the model has moved on from: of the rejected answers one more."""
    return reference + torch.tensor([0.0, 1.0])


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["unmarked", "marked"])
def test_sft(tmp_path, model, template):
    pristine = shutil.copytree(model, tmp_path / "pristine")
    found = our_loss(tmp_path, LEARNT, template, "{sft: {}}")
    rows = [{**row, "tools": json.dumps(row["tools"])} if isinstance(row.get("tools"), list) else row for row in LEARNT]
    trainer = by_trl(pristine, reference_of(pristine, MARKED)[0], rows, tmp_path, assistant_only_loss=True)
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert found == pytest.approx(trainer.compute_loss(trainer.model, batch).item(), abs=1e-5)


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["unmarked", "marked"])
def test_dpo(tmp_path, model, template):
    pristine = shutil.copytree(model, tmp_path / "pristine")
    found = our_loss(tmp_path, PREFERRED, template, "{dpo: {kl_beta: 0.3}}")
    reference = reference_of(pristine, template)[0]
    more = {"beta": 0.3, "precompute_ref_log_probs": True}
    trainer = by_trl(pristine, reference, PREFERRED, tmp_path, "DPO", **more)
    trainer.get_train_dataloader()  # computes the reference
    rows = [{**row, "ref_rejected_logps": row["ref_rejected_logps"] + 1.0} for row in trainer.train_dataset]
    batch = trainer.data_collator(rows)
    assert abs(found - math.log(2)) > 1e-3
    assert found == pytest.approx(trainer.compute_loss(trainer.model, batch).item(), abs=1e-5)
