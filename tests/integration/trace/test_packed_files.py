"""Artifacts whose files hold weights as graphs read them: mapped as they are, the same numbers, swapped, refused."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.artifact.manifest import weight_name
from nxd_infer.backends import registry
from nxd_infer.backends.cpu.encodings import PACKED, PACKED_ACROSS, PACKED_INT8, PACKED_STORED
from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError, TraceConfigError, TraceError
from nxd_infer.ops import int4, packed
from nxd_infer.runtime.load import load_artifact
from tests.support.backends import packed_models, small_traces
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import installed
from tests.support.needs import needs_native
from tests.support.processes import parent_of, wait_until
from tests.support.shared import shared

pytestmark = needs_native
TOKENS = torch.tensor([[1, 5, 63], [0, 7, 32]])
ROWS = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
KINDS: dict[str, tuple[Any, ...]] = {
    "tied": (packed_models.tied, TOKENS, packed_models.tied_weights, {"tp_degree": 2}),
    "int8": (packed_models.tied, TOKENS, packed_models.tied_weights, {"tp_degree": 2, "quantize": "int8"}),
    "int4": (packed_models.tied, TOKENS, packed_models.tied_weights, {"tp_degree": 2, "quantize": "int4-asym"}),
    "stages": (packed_models.chain, ROWS, packed_models.chain_weights, {"pp_degree": 2, "pipeline_cuts": ["0"]}),
    "forms": (packed_models.forms, ROWS, packed_models.forms_weights, {}),
}
ENCODINGS = {
    "tied": {PACKED},
    "int8": {PACKED_INT8},
    "int4": {PACKED_INT8, "packed32-int4-asym"},
    "stages": {PACKED},
    "forms": {PACKED, PACKED_ACROSS, PACKED_STORED},
}


def trace(kind: str, **more: Any) -> Any:
    func, example, weights, options = KINDS[kind]
    return small_traces.trace(func, example, weights, compiler_args={"nxd_packed": 1}, **options, **more)


def artifact(kind: str, packed: bool = True) -> Path:
    """Traced once; no test changes it."""
    name = f"packed-files/{kind}-{packed}"
    return (
        shared(name, lambda folder: trace(kind, packed=packed, artifact_dir=folder / "artifact").close()) / "artifact"
    )


def load(path: Path) -> Any:
    return nxd.trace.parallel_model_load(path, in_process=False)


def by_reference(encoding: str, plain: Tensor) -> Tensor:
    """What PyTorch packs."""
    if encoding in (PACKED_INT8, PACKED_STORED):
        return packed.pack_int8(plain)
    if encoding == "packed32-int4-asym":
        return int4.pack(plain, 32, True)
    return packed.pack(plain.mT.contiguous() if encoding == PACKED_ACROSS else plain)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_hold_what_graphs_read_and_ranks_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    example, weights = KINDS[kind][1:3]
    plain, other = (load_artifact(artifact(kind, packed)).manifest for packed in (False, True))
    assert other.graphs == plain.graphs and other.weight_schema == plain.weight_schema
    encodings = {spec.name: spec.encoding for spec in other.weights if spec.encoding}
    assert set(encodings.values()) == ENCODINGS[kind]
    assert "packed-files" in other.requires and "packed-files" not in plain.requires
    for rank in range(other.world_size):
        before, after = (load_file(artifact(kind, packed) / weight_name(rank)) for packed in (False, True))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            held = by_reference(encodings[name], tensor) if name in encodings else tensor
            assert torch.equal(after[name], held), name
    with load(artifact(kind, False)) as first, load(artifact(kind)) as model:
        assert torch.equal(model(example), first(example))
        for each in (first, model):
            each.update_weights(weights(5))
        new = first(example)
        assert torch.equal(model(example), new) and torch.equal(model.restart()(example), new)
        nxd.trace.parallel_model_save(model, tmp_path / "saved")
    assert load_artifact(tmp_path / "saved").manifest.packed == other.packed
    with load(tmp_path / "saved") as saved:
        assert torch.equal(saved(example), new)


def written_pages(file: Path) -> list[int]:
    """KiB of each of this process's mappings of a file that are copies, because they were written to."""
    found, here = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(file))
        elif here and line.startswith("Anonymous:"):
            found.append(int(line.split()[1]))
    return found


