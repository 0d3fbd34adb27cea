"""Files that others write meanwhile: what is read lies beneath the root, is one file, and is not made to hurt."""

from __future__ import annotations

import contextlib
import json
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import AdapterError, CheckpointError, OpenFilesError
from nxd_infer.layout import SafetensorsSource
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.lora.peft import read_config
from nxd_infer.util import beneath, open_beneath
from nxd_infer.util.beneath import opened_beneath, require_unchanged
from nxd_server.errors import ForbiddenPathError, RequestError
from nxd_server.http.admin import allowed_paths
from nxd_server.http.admin.allowed_paths import opened_under
from tests.support.flipping import flipping

REFUSED = (ForbiddenPathError, RequestError, CheckpointError, OSError)


@pytest.fixture(params=["openat2", "by parts"])
def way(request, monkeypatch):
    """The kernel's way, and the one for kernels without it."""
    if request.param == "by parts":
        monkeypatch.setattr(open_beneath, "_openat2", lambda folder, name: None)


@pytest.fixture
def root(tmp_path):
    """Weights 1 in a root, weights 3 outside of it."""
    for name, value in (("root/step", 1.0), ("root/other", 2.0), ("outside", 3.0)):
        (tmp_path / name).mkdir(parents=True)
        save_file({"w": torch.full((64,), value)}, tmp_path / name / "model.safetensors")
    return tmp_path / "root"


@pytest.mark.parametrize("flipped", ["step", "step/model.safetensors"])
def test_a_name_that_becomes_a_link_is_never_followed_out(root, way, flipped, monkeypatch):
    monkeypatch.setattr(beneath, "_TICK", 0)  # no wait for a clear time of change
    target = root.parent / "outside" / ("model.safetensors" if "/" in flipped else "")
    seen, tries = 0, 0
    with flipping(root / flipped, target):
        while tries < 100 or (seen < 5 and tries < 20000):
            tries += 1
            with contextlib.suppress(*REFUSED), opened_under(root, "step") as path:
                assert set(weight_source(path).read("w").tolist()) == {1.0}
                seen += 1
    assert seen


def test_links_are_followed_while_they_stay_beneath(root, way):
    (root / "latest").symlink_to(root / "step")
    (root / "step" / "other.safetensors").symlink_to("../other/model.safetensors")
    (root / "step" / "out.safetensors").symlink_to("../../outside/model.safetensors")
    (root / "step" / "circle").symlink_to("circle")
    with opened_under(root, "latest/model.safetensors") as path:
        assert path.name == "model.safetensors" and str(path) == str(root / "step" / "model.safetensors")
    with opened_beneath(root, "step") as path:
        assert set(SafetensorsSource(path / "other.safetensors").read("w").tolist()) == {2.0}
        assert not (path / "circle").is_file() and not (path / "nothing").is_file() and path.is_dir()
        assert list(path.names_below()) == ["circle", "model.safetensors", "other.safetensors", "out.safetensors"]
        with pytest.raises(CheckpointError, match=r"out.safetensors leads out of .*root"):
            SafetensorsSource(path / "out.safetensors")
        for name in ("../other/model.safetensors", "/etc/passwd"):
            with pytest.raises(CheckpointError):
                SafetensorsSource(path / name)
    for name in ("step/circle", "nothing", "../outside"):
        with pytest.raises(OSError), opened_beneath(root, name):
            pass
    with opened_beneath(root, "step") as path:
        os.rename(root / "step", root / "gone")
        (root / "step").symlink_to(root.parent / "outside")
        assert set(SafetensorsSource(path).read("w").tolist()) == {1.0}
        require_unchanged(path)


@pytest.mark.parametrize("change", ["its time set back", "truncated", "replaced"])
def test_a_file_that_changes_while_it_is_read(root, change):
    file = root / "step" / "model.safetensors"
    with opened_beneath(root, "step") as path:
        source = SafetensorsSource(path)
        before = source.read("w")
        if change == "replaced":  # what was opened is read to its end
            os.replace(root / "other" / "model.safetensors", file)
            assert torch.equal(SafetensorsSource(path).read("w"), before)
            require_unchanged(path)
            return
        if change == "truncated":  # of a mapping, this would be the end of the process
            os.truncate(file, 0)
            with pytest.raises(CheckpointError, match=r"model.safetensors ends before byte \d+: it was truncated"):
                source.read("w")
        else:
            times = file.stat()
            with open(file, "r+b") as out:
                out.seek(-4, os.SEEK_END)
                out.write(b"\0\0\0\0")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(CheckpointError, match=r"model.safetensors was changed while it was read: try again"):
            require_unchanged(path)


