"""A rank's memory: zeros that take no page until they are written, and give it back."""

from __future__ import annotations

import torch

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.backends.cpu.placement import Memory, extent, placed
from nxd_infer.trace.ranks.from_checkpoint import UntouchedZeros
from nxd_infer.util.memory import held_memory


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))


def test_pages_come_with_the_first_write_and_go_with_clear() -> None:
    before = resident()
    memory = Memory(256 << 20)
    assert resident() - before < 32 << 20
    memory.bytes[: 128 << 20] = 7
    assert resident() - before > 120 << 20
    memory.clear()
    assert resident() - before < 32 << 20
    assert int(memory.bytes[: 1 << 20].max()) == 0


def test_a_tensor_outlives_the_object_that_made_its_memory() -> None:
    values = Memory(4 << 20, large=True).bytes.view(torch.float32)
    values.fill_(3.0)
    assert float(values.sum()) == 3.0 * (1 << 20)


def test_states_of_any_stride_lie_in_it_and_empty_ones_too() -> None:
    for tensor in (torch.zeros(3, 4).T, torch.zeros(2, 0, 5), torch.zeros(()), torch.zeros(4, 6)[:, ::2].expand(4, 3)):
        spec = TensorSpec.of("state", tensor)
        found = placed(spec, Memory(extent(spec)).bytes)
        assert found.shape == tensor.shape and found.stride() == tensor.stride()
        assert torch.equal(found, tensor)
        found.fill_(2.0)
        assert torch.equal(found, torch.full_like(tensor, 2.0))


def test_zeros_of_a_trace_take_no_memory_until_they_are_written() -> None:
    before = held_memory()
    with UntouchedZeros():
        large = torch.zeros(4, 32 << 20, dtype=torch.bfloat16)
        small = torch.zeros((2, 3))
        named = torch.zeros(size=(8 << 20,), dtype=torch.bool, device="cpu")
        apart = torch.zeros(64 << 20, device="meta")
        with torch.device("meta"):
            inside = torch.zeros(64 << 20)
    after = held_memory()
    assert before is not None and after is not None and after - before < 8 << 20
    assert large.shape == (4, 32 << 20) and large.dtype == torch.bfloat16 and not bool(large[1].any())
    assert torch.equal(small, torch.zeros(2, 3))
    assert named.dtype == torch.bool and named.shape == (8 << 20,) and not bool(named.any())
    assert apart.is_meta and inside.is_meta
    large[2, 5] = 3.0
    assert float(large[2].sum()) == 3.0
