"""What was trained over stages goes on in Hugging Face's format and in a trace; the reference's folders are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.errors import CheckpointError
from nxd_models import registry
from tests.support.e2e.command import nxd_infer_here
from tests.support.pipeline.jobs import alone, job, train, train_alone
from tests.support.pipeline.models import decoder
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCAB_SIZE, write_tiny


def ids(rows: int = 4) -> Tensor:
    return torch.randint(5, VOCAB_SIZE, (rows, 8), generator=torch.Generator().manual_seed(1))


def trained(model_dir: str, root: str) -> dict[str, Tensor]:
    """Two steps at pp 2 and tp 2 from a model directory; saved; the weights."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline_config={"auto_partition": True, "num_microbatches": 2},
    )
    model = nxd.initialize_parallel_model(config, registry.load_model, model_dir, dtype=torch.float32)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.5)
    for _ in range(2):
        model.run_train(input_ids=ids(), labels=ids())
        optimizer.step()
        optimizer.zero_grad()
    nxd.save_checkpoint(root, "last", model, optimizer)
    return nxd.trainer.gather_weights(model)


def test_to_hugging_face_and_to_a_trace(tmp_path: Path, capsys, monkeypatch):
    def command(*arguments: object) -> None:
        done = nxd_infer_here(capsys, monkeypatch, *arguments)
        assert done.status == 0, done.err

    model_dir, root, out = write_tiny("llama", tmp_path / "llama"), tmp_path / "ckpts", tmp_path / "tuned"
    weights = run_ranks(trained, 4, str(model_dir), str(root), tp=2, pp=2)[0]
    model = registry.load_model(model_dir, dtype=torch.float32)
    before = model.eval()(input_ids=ids())
    model.load_state_dict(weights)
    with torch.no_grad():
        wanted = model(input_ids=ids())
    assert (wanted - before).abs().max() > 1e-2, "it was trained"

    command("ckpt", "export-hf", root, "--config", model_dir, "--out", out)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids()).logits, wanted, rtol=1e-4, atol=1e-5)

    source = ("--checkpoint", root, "--dtype", "float32", "--backend", "eager", "--tp", 2)
    command("trace", model_dir, *source, "--batch-sizes", "1", "--max-len", 32, "--out", tmp_path / "artifact")
    command("verify", tmp_path / "artifact", model_dir, "--checkpoint", root)


def stages(folder: str) -> list[str]:
    """What this rank's stage lacks of the weights in the reference's folders, which were cut elsewhere."""
    found = []
    for pp, tp in ((2, 2), (4, 1)):
        parallel_state.destroy_model_parallel()
        config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            pipeline_config={"auto_partition": True, "num_microbatches": 2},
        )
        torch.manual_seed(8 + current_context().rank)
        model = nxd.initialize_parallel_model(config, decoder, "tied")
        nxd.load_checkpoint(folder, "step_1", model)
        held = nxd.trainer.gather_weights(model)
        if current_context().rank == 0:
            wanted = reference().state_dict()
            found += [name for name, tensor in held.items() if not torch.equal(tensor, wanted[name])]
            found += sorted(wanted.keys() ^ held.keys())
    parallel_state.destroy_model_parallel()
    return found


def reference() -> nn.Module:
    torch.manual_seed(4)
    with use_context(LOCAL):
        return decoder("tied")


@pytest.mark.parametrize("form", ["trainer", "flat"])
def test_the_references_folders_are_read_into_stages(tmp_path: Path, form: str):
    """Its first stage ends after the first of four layers; both have the tied embedding."""
    state = reference().state_dict()
    first = {name: t for name, t in state.items() if "embed" in name or "layers.0." in name}
    last = {name: t for name, t in state.items() if name not in first} | {
        "model.embed_tokens.weight": state["model.embed_tokens.weight"]
    }
    for stage, part in enumerate((first, last)):
        if form == "trainer":
            path, value = tmp_path / f"step_1/model/dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt", part
        else:
            path, value = tmp_path / f"step_1/tp_rank_00_pp_rank_{stage:02d}/checkpoint.pt", {"model": part}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: t.clone() for name, t in value.items()} if form == "trainer" else value, path)
    if form == "trainer":
        (tmp_path / "step_1/checkpoint").touch()
        (tmp_path / "step_1/done").touch()
    assert run_ranks(stages, 4, str(tmp_path)) == [[]] * 4


HALF, ALL = 2, 4


def resumed(folder: str) -> list[list[float]]:
    """The losses after loading the reference's folders with their optimizer, at several degrees of four ranks."""
    found = []
    for pp, tp, zero1 in ((2, 2, False), (4, 1, False), (1, 2, True)):
        model, optimizer = job(pp, tp, zero1, "llama")
        nxd.load_checkpoint(folder, "step_2", model, optimizer)
        found.append(train(model, optimizer, range(HALF, ALL)))
    parallel_state.destroy_model_parallel()
    return found


def test_the_references_optimizers_are_read_into_stages(tmp_path: Path):
    """Each of its stages numbers its own parameters, by group."""
    model, optimizer, _ = train_alone("llama", HALF)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [[], []]
    for name in model.state_dict():
        held[not ("embed" in name or "layers.0." in name)].append(name)
    for stage, names in enumerate(held):
        file = f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt"
        state, groups, count = {}, [], 0
        for group in optimizer.param_groups:
            here = [p for p in group["params"] if name_of[id(p)] in names]
            state |= {count + place: optimizer.state[p] for place, p in enumerate(here)}
            groups.append({**group, "params": list(range(count, count + len(here)))})
            count += len(here)
        for kind, value in (
            ("model", {name: model.state_dict()[name].clone() for name in names}),
            ("optim", {"state": state, "param_groups": groups}),
        ):
            path = tmp_path / "step_2" / kind / file
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)
    (tmp_path / "step_2/checkpoint").touch()
    (tmp_path / "step_2/done").touch()
    for found in run_ranks(resumed, 4, str(tmp_path), comm_timeout=120):
        for losses in found:
            assert losses == pytest.approx(alone("llama", ALL)[HALF:], rel=1e-9)
    for file in (tmp_path / "step_2/model").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="which name them, are not there: restore them"):
        nxd.load_checkpoint(tmp_path, "step_2", optimizer=job(1, family="llama")[1])
