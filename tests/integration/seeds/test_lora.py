"""Fine-tuning with LoRA, as the training API calls it: the wrapper, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nxd_infer import compat

compat.install()

import neuronx_distributed
import neuronx_distributed as nxd
from neuronx_distributed.modules.lora import LoraConfig, LoRAModel

from tests.support.seeds.degrees import at_degree
from tests.support.seeds.model import get_model, tokens

MODES = [
    {"save_lora_base": False, "merge_lora": False},
    {"save_lora_base": True, "merge_lora": False},
    {"save_lora_base": True, "merge_lora": True},
]
"""The adapter only; both; the adapter merged into the base model."""


def save_and_load(checkpoint_dir: str, tp: int, config_in_adapter: bool) -> None:
    for number, mode in enumerate(MODES):
        lora_config = neuronx_distributed.modules.lora.LoraConfig(
            enable_lora=True,
            lora_rank=2,
            lora_alpha=4,
            target_modules=["qkv_proj"],
            save_lora_config_adapter=config_in_adapter,
            **mode,
        )
        nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=lora_config)
        torch.manual_seed(0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        for param in model.parameters():
            if param.requires_grad:
                torch.nn.init.constant_(param, 0.1)
        assert isinstance(model.local_module(), LoRAModel)
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        assert trained and all("qkv_proj" in name and "lora" in name for name in trained)
        expected = float(model.run_eval(tokens()))
        tag = f"mode{number}"
        neuronx_distributed.trainer.save_checkpoint(checkpoint_dir, tag, model)

        lora_config = LoraConfig(
            enable_lora=True,
            load_lora_from_ckpt=True,
            lora_save_dir=checkpoint_dir,  # checkpoint path
            lora_load_tag=tag,  # sub-directory under checkpoint path
        )
        started = lora_config
        if mode["merge_lora"]:  # nothing of an adapter is left in it
            lora_config = None
        nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=lora_config)
        torch.manual_seed(1 if mode["save_lora_base"] else 0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        if mode["save_lora_base"]:
            nxd.load_checkpoint(checkpoint_dir, tag, model)
        assert float(model.run_eval(tokens())) == pytest.approx(expected, rel=1e-5), mode
        if not mode["merge_lora"]:
            restored = model.local_module().lora_config
            assert (restored.lora_rank, restored.lora_alpha) == (2, 4)
            assert {name: getattr(restored, name) for name in mode} == mode
            assert restored.save_lora_config_adapter == config_in_adapter
        nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=started)
        torch.manual_seed(0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        nxd.load_checkpoint(checkpoint_dir, tag, model)  # merged weights are loaded beside their adapter
        assert float(model.run_eval(tokens())) == pytest.approx(expected, rel=1e-5), mode


@pytest.mark.parametrize(("tp", "config_in_adapter"), [(1, True), (2, False)])
def test_saving_and_loading(tp: int, config_in_adapter: bool, tmp_path: Path):
    """With ``save_lora_config_adapter=False`` the configuration is ``lora_adapter/adapter_config.json``."""
    at_degree(tp, save_and_load, str(tmp_path), tp, config_in_adapter)
    files = list((tmp_path / "mode0").rglob("lora_adapter/adapter_config.json"))
    assert len(files) == (0 if config_in_adapter else 1)
    for file in files:
        assert json.loads(file.read_text())["r"] == 2
