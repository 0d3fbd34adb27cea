"""The documents' other samples as printed, in one process and on two ranks: ZeRO-1, clipping, LoRA, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from nxd_infer import compat

compat.install()

import neuronx_distributed
import neuronx_distributed as nxd
import neuronx_distributed.parallel_layers.utils as neuronx_dist_utils
from neuronx_distributed import parallel_state
from neuronx_distributed.modules.lora import LoraConfig
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads, pad_model
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size

from tests.support.seeds import model as model_of_seeds
from tests.support.seeds.degrees import alone, at_degree
from tests.support.seeds.model import Config, LlamaDecoderLayer, get_model, tokens


def initialize(tp: int) -> None:
    parallel_state.destroy_model_parallel()  # ranks of the tests begin initialised
    neuronx_distributed.parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


def zero1(tp: int, folder: str) -> list[float]:
    """The sample of the optimizer, the checkpoint functions of the same chapter, and clipping."""
    initialize(tp)
    torch.manual_seed(0)
    model = get_model()
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "norm"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = NeuronZero1Optimizer(
        optimizer_grouped_parameters,
        AdamW,
        lr=1e-2,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
    )
    found = []
    for step in range(4):
        if step == 2:  # what follows is that of a second job
            neuronx_distributed.parallel_layers.save({"model": model.state_dict()}, folder)
            optimizer.save_sharded_state_dict(f"{folder}/optimizer", save_serially=True)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            neuronx_distributed.parallel_layers.load(folder, model, model_key="model", sharded=True)
            optimizer.load_sharded_state_dict(f"{folder}/optimizer", num_workers_per_step=8)
        optimizer.zero_grad()
        loss = model(tokens())[0]
        loss.backward()
        norm = neuronx_distributed.parallel_layers.clip_grad_norm(model.parameters(), 1e6, norm_type=2)
        optimizer.step()
        found += [float(loss.detach()), float(norm)]
    return found


def same(function, *more: object) -> list:
    """What one process finds; two ranks find the same."""
    expected = alone(function, 1, *(f"{one}/1" for one in more))
    for rank in at_degree(2, function, 2, *(f"{one}/2" for one in more)):
        assert rank == pytest.approx(expected, rel=1e-4)
    return expected


def test_the_sample_of_zero1_and_the_functions_of_its_chapters(tmp_path: Path):
    losses = same(zero1, tmp_path)[::2]
    assert losses == sorted(losses, reverse=True)


# --- LoRA ---------------------------------------------------------------------------------------------------


def lora(tp: int, checkpoint_dir: str) -> list[float]:
    """Enabled, saved in the three ways and loaded, as printed; losses. The adapter moves by its own gradient."""
    inputs, found = tokens(), []
    for save_lora_base, merge_lora in ((False, False), (True, False), (True, True)):
        lora_config = neuronx_distributed.modules.lora.LoraConfig(
            enable_lora=True,
            lora_rank=16,
            lora_alpha=32,
            lora_dropout=0.0,
            bias="none",
            target_modules=["o_proj", "up_proj", "down_proj"],
            save_lora_base=save_lora_base,
            merge_lora=merge_lora,
            save_lora_config_adapter=True,
        )
        nxd_config = neuronx_distributed.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=lora_config)
        torch.manual_seed(0)
        model = neuronx_distributed.initialize_parallel_model(nxd_config, get_model)
        optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model.run_train(inputs)
            optimizer.step()
        tag = f"{save_lora_base}-{merge_lora}"
        nxd.save_checkpoint(checkpoint_dir, tag, model=model)
        found.append(float(model.run_eval(inputs)))

        lora_config = LoraConfig(
            enable_lora=True,
            load_lora_from_ckpt=True,
            lora_save_dir=checkpoint_dir,  # checkpoint path
            lora_load_tag=tag,  # sub-directory under checkpoint path
        )
        nxd_config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp,
            lora_config=lora_config,
        )
        torch.manual_seed(1 if save_lora_base and not merge_lora else 0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        assert model.nxd_config["lora_config"].lora_alpha == 32
        found.append(float(model.run_eval(inputs)))
    return found


def test_the_samples_of_lora(tmp_path: Path):
    losses = same(lora, tmp_path)
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)


# --- padding ------------------------------------------------------------------------------------------------


class MyAttention(LlamaDecoderLayer):
    """Three heads, with the line that the document changes."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_heads = config.num_attention_heads
        self.num_heads = neuronx_dist_utils.divide(
            self.num_heads + get_number_of_extra_heads(self.num_heads, get_tensor_model_parallel_size()),
            get_tensor_model_parallel_size(),
        )
        self.split_size = 6 * config.num_attention_heads


def padded(tp: int) -> list[float]:
    initialize(tp)
    desired_config = Config(hidden_size=12, num_attention_heads=3)
    found = []

    def my_hook(attention_to_pad, tgt_src_ratio):
        attention_to_pad.split_size = int(attention_to_pad.split_size * tgt_src_ratio)

    for more in ({}, {"wrapped_classes": [MyAttention]}, {"wrapped_classes": [MyAttention], "pad_hook_fn": my_hook}):
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_of_seeds, "LlamaDecoderLayer", MyAttention)
            patch.setattr(model_of_seeds, "divide", lambda *_: 0)  # of the line that is changed
            model = get_model(desired_config)
        model = pad_model(model, tp_degree=tp, n_heads=desired_config.num_attention_heads, **more)
        found.append(float(model(tokens())[0].detach()))
        assert model.layers[0].split_size == (24 if "pad_hook_fn" in more and tp == 2 else 18)
    return found


def test_the_samples_of_padding():
    first, *others = same(padded)
    assert others == pytest.approx([first, first])