def test_no_rank_copies_or_writes_to_the_pages_that_it_maps() -> None:
    path, weights = artifact("forms"), packed_models.forms_weights(5)
    with nxd.trace.parallel_model_load(path) as model:
        before = model(ROWS)
        pages = written_pages(path / weight_name(0))
        assert pages and not any(pages)
        model.update_weights({"up": weights["up"]}, strict=False)
        model.update_weights({"up": weights["up"], "across": weights["across"]}, strict=False)
        after = model(ROWS)
        assert not torch.equal(after, before) and not any(written_pages(path / weight_name(0)))
    with nxd.trace.parallel_model_load(path) as again:
        assert torch.equal(again(ROWS), before), "the file is as it was"
        again.update_weights({"up": weights["up"], "across": weights["across"]}, strict=False)
        assert torch.equal(again(ROWS), after)


def test_a_lost_rank_of_two_threads_starts_again_without_a_new_import() -> None:
    """It is a fork of the process that imported torch for the first one."""
    with nxd.trace.parallel_model_load(artifact("forms"), threads_per_rank=2) as model:
        before, first = model(ROWS), model.health()[0].pid
        assert first is not None
        server = parent_of(first)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: model.failure is not None)
        assert torch.equal(model.restart()(ROWS), before)
        again = model.health()[0].pid
        assert again not in (None, first) and parent_of(again) == server != os.getpid()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    for number, keep in enumerate((-1, 1000)):
        path = small_traces.copied(artifact("tied"), tmp_path / str(number))
        file = path / weight_name(1)
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data[:keep] if keep > 0 else data)
        with pytest.raises(ArtifactCorruptError, match=rf"{weight_name(1)} of .* is (altered|truncated)"):
            load_artifact(path)


def test_a_form_that_is_not_known_here_or_not_the_encodings_is_refused_by_name(tmp_path: Path) -> None:
    path = small_traces.copied(artifact("tied"), tmp_path / "unknown")
    with changed(path) as manifest:
        next(spec for spec in manifest["weights"] if spec["name"] == "up.weight")["encoding"] = "packed64"
    with pytest.raises(ArtifactVersionError, match=r"reads the weight 'up.weight' as 'packed64', an encoding that"):
        load_artifact(path)
    path = small_traces.copied(artifact("int8"), tmp_path / "other")
    with changed(path) as manifest:
        next(spec for spec in manifest["weights"] if spec["name"] == "up.weight")["encoding"] = PACKED
    with pytest.raises(nxd.errors.RankFailedError, match=r"'up.weight' is packed as int8.* and 'packed32' of it is"):
        load(path).start()
    for field, value, text in (
        ("requires", [], "packed weights without requiring 'packed-files'"),
        ("packed", [{"name": "norm", "dtype": "float32", "shape": [32], "stride": [1]}], "'norm' has no encoding"),
        ("packed", [], "'down.weight' is I8"),
    ):
        path = small_traces.copied(artifact("int8"), tmp_path / text[:8])
        with changed(path) as manifest:
            manifest[field] = value
        with pytest.raises(ArtifactCorruptError, match=text):
            load_artifact(path)


def test_graphs_made_again_read_the_same_form_or_are_refused(tmp_path: Path) -> None:
    out, recompile = tmp_path / "out", nxd.trace.parallel_model_recompile
    recompile(artifact("int8"), out, compiler_args={"nxd_packed": 1})
    first, again = (load_artifact(path).manifest for path in (artifact("int8"), out))
    assert again.packed == first.packed and again.files[weight_name(1)] == first.files[weight_name(1)]
    with pytest.raises(TraceError, match=r"holds '.*weight' packed as 'packed32', .* would read 'the plain weight'"):
        recompile(artifact("tied"), out, compiler_args={"nxd_packed": False})


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with installed(), pytest.raises(TraceConfigError, match="packed=True: the lockstep backend reads weights as files"):
        assert not registry.get("lockstep").encodings
        small_traces.trace(packed_models.tied, TOKENS, packed_models.tied_weights, backend="lockstep", packed=True)
    with pytest.raises(TraceConfigError, match="serialization_path writes plain weights"):
        trace("tied", packed=True, spmd_mode=True, serialization_path=tmp_path)
