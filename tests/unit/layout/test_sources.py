"""Sources: files, directories and indexes read alike, by slices, never unpickled; files replaced as a whole."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_infer.errors import CheckpointError, ShardingError
from nxd_infer.layout import AxisPlan, ParamLayout, RemappedSource, SafetensorsSource, as_source, shard_tensor
from nxd_infer.layout.files.atomic import replacing


@pytest.fixture
def tensors():
    return {
        "a": torch.randn(6, 4),
        "b": torch.arange(5),
        "c": torch.tensor(2.5),
        "d": torch.randn(2, 3, 4).to(torch.bfloat16),
    }


def same(source, tensors):
    assert set(source.keys()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape) and source.dtype(name) == tensor.dtype
        assert torch.equal(source.read(name), tensor)
        slices = [slice(0, max(1, n // 2)) for n in tensor.shape]
        assert torch.equal(source.read(name, slices), tensor[tuple(slices)])


def test_a_file_a_directory_and_an_index_read_alike(tmp_path, tensors):
    save_file(tensors, tmp_path / "one.safetensors")
    same(as_source(tmp_path / "one.safetensors"), tensors)
    same(as_source(str(tmp_path)), tensors)
    same(as_source(tensors), tensors)
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({name: tensors[name] for name in "ab"}, parts / "m-1.safetensors")
    save_file({name: tensors[name] for name in "cd"}, parts / "m-2.safetensors")
    same(SafetensorsSource(parts), tensors)
    table = {name: "m-1.safetensors" if name in "ab" else "m-2.safetensors" for name in "abcd"}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    source = SafetensorsSource(parts)
    same(source, tensors)
    source.close()
    same(source, tensors)


def test_a_pickle_is_never_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    torch.save({"a": Trap()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never loaded"):
        SafetensorsSource(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_damaged_checkpoints_are_refused_by_name(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    deep = ("[" * 100_000 + "]" * 100_000).encode()
    huge, nested = (33 << 20).to_bytes(8, "little") + b"{}", len(deep).to_bytes(8, "little") + deep
    for content in (file.read_bytes()[:-10], huge, nested, b"\x02"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
            SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match="neither"):
        SafetensorsSource(tmp_path / "absent")
    file.unlink()
    index = tmp_path / "model.safetensors.index.json"
    for content, message in [
        ("{", "not an index"),
        ("[" * 100_000 + "]" * 100_000, "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "beside the index"),
    ]:
        index.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            SafetensorsSource(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        SafetensorsSource(tmp_path).read("a")
    save_file({"b": tensors["b"]}, tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor 'a'"):
        SafetensorsSource(tmp_path).read("a")
    with pytest.raises(CheckpointError, match=r"no tensor 'z'; there are a"):
        SafetensorsSource(tmp_path).read("z")


def test_a_name_in_two_files_is_refused(tmp_path, tensors):
    save_file(tensors, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"both one\.safetensors and two\.safetensors"):
        SafetensorsSource(tmp_path)


def test_joined_tensors_are_split_and_renamed_on_the_way(tensors):
    source = RemappedSource(
        as_source(tensors), {"q": ("a", 0, 0, 2), "k": ("a", 0, 2, 6), "right": ("a", 1, 1, 4), "scale": "c"}
    )
    same(
        source,
        {"q": tensors["a"][:2], "k": tensors["a"][2:], "right": tensors["a"][:, 1:], "scale": tensors["c"]},
    )
    assert torch.equal(source.read("k", [slice(1, 3), slice(0, 2)]), tensors["a"][3:5, :2])
    with pytest.raises(CheckpointError, match="no tensor 'a'"):
        source.read("a")
    with pytest.raises(ShardingError, match=r"4\.\.9 of dimension 0"):
        RemappedSource(as_source(tensors), {"q": ("a", 0, 4, 9)}).shape("q")


def peak() -> int:
    """The most memory that this process had at once, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def test_a_file_is_sharded_without_holding_it(tmp_path):
    """Peak memory of cutting one rank's part out of a large file stays near the size of that part."""
    save_file({"w": torch.zeros(32, 512, 1024)}, tmp_path / "w.safetensors")
    layout = ParamLayout.of([AxisPlan.even(32), 512, 1024], "w").rank_layout(8, 3)
    source = SafetensorsSource(tmp_path / "w.safetensors")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = peak()
    piece = shard_tensor(source, layout)
    assert peak() - before < 3 * piece.nbytes


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_are_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int):
    """Whoever writes them: safetensors lets only their owner read them."""
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "text") as temporary:
            temporary.write_text("a")
        with replacing(tmp_path / "tensors") as temporary:
            save_file({"a": torch.zeros(1)}, temporary)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "text": mode,
        "tensors": mode,
    }


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise ValueError("no")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
