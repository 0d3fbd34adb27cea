"""Encoders and classifiers of transformers without a family of ours; a plan from another package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nxd_infer.hugging_face import weights as hf
from nxd_infer.trace import parallel_model_trace
from nxd_infer.verify import verify_artifact
from nxd_models.serving import tasks
from tests.support.distributed.models import Case
from tests.support.models.helpers import FOREIGN_PLAN, installed_package, reference, relative_difference

LABELS = {"id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
DISTILBERT = {"vocab_size": 61, "dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 30, "max_position_embeddings": 64}
CLASSIFIER = "AutoModelForSequenceClassification"
IDS = torch.randint(3, 61, (2, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


@pytest.fixture(scope="module", autouse=True)
def installed():
    with installed_package(FOREIGN_PLAN):
        yield


def write(path: Path, kind: str, head: str, **fields) -> Path:
    if kind == "distilbert":
        import transformers

        torch.manual_seed(0)
        config = transformers.DistilBertConfig(**DISTILBERT, **fields)
        getattr(transformers, head).from_config(config).save_pretrained(path)
    else:
        Case(kind, 4, 4, fields, head).build().save_pretrained(path)
    return path


def inputs(pad: int) -> dict[str, torch.Tensor]:
    ids = IDS.masked_fill(MASK == 0, pad)
    return {"input_ids": ids, "attention_mask": MASK, "token_type_ids": torch.zeros_like(ids)}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["distilbert", "bert", "roberta", "gpt2", "llama"])
def test_a_classifier_gives_the_logits_of_transformers(tmp_path, kind):
    """Eagerly, and the one that reads the last token of each text traced."""
    pad = 1 if kind != "gpt2" else 7
    path = write(tmp_path / "model", kind, CLASSIFIER, pad_token_id=pad, **LABELS)
    plan = tasks.plan(path, model_impl="transformers", batch_sizes=[2], prompt_buckets=[8], dtype=torch.float32)
    assert plan.task == "classify" and plan.metadata["labels"] == ["bad", "fair", "good"]
    given = inputs(pad)
    if kind == "gpt2":
        with parallel_model_trace(**plan.trace_arguments(), backend="eager") as model:
            found = model.run_bucket(plan.bucket_names[0], given)["logits"]
    else:
        found = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())(**given)["logits"]
    del given["token_type_ids"]
    assert relative_difference(found, reference(path, "SequenceClassification")(**given).logits) < 1e-5


@torch.no_grad()
def test_a_traced_encoder_gives_the_vectors_of_transformers(tmp_path):
    path = write(tmp_path / "model", "distilbert", "AutoModel", pad_token_id=1)
    plan = tasks.plan(path, "embed", batch_sizes=[2], prompt_buckets=[8], dtype=torch.float32)
    artifact = tmp_path / "artifact"
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend="eager", artifact_dir=artifact) as model:
        found = model.run_bucket(plan.bucket_names[0], inputs(1))["embedding"]
    hidden = reference(path, "Model")(IDS.masked_fill(MASK == 0, 1), attention_mask=MASK).last_hidden_state
    mean = (hidden * MASK[..., None]).sum(1) / MASK.sum(1, keepdim=True)
    assert relative_difference(found, F.normalize(mean, dim=-1)) < 1e-5
    assert verify_artifact(artifact, path).failed == []


def test_the_page_that_tells_how_shows_this_package():
    page = (Path(__file__).parents[3] / "docs/transformers.md").read_text()
    (point,) = re.findall(r"^distilbert = (.*)$", page, re.MULTILINE)
    assert point.strip('"') in (FOREIGN_PLAN / "tiny_distilbert-1.0.dist-info/entry_points.txt").read_text()
