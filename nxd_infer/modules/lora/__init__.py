"""Low-rank adaptation (LoRA): the weights are frozen, and a low-rank product ``B A`` is trained beside chosen ones.

::

    lora_config = LoraConfig(enable_lora=True, lora_rank=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2, lora_config=lora_config)
    model = nxd.initialize_parallel_model(nxd_config, get_model)

or ``LoRAModel(module, lora_config)`` around any module. Adapters are read and written in the format of PEFT.

Source: NxD Core training API, "Enable LoRA fine-tuning".
"""

from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.lora.model import LoRAModel, get_lora_model
from nxd_infer.modules.lora.peft import load_adapter, save_adapter
from nxd_infer.modules.lora.slots import AdapterRows, add_adapter_slots

LoraModel = LoRAModel
"""The name in the reference's code; its documentation uses the other one."""

__all__ = [
    "AdapterRows", "LoRAModel", "LoraConfig", "LoraModel", "add_adapter_slots", "get_lora_model", "load_adapter",
    "save_adapter",
]  # fmt: skip
