"""A document in a packed row has the losses that it has alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.recipes.data.encode import Example
from nxd_infer.recipes.data.rows import Packed, one_each, pack
from nxd_infer.recipes.data.store import TokenStore, write_store
from nxd_models import registry
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

LENGTH = 64


def per_token(model, row) -> torch.Tensor:
    """The loss of each label of a row, in order."""
    ids, labels = row["input_ids"][None], row["labels"][None]
    _, logits = model(ids, row["attention_mask"][None], labels, row["position_ids"][None])
    losses = parallel_cross_entropy(logits[:, :-1], labels[:, 1:])
    return losses[labels[:, 1:] != -100]


FAMILIES = ("llama", "qwen3", "gpt_neox")


def model_of(family: str, folder: Path) -> Any:
    if family != "gpt_neox":
        return registry.load_model(write_tiny(family, folder), "generate", torch.float32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    raw = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "initializer_range": 0.3}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, **sizes, **text}))
    torch.manual_seed(0)
    return registry.build(folder, "generate", torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_to_a_millionth_per_token(tmp_path, family):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 30, (12,), generator=generator).tolist()
    documents = [torch.randint(5, VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes]
    write_store(tmp_path / "s", [Example(ids, [place > 1 for place in range(len(ids))]) for ids in documents])
    store = TokenStore(tmp_path / "s")
    with use_context(make_context()):
        model = model_of(family, tmp_path / "m")
    bins = pack(store.lengths, LENGTH)
    assert len(bins) < 6
    alone = Packed(store, LENGTH, one_each(store))
    with torch.no_grad():
        for packed, members in zip(Packed(store, LENGTH, bins), bins, strict=True):
            expected = torch.cat([per_token(model, alone[number]) for number in members])
            found = per_token(model, packed)
            assert found.shape == expected.shape
            assert (found - expected).abs().max() <= 1e-6
            crossed = dict(packed, attention_mask=(packed["attention_mask"] != 0).long())
            assert (per_token(model, crossed) - expected).abs().max() > 1e-3  # the mask is what keeps them apart


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sum_over_microbatches_is_the_mean_over_all(tmp_path, family):
    model = model_of(family, tmp_path)
    ids = torch.randint(5, VOCAB_SIZE, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = labels[2, 3:] = -100
    whole, _ = model(ids, labels=labels)
    items = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items)[0] for i in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-6, atol=0)
