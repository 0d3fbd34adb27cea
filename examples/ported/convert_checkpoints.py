"""Llama's checkpoints: of transformers into those of the training scripts beside this one, and back."""

import torch
from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase


class CheckpointConverterLlama(CheckpointConverterBase):
    def get_partition_dim(self, name):
        if any(part in name for part in ("embed_tokens", "gate_up_proj", "lm_head")):
            return 0
        return 1 if "o_proj" in name or "down_proj" in name else None

    def pre_process_full_state_before_tp_conversion(self, state_dict, args):
        for name in [name for name in state_dict if "gate_proj" in name]:
            gate, up = state_dict.pop(name), state_dict.pop(name.replace("gate_proj", "up_proj"))
            state_dict[name.replace("gate_proj", "gate_up_proj")] = torch.cat([gate, up])
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict, args):
        for name in [name for name in state_dict if "gate_up_proj" in name]:
            gate, up = torch.chunk(state_dict.pop(name), 2)
            state_dict[name.replace("gate_up_proj", "gate_proj")] = gate.clone()
            state_dict[name.replace("gate_up_proj", "up_proj")] = up.clone()
        return state_dict


if __name__ == "__main__":
    checkpoint_converter = CheckpointConverterLlama()
    parser, args = checkpoint_converter.get_arg_parser()
    args, _ = parser.parse_known_args()
    checkpoint_converter.run(args)