def test_a_checkpoint_of_many_files_takes_few_descriptors(root, monkeypatch):
    """Those that were closed are the same when they are opened again, or refused."""
    monkeypatch.setattr(beneath, "MOST_OPEN", 2)
    monkeypatch.setattr(beneath, "_TICK", 0)
    for number in range(6):
        save_file({f"w{number}": torch.full((4, 6), number)}, root / "step" / f"{number}.safetensors")
    os.unlink(root / "step" / "model.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    with opened_beneath(root, "step") as path:
        source = SafetensorsSource(path)
        for number in range(6):
            assert torch.equal(source.read(f"w{number}", [slice(1, 3), slice(0, 2)]), torch.full((2, 2), number))
        assert len(os.listdir("/proc/self/fd")) <= before + 2 + beneath.MOST_OPEN  # the root and the folder
        require_unchanged(path)
        os.replace(root / "step" / "1.safetensors", root / "step" / "0.safetensors")
        for name in ("w0", "w1"):
            with pytest.raises(CheckpointError, match=r"\d.safetensors was changed while it was read"):
                source.read(name)
    assert len(os.listdir("/proc/self/fd")) == before, "all are given back"


def test_a_process_without_descriptors_says_how_to_get_some(root):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened_beneath(root, "step") as path:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, most[1]))
        try:
            with pytest.raises(OpenFilesError, match=r"ulimit -n"):
                SafetensorsSource(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_what_is_no_plain_file_is_not_even_opened(root):
    """Nobody writes into the pipe: whoever opened it would wait for ever."""
    os.unlink(root / "step" / "model.safetensors")
    os.mkfifo(root / "step" / "pipe.safetensors")
    os.symlink("/dev/zero", root / "device")
    with opened_beneath(root, ".") as path:
        with pytest.raises(CheckpointError, match="not a regular file"):
            (path / "step/pipe.safetensors").read_text()
        with pytest.raises(CheckpointError, match="neither a safetensors file nor a directory"):
            SafetensorsSource(path / "step/pipe.safetensors")
        with pytest.raises(CheckpointError, match="not a regular file"):  # which is what an index may name
            SafetensorsSource(path / "step")
        with pytest.raises(CheckpointError, match="leads out"):
            (path / "device").read_bytes()


def test_sparse_and_huge_files_are_refused_before_they_are_read(root):
    step = root / "step"
    for name in ("model.safetensors", "adapter_config.json", "model.safetensors.index.json"):
        (step / name).touch()
        os.truncate(step / name, 1 << 40)
    with opened_beneath(root, "step") as path:
        with pytest.raises(CheckpointError, match=r"1099511627776 bytes, of which \d+ are on the disk"):
            weight_source(path)
        os.unlink(step / "model.safetensors")  # an index is read then
        with pytest.raises(CheckpointError, match="on the disk"):
            SafetensorsSource(path)
        with pytest.raises(CheckpointError, match="on the disk"):
            read_config(path, LoraConfig())
    (step / "done").write_bytes(b"x" * (beneath.MOST_TEXT + 1))
    with opened_beneath(root, "step") as path:
        with pytest.raises(CheckpointError, match="at most 8388608 are read"):
            (path / "done").read_bytes()
        with pytest.raises(CheckpointError, match="at most 4096 are read"):
            weight_source(path)


def test_files_that_take_long_to_parse_are_refused_before_they_are(root, monkeypatch):
    """Any number of small values, or of files; the interpreter can do nothing else meanwhile."""
    monkeypatch.setattr(beneath, "MOST_VALUES", 50)
    many = b'{"weight_map": [' + b"[]," * 25 + b"0]}"
    for name in ("model.safetensors", "model.safetensors.index.json", "adapter_config.json"):
        file = root / "step" / name
        file.write_bytes(many if file.suffix == ".json" else len(many).to_bytes(8, "little") + many)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        with opened_beneath(root, "step") as path, pytest.raises(CheckpointError, match=f"{name} holds about 5"):
            SafetensorsSource(path)
        os.unlink(root / "step" / name)
    with opened_beneath(root, "step") as path, pytest.raises(CheckpointError, match="at most 50 are read"):
        read_config(path, LoraConfig())
    for number in range(4):
        save_file({f"w{number}": torch.ones(1)}, root / "step" / f"{number}.safetensors")
    monkeypatch.setattr(beneath, "MOST_PARSED", 7 * 4096)  # the length and the header of three files, and no more
    with opened_beneath(root, "step") as path, pytest.raises(CheckpointError, match="more than 28672 bytes of indexes"):
        SafetensorsSource(path)


def test_a_folder_of_any_number_of_files_is_not_searched_to_its_end(root, monkeypatch):
    for number in range(5):
        (root / "step" / str(number)).touch()
    monkeypatch.setattr(beneath, "MOST_ENTRIES", 3)
    monkeypatch.setattr(allowed_paths, "MOST_ENTRIES", 3)
    with pytest.raises(RequestError, match="more than 3 files lie under"), opened_under(root, "step"):
        pass
    with pytest.raises(CheckpointError, match="step holds more than 3 files"), opened_beneath(root, "step") as path:
        list(path.iterdir())


def _header(tensors: dict) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


NESTED = ("[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000)


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "objects"])
@pytest.mark.parametrize("opened", [lambda root, name: contextlib.nullcontext(root / name), opened_beneath])
def test_what_is_nested_deeply_is_refused(root, opened, nested):
    for name in ("adapter_config.json", "model.safetensors.index.json"):
        (root / "step" / name).write_text(nested)
    header = f'{{"w": {nested}}}'.encode()
    (root / "step" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with opened(root, "step") as path:
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
            SafetensorsSource(path)
        with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
            read_config(path, LoraConfig())
        os.unlink(root / "step" / "model.safetensors")
        with pytest.raises(CheckpointError, match="is not an index of safetensors"):
            SafetensorsSource(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ((33 << 20).to_bytes(8, "little") + b"{}", "header would have 34603008 bytes"),
        (b"\x02", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "not a readable"),
        (_header({"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}), "not a readable"),
        (_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}), "not a readable"),
    ],
)
def test_headers_of_any_size_and_lengths_that_are_none(root, content, match):
    (root / "step" / "model.safetensors").write_bytes(content)
    with opened_beneath(root, "step") as path, pytest.raises(CheckpointError, match=match):
        SafetensorsSource(path)


@pytest.mark.parametrize("stored", [{"r": "x"}, {"r": 1e400}, {"target_modules": 7}], ids=str)
def test_a_configuration_of_no_adapter(root, stored):
    """One of these errors, which a server answers with 400."""
    (root / "step" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **stored}))
    with opened_beneath(root, "step") as path, pytest.raises((CheckpointError, AdapterError, ValueError)) as caught:
        read_config(path, LoraConfig())
    assert "adapter" in str(caught.value) or "lora" in str(caught.value).lower()
