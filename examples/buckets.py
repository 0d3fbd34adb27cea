"""Buckets with a custom rule: a scripted kernel that picks the bucket and pads the input.

python examples/buckets.py
"""

import torch

import nxd_infer as nxd
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear


class MeanOfTokens(torch.nn.Module):
    """Map ids ``[1, length]``, where 0 is padding, to the mean over the other tokens, ``[1, 8]``."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 16)
        self.up = ColumnParallelLinear(16, 32, gather_output=False)
        self.down = RowParallelLinear(32, 8, input_is_parallel=True)

    def forward(self, ids):
        live = (ids > 0).unsqueeze(-1)
        y = self.down(torch.relu(self.up(self.embedding(ids))))
        return (y * live).sum(1) / live.sum(1)


def get_model():
    torch.manual_seed(0)
    return MeanOfTokens().eval(), {}


def pad_to_bucket(inputs: list[torch.Tensor]):
    """Return the inputs for the bucket, and its index. Compiled as TorchScript and saved with the model."""
    ids = inputs[0]
    bucket = 0 if ids.shape[1] <= 8 else 1
    size = 8 if bucket == 0 else 32
    return [torch.nn.functional.pad(ids, (0, size - ids.shape[1]))], torch.tensor([bucket])


def make_kernel():
    return torch.jit.script(pad_to_bucket)


def main():
    config = nxd.trace.BucketModelConfig(make_kernel)
    examples = [(torch.ones(1, 8, dtype=torch.int64),), (torch.ones(1, 32, dtype=torch.int64),)]
    reference = get_model()[0]
    with nxd.trace.parallel_model_trace(
        get_model, examples, bucket_config=config, inline_weights_to_neff=False, tp_degree=2
    ) as model:
        for length in (1, 8, 9, 32):
            ids = torch.randint(1, 100, (1, length))
            difference = (model(ids) - reference(ids)).abs().max()
            print(f"length {length:2}: {difference:.1e}")
            assert difference < 1e-5


if __name__ == "__main__":
    main()
