"""Model wrappers around modules of any names, and after calls that fail."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError, WeightMismatchError
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.modules.nxd_model import NxDModel
from nxd_infer.parallel_layers.layer_norm import mark_sequence_parallel
from nxd_infer.pipeline import NxDPPModel

MAKE = {
    NxDModel: lambda module: NxDModel(module, {}),
    NxDPPModel: NxDPPModel,
    LoRAModel: lambda module: LoRAModel(module, LoraConfig(lora_rank=2, target_modules=["inner"])),
}


class Named(nn.Module):
    """Its children, or its other attributes, have the names that a wrapper uses for its own."""

    def __init__(self, names: set[str], children: bool):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        for name in names:
            setattr(self, name, nn.Linear(4, 4) if children else f"the module's {name}")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


@pytest.mark.parametrize("children", [True, False])
@pytest.mark.parametrize("kind", MAKE)
def test_a_module_keeps_what_it_names_as_its_wrapper_does(kind: Any, children: bool):
    own = set(vars(MAKE[kind](Named(set(), children)))) - set(vars(nn.Module()))
    assert own
    module = Named(own, children)
    before = {name: getattr(module, name) for name in own}
    model = MAKE[kind](module)
    for one in (model, copy.deepcopy(model)):
        assert one(torch.ones(2, 4)).ndim == 0
        assert own <= vars(one).keys()
        assert all(type(getattr(one, name)) is not type(before[name]) for name in own)
    assert all(getattr(module, name) is value for name, value in before.items())


def test_marks_stay_where_loading_fails():
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    mark_sequence_parallel(*module[0].parameters())
    model = NxDModel(module, {})
    state = {name: value.clone() for name, value in module.state_dict().items()}
    before = model.get_parameter("0.weight")
    with pytest.raises(RuntimeError, match="surplus"):
        model.load_state_dict({**state, "surplus": torch.zeros(1)}, assign=True)
    assert model.get_parameter("0.weight") is not before

    def fails(tensor: Tensor) -> Tensor:
        if tensor.ndim > 1:
            raise MemoryError
        return tensor.to("meta")

    for _ in range(2):
        marked = [getattr(param, "sequence_parallel_enabled", False) for param in model.parameters()]
        assert marked == [True, True, False, False]
        assert [param.nxd_name for param in model.parameters()] == list(state)  # pyright: ignore
        with pytest.raises(MemoryError):
            model._apply(fails)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.conv = nn.Conv2d(4, 4, 1, groups=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_modules": ["inner", "conv"]}, "groups=1, got 2"),
        ({"target_modules": ["inner"], "modules_to_save": ["heads"]}, "matches no module: heads"),
    ],
)
def test_a_module_is_as_before_where_adapting_it_fails(wrong: dict[str, Any], message: str):
    module = Grouped()
    before = [*module.modules(), *((name, id(p), p.requires_grad) for name, p in module.named_parameters())]
    with pytest.raises(ParallelConfigError, match=message):
        LoRAModel(module, LoraConfig(lora_rank=2, **wrong))
    assert [*module.modules(), *((name, id(p), p.requires_grad) for name, p in module.named_parameters())] == before
    model = LoRAModel(module, LoraConfig(lora_rank=2, target_modules=["inner"], modules_to_save=["head"]))
    assert set(model.lora_layers) == {"inner"}


def test_a_module_is_as_before_where_its_adapter_does_not_fit(tmp_path: Path):
    stored = LoRAModel(nn.Sequential(nn.Linear(4, 4)), LoraConfig(lora_rank=2, target_modules=["0"]))
    stored.save_adapter(tmp_path)
    module = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(WeightMismatchError, match="of another shape"):
        LoRAModel(module, LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path)))
    assert type(module[0]) is nn.Linear and module[0].weight.requires_grad
