"""How a model is built: in turns, from one stream of random numbers, on the meta device, for sequence parallelism."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import ColumnParallelLinear
from nxd_infer.parallel_layers.sequence_parallel import build_sequence_parallel
from nxd_infer.trainer import NxDModel
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import wrapped
from tests.support.trainer.models import decoder, llama, mlp, tokens


def test_what_a_model_function_returns():
    with pytest.raises(ParallelConfigError, match=r"'<lambda>' must return a torch.nn.Module, got int"):
        wrapped(lambda: 3)
    with pytest.raises(ParallelConfigError, match="nxd_config is what neuronx_distributed_config"):
        nxd.initialize_parallel_model(llama, llama)  # pyright: ignore[reportArgumentType]


def given_what_was_built_before() -> list[str]:
    """The errors for a model that was built before there were degrees, and for another on each rank."""
    context = current_context()
    with use_context(LOCAL):
        before = ColumnParallelLinear(4, 4)
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(own[1].weight, float(context.rank))  # pyright: ignore[reportArgumentType]
    told = []
    for model in (before, own):
        try:
            wrapped(lambda model=model: model)
            told.append("")
        except ParallelConfigError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_that_was_built_elsewhere_is_not_trained_as_several(tp: int):
    """Each rank trained its own, and said nothing."""
    for rank, (before, own) in enumerate(run_ranks(given_what_was_built_before, 2, tp=tp)):
        if tp == 2:
            said = f"'ColumnParallelLinear' was built for rank 0 of 1 of the axis 'tp', and this is rank {rank} of 2: "
            assert said in before and own == ""
        else:
            assert "hold different values of 1 parameter(s), such as '1.weight': build the model in" in own


@pytest.mark.parametrize("family", ["tied", "biases"])
def test_meta_device(family: str):
    """Built on the meta device with the modules' own initialisation: the same model, ties and marks included."""
    torch.manual_seed(3)
    plain = decoder(family)
    for name, param in plain.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(param)
    torch.manual_seed(3)
    built = wrapped(decoder, family, model_init_config={"meta_device_init": True, "param_init_fn": zero_biases})
    assert len(list(built.parameters())) == len(list(plain.parameters()))
    assert list(built.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    assert built(tokens()["input_ids"]).shape == (4, 12, 61)  # buffers that no state dict holds are there too


def zero_biases(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # pyright: ignore[reportCallIssue]
    if isinstance(getattr(module, "bias", None), nn.Parameter):
        nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("model_fn", [llama, mlp])
def test_marks_and_names_survive(model_fn: Any):
    """Sequence-parallel weights stay marked, and parameters named, in whatever takes their place."""
    with build_sequence_parallel():
        model = NxDModel(model_fn(), {})

    def marked(of: Any) -> set[str]:
        return {n for n, p in of.named_parameters() if getattr(p, "sequence_parallel_enabled", False)}

    wanted = {name for name, _ in model.named_parameters() if "norm" in name}
    assert marked(model) == wanted and wanted
    twin = copy.deepcopy(model)
    assert marked(twin) == wanted and {p.nxd_name for p in twin.parameters()} == set(dict(model.named_parameters()))
    assert marked(copy.deepcopy(model.local_module())) == wanted
    assert marked(pickle.loads(pickle.dumps(model))) == wanted
    assert marked(model.local_module().to("meta").to_empty(device="cpu")) == wanted
    twin.load_state_dict({name: torch.zeros_like(p) for name, p in twin.state_dict().items()}, assign=True)
    assert marked(twin) == wanted
    assert not marked(model_fn())


def test_meta_device_needs_an_initialisation():
    with pytest.raises(ParallelConfigError, match=r"meta_device_init=True: LayerScale cannot initialise itself"):
        wrapped(LayerScale, model_init_config={"meta_device_init": True})


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))


class Buffered(nn.Module):
    """A buffer with values wherever it is built, and one that is computed on the device in force."""

    def __init__(self, whole: bool = True):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.arange(4.0, device="cpu") + 1)
        if not whole:
            self.turn = nn.Module()
            self.turn.register_buffer("inv_freq", torch.ones(4) / 3, persistent=False)


def test_meta_device_keeps_buffers_or_says_that_it_cannot():
    model = wrapped(Buffered, model_init_config={"meta_device_init": True})
    assert torch.equal(model.steps, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ParallelConfigError, match="meta_device_init=True: turn cannot initialise itself"):
        wrapped(Buffered, False, model_init_config={"meta_device_init": True})

    def fill(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(2.0)

    model = wrapped(Buffered, False, model_init_config={"meta_device_init": True, "param_init_fn": fill})
    assert torch.equal(model.turn.inv_freq, torch.full((4,), 2.0))


def built_in_turns() -> dict[str, Any]:
    """Ranks with different seeds, one building at a time, build one model and keep their own random numbers."""
    torch.manual_seed(100 + current_context().rank)
    expected = torch.get_rng_state()
    model = wrapped(llama, model_init_config={"sequential_move_factor": 1})
    same_after = torch.equal(expected, torch.get_rng_state())
    meta = wrapped(llama, model_init_config={"meta_device_init": True})
    return {
        "norm": model.state_dict()["lm_head.weight"].sum().item(),
        "own numbers": same_after,
        "heads": model.state_dict()["model.layers.0.self_attn.k_proj.weight"],
        "meta": meta.state_dict()["model.layers.0.self_attn.k_proj.weight"],
    }


def test_one_model_whatever_the_seeds():
    found = run_ranks(built_in_turns, 4)  # two key/value heads on four ranks: neighbours hold the same
    assert all(rank["own numbers"] for rank in found)
    for key in ("heads", "meta"):
        assert torch.equal(found[0][key], found[1][key]) and torch.equal(found[2][key], found[3][key])
        assert not torch.equal(found[0][key], found[2][key])


def same_seed_goes_on() -> bool:
    """Ranks that agree go on from where building leaves them, like a single process."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    wrapped(llama)
    return torch.equal(before, torch.get_rng_state())


def test_equal_seeds_are_used_up():
    assert run_ranks(same_seed_goes_on, 2) == [False, False]


def refused() -> list[str]:
    found = []
    for model_fn in (partial(nn.Linear, 2, 2), llama):
        try:
            wrapped(model_fn, sequence_parallel=True)
            found.append("built")
        except ParallelConfigError as error:
            found.append(str(error))
    try:
        wrapped(llama, sequence_parallel=True).run_train(**tokens(2, 7))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_sequence_parallel_needs_a_model_for_it():
    plain, ours, odd = run_ranks(refused, 2)[0]
    assert "no layer of the model has sequence_parallel_enabled=True" in plain and ours == "built"
    assert odd.startswith("CollectiveError") and "7" in odd
