"""A state that stays on the ranks: a KV cache, updated through aliases, shared by two buckets.

python examples/kv_cache.py
"""

import torch

import nxd_infer as nxd
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.parallel_state import get_tensor_model_parallel_size

HIDDEN, HEADS, LONGEST = 32, 4, 16


class Attention(torch.nn.Module):
    """Causal attention over everything seen so far; ``[1, length, 32]`` in and out."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS // get_tensor_model_parallel_size()  # of this rank; without parallel state, of 1 rank
        self.query = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)
        self.key = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)
        self.value = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, gather_output=False)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, bias=False, input_is_parallel=True)
        shape = (1, self.heads, LONGEST, HIDDEN // HEADS)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x, positions):
        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        keys = self.keys.index_copy(2, positions, split(self.key(x)))
        values = self.values.index_copy(2, positions, split(self.value(x)))
        mask = torch.arange(LONGEST) <= positions[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(split(self.query(x)), keys, values, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)), keys, values


def get_model():
    torch.manual_seed(0)
    model = Attention().eval()
    return model, {model.keys: 1, model.values: 2}  # output 1 becomes the next `keys` and is not returned


def main():
    prompt, step = torch.randn(1, 4, HIDDEN), torch.randn(1, 1, HIDDEN)
    whole = get_model()[0](torch.cat([prompt, step], 1), torch.arange(5))[0]

    examples = [(prompt, torch.arange(4)), (step, torch.tensor([4]))]  # one entry per bucket: four tokens, and one
    traced = nxd.trace.parallel_model_trace(
        get_model,
        examples,
        bucket_config=nxd.trace.BucketModelConfig(),  # no custom kernel: the smallest bucket that fits
        inline_weights_to_neff=False,  # the buckets share one copy of the weights
        tp_degree=2,
    )
    with traced as model:
        (first,) = model(prompt, torch.arange(4))
        (second,) = model(step, torch.tensor([4]))  # reads what the first call left on the ranks
    difference = (torch.cat([first, second], 1) - whole).abs().max()
    print(f"two calls with a cache against one without: {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
