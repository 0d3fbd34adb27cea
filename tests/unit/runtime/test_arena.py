"""What the caller and its ranks share: where tensors lie, who may write, which cores are used."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from nxd_infer.errors import InputRangeError
from nxd_infer.runtime.ipc import (
    ALIGNMENT,
    Arena,
    ArenaLayout,
    Channel,
    ChannelClosed,
    InputBlock,
    Kind,
    Request,
    create_arena,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int8, torch.float64]
shapes = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def manifests(draw):
    buckets = []
    for number in range(draw(st.integers(1, 3))):
        tensors = [
            torch.zeros(draw(shapes), dtype=draw(st.sampled_from(DTYPES))) for _ in range(draw(st.integers(1, 5)))
        ]
        split = draw(st.integers(0, len(tensors)))
        buckets.append(
            BucketSpec(
                name=f"b{number}",
                inputs=[InputSpec.of(f"i{n}", t) for n, t in enumerate(tensors[:split])],
                outputs=[OutputSpec.of(f"o{n}", t) for n, t in enumerate(tensors[split:])],
                graphs=["g"],
            )
        )
    return Manifest(backend="eager", tp_degree=draw(st.integers(1, 70)), buckets=buckets, graphs={})


@settings(max_examples=25)
@given(manifests())
def test_tensors_keep_apart_and_arrive(manifest):
    """Everything written on one side is read on the other; nothing overlaps, counters included."""
    layout = ArenaLayout(manifest)
    fd = create_arena(layout)
    try:
        ours = Arena(fd, manifest, writable_inputs=True)
        theirs = Arena(fd, manifest, writable_inputs=False)
        for rank in range(manifest.tp_degree):
            ours.begin(rank, rank + 1)
            ours.finish(rank, 5 * rank)
        for index, bucket in enumerate(manifest.buckets):
            pairs = []
            for mine, other in zip(ours.sides, theirs.sides, strict=True):
                pairs += [*zip(mine.inputs[index], other.inputs[index], strict=True)]
                pairs += [*zip(mine.outputs[index], other.outputs[index], strict=True)]
            assert len(pairs) == layout.sides * (len(bucket.inputs) + len(bucket.outputs))
            for number, (mine, _) in enumerate(pairs):
                mine.fill_(number % 2 if mine.dtype == torch.bool else number + 1)
                if mine.numel():
                    assert mine.data_ptr() % ALIGNMENT == 0
            for number, (mine, other) in enumerate(pairs):
                assert (other == (number % 2 if mine.dtype == torch.bool else number + 1)).all()
        assert [theirs.progress(rank) for rank in range(manifest.tp_degree)] == [
            (1, 1, rank + 1, 5 * rank) for rank in range(manifest.tp_degree)
        ]
    finally:
        os.close(fd)


@st.composite
def limited_inputs(draw):
    """Inputs with limits, and an array for each that may lie beyond them."""
    specs, arrays = [], {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]))
        minimum, maximum = draw(
            st.sampled_from([(None, None), (-1, 7), (0, None), (None, 5), (0.5, 7.5), (-math.inf, 2.0**63)])
        )
        name = f"i{number}"
        spec = InputSpec.of(name, torch.zeros(draw(shapes), dtype=dtype), default=draw(st.sampled_from([None, 1])))
        specs.append(spec.model_copy(update={"minimum": minimum, "maximum": maximum}))
        seed = draw(st.integers(0, 2**32 - 1))
        values = np.random.default_rng(seed).integers(-2 if draw(st.booleans()) else 0, 9, spec.shape)
        arrays[name] = np.asarray(values).astype(spec.dtype)
    return BucketSpec(name="b", inputs=specs, outputs=[], graphs=["g"]), arrays


@settings(max_examples=50)
@given(limited_inputs())
def test_a_block_of_inputs_is_refused_where_single_arrays_are(case):
    """A block is checked in one pass over its memory; it lies as the arena does, and begins with the defaults."""
    bucket, arrays = case
    block = InputBlock(bucket)
    assert list(block) == [spec.name for spec in bucket.inputs] and len(block) == len(bucket.inputs)
    for spec in bucket.inputs:
        assert (block[spec.name] == (spec.default or 0)).all()
    for name, array in arrays.items():
        block[name][...] = array
    fd = create_arena(ArenaLayout(manifest := Manifest(backend="eager", tp_degree=1, buckets=[bucket], graphs={})))
    side = Arena(fd, manifest, writable_inputs=True).sides[1]
    os.close(fd)
    side.input_bytes[0][:] = block.memory
    for spec, found in zip(bucket.inputs, side.inputs[0], strict=True):
        assert (found.numpy() == arrays[spec.name]).all()
    names = []
    for check in (block.check, lambda: naive_check(bucket, arrays)):
        try:
            check()
            names.append("")
        except InputRangeError as error:
            names.append(error.input)
    assert names[0] == names[1]


def naive_check(bucket, arrays):
    for spec in bucket.inputs:
        for value in arrays[spec.name].flatten().tolist():
            spec.check(value)


def test_the_arena_cannot_be_resized():
    bucket = BucketSpec(name="b", inputs=[], outputs=[], graphs=["g"])
    fd = create_arena(ArenaLayout(Manifest(backend="eager", tp_degree=1, buckets=[bucket], graphs={})))
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_records_and_descriptors_cross_the_channel():
    ours, theirs = Channel.pair()
    read, write = os.pipe()
    ours.send(Request(Kind.STEP, 65535, 2**63).record(), (read,))
    os.close(read)
    message = theirs.receive_request()
    assert message is not None
    request, fds = message
    assert request == Request(Kind.STEP, 65535, 2**63)
    os.write(write, b"x")
    assert os.read(fds[0], 1) == b"x"
    for text, expected in (("", ""), ("boom", "boom"), ("ä" * 100_000, None), ("\udcff", "?")):
        theirs.send_response(request, 123, text)
        answer = ours.receive_response()
        assert not answer.ok
        assert (answer.kind, answer.sequence, answer.nanoseconds) == (Kind.STEP, 2**63, 123)
        assert expected is None or answer.text == expected
        assert len(answer.text) <= 50_000
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive_response()
    with pytest.raises(ChannelClosed):
        ours.send(request.record())
    os.close(write)
    os.close(fds[0])
