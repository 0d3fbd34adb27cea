"""The model of the adapter in this folder, which PEFT wrote, and the script that made it.

``python -m tests.support.modules.golden.make`` writes the folder again. The other direction is ``test_lora_peft.py``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

FOLDER = Path(__file__).parent


class GoldenNet(nn.Module):
    """``forward(ids [2, 9])`` -> [2, 9, 5]; plain layers, or parallel ones where there are such."""

    def __init__(self, parallel: bool):
        super().__init__()
        self.embed = ParallelEmbedding(10, 8) if parallel else nn.Embedding(10, 8)
        if parallel:
            self.q_proj = ColumnParallelLinear(8, 8, gather_output=False)
            self.v_proj = ColumnParallelLinear(8, 8, gather_output=False)
            self.o_proj = RowParallelLinear(8, 8, input_is_parallel=True)
        else:
            self.q_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(3))
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.o_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))
        return self.head(x + self.conv(x.unsqueeze(1)).squeeze(1))


def main() -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    torch.manual_seed(0)
    model = GoldenNet(parallel=False)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 10, (2, 9))
    config = PeftConfig(
        r=3,
        lora_alpha=5,
        lora_dropout=0.1,
        use_rslora=True,
        target_modules=["embed", "q_proj", "v_proj", "o_proj", "conv"],
        modules_to_save=["head"],
    )
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for param in adapted.parameters():
            if param.requires_grad:
                param.normal_()
        logits = adapted(ids)
    adapted.save_pretrained(FOLDER, save_embedding_layers=False)
    (FOLDER / "README.md").unlink()
    save_file({**base, "ids": ids, "logits": logits}, FOLDER / "base.safetensors")


if __name__ == "__main__":
    main()
