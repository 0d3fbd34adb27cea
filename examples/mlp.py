"""The smallest complete example: a parallel MLP, traced for two ranks, saved, loaded and called.

python examples/mlp.py
"""

import tempfile

import torch

import nxd_infer as nxd
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear


class MLP(torch.nn.Module):
    """``[batch, 64] -> [batch, 64]``; the hidden 256 values are split over the ranks."""

    nxd_inputs = {"x": {"pad": {0: 0.0}}}  # rows are independent, so a smaller batch may be padded ...
    nxd_outputs = {"output_0": {"cut": {0: ["x", 0]}}}  # ... and the result cut back

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(64, 256, gather_output=False)
        self.down = RowParallelLinear(256, 64, input_is_parallel=True)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def get_model():
    """Build the model; runs on each rank. The same seed gives the same logical weights at every degree."""
    torch.manual_seed(0)
    return MLP().eval(), {}


def main():
    x = torch.randn(3, 64)
    expected = get_model()[0](x)  # no parallel state here, so this is degree 1: plain PyTorch
    with tempfile.TemporaryDirectory() as directory:
        with nxd.trace.parallel_model_trace(get_model, (torch.zeros(4, 64),), tp_degree=2) as traced:
            nxd.trace.parallel_model_save(traced, f"{directory}/artifact")
        with nxd.trace.parallel_model_load(f"{directory}/artifact") as model:
            difference = (model(x) - expected).abs().max() / expected.abs().max()
    print(f"tp 2 against one process: {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
