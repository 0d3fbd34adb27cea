"""The plan of memory from a manifest alone, and the slots that a budget leaves: sums a reader can follow."""

from __future__ import annotations

import dataclasses

import pytest

from nxd_infer.artifact.manifest import BucketSpec, GraphSpec, InputSpec, Manifest, OutputSpec, TensorSpec, WeightSpec
from nxd_infer.errors import MemoryBudgetError
from nxd_infer.ops.packed import packed_shape
from nxd_infer.runtime.memory_plan import MemoryPlan, fit_slots, plan_memory, process_bytes

MIB = 1 << 20
PLAN = MemoryPlan({"": 60 * MIB}, 50 * MIB, 4, 0, 10 * MIB, 30 * MIB, 60 * MIB)
"""100 MiB, and 10 for each of four slots and the scratch slot."""


def spec(kind, name, dtype, *shape, **more):
    stride = [1]
    for size in shape[:0:-1]:
        stride.insert(0, stride[0] * size)
    return kind(name=name, dtype=dtype, shape=list(shape), stride=stride, **more)


def manifest(backend="cpu", pp=1):
    weights = [
        spec(WeightSpec, "embed", "bfloat16", 1000, 64),
        spec(WeightSpec, "up", "bfloat16", 256, 64, encoding="packed32-int8"),
        spec(WeightSpec, "down", "bfloat16", 64, 128, encoding="packed32"),
    ]
    states = [spec(TensorSpec, "k", "bfloat16", 5, 2, 32, 16), spec(TensorSpec, "other", "float32", 3)]
    tokens = spec(InputSpec, "tokens", "int64", 2, 8, role="tokens")
    names = [f"g{stage}" for stage in range(pp) for _ in range(2)]
    bucket = BucketSpec(name="b", inputs=[tokens], outputs=[spec(OutputSpec, "y", "float32", 2)], graphs=names)
    parts = [weights] if pp == 1 else [weights[:1], weights[1:]]
    graphs = {
        f"g{i}": GraphSpec(digest=f"g{i}", states=["k", "other"] if i == 0 else [], weights=[w.name for w in part])
        for i, part in enumerate(parts)
    }
    meta = {"slots": 4, "vocab_size": 1000}
    return Manifest(
        backend=backend, tp_degree=2, pp_degree=pp, buckets=[bucket], graphs=graphs, states=states, weights=weights,
        metadata=meta,
    )  # fmt: skip


@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_counts_each_rank_by_encoding(pp):
    plan = plan_memory(manifest(pp=pp))
    rows, columns = packed_shape([256, 64])
    assert plan.weights == {"": 2 * 128_000, "packed32-int8": 2 * rows * columns, "packed32": 2 * 64 * 128 * 2}
    assert plan.stored == 2 * (128_000 + 256 * 64 * 2 + 64 * 128 * 2)
    assert plan.cache == 2 * 5 * 2 * 32 * 16 * 2 and plan.states == 2 * 12
    assert plan.processes == process_bytes(2 * pp)
    assert plan.working >= 2 * 16 * 256 * 2
    assert plan.total == sum(plan.weights.values()) + plan.cache + plan.states + plan.working + plan.processes


def test_fewer_slots_take_less_where_unused_ones_take_nothing():
    whole, one = plan_memory(manifest()), plan_memory(manifest(), 1)
    assert one.cache * 5 == whole.cache * 2 and one.slots == 1 and one.fixed == whole.fixed
    assert plan_memory(manifest(), 9).slots == 4
    everything = plan_memory(manifest("xla"), 1)
    assert everything.slots == everything.cache == 0 and everything.states == whole.cache + whole.states


def test_new_weights_need_torch_in_the_server():
    assert plan_memory(manifest(), swaps=True).processes - plan_memory(manifest()).processes > 100 * MIB


def test_a_draft_is_counted_beside_its_model():
    alone, both = plan_memory(manifest(), 2), plan_memory(manifest(), 2, draft=manifest())
    assert both.weights == {encoding: 2 * count for encoding, count in alone.weights.items()}
    assert both.cache == 2 * alone.cache and both.slots == alone.slots and both.working == 2 * alone.working
    assert both.processes - alone.processes == process_bytes(2) - process_bytes(0)
    head = manifest()
    head.metadata |= {"head": {"kind": "eagle3", "features": 96}, "max_len": 50}
    assert plan_memory(manifest(), 2, draft=head).per_slot - both.per_slot == 50 * 96 * 4, "states that it has not read"


@pytest.mark.parametrize(
    ("available", "fraction", "copies", "slots"),
    [
        (150, 1.0, 1, [4]),
        (149, 1.0, 1, [3]),
        (298, 0.5, 1, [3]),
        (139, 1.0, 1, [2]),
        (120, 1.0, 1, [1]),
        (299, 1.0, 2, [3, 3]),
        (240, 1.0, 2, [1, 1]),
    ],
)
def test_caches_get_what_the_rest_leaves(available, fraction, copies, slots):
    assert fit_slots([PLAN] * copies, available * MIB, fraction) == slots


def test_a_model_without_slots_is_counted_beside_one_with():
    fixed = dataclasses.replace(PLAN, cache=0, slots=0)
    assert fit_slots([PLAN, fixed], 230 * MIB, 1.0) == [2, 0]
    assert fit_slots([fixed], 100 * MIB, 1.0) == [0]


@pytest.mark.parametrize(("available", "copies"), [(119, 1), (99, 1), (239, 2)])
def test_what_does_not_fit_is_refused_with_the_sum(available, copies):
    with pytest.raises(MemoryBudgetError) as refused:
        fit_slots([PLAN] * copies, available * MIB, 1.0)
    for words in (f"{120 * copies}.0 MiB", f"{available}.0 MiB", "weights 60.0 MiB", "memory_fraction", "--max-len"):
        assert words in str(refused.value)
