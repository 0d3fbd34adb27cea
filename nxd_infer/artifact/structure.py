"""Check a manifest's consistency: its depth, its references, and that the needed files are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import BUCKET_KERNEL_REQUIREMENT, PIPELINE_REQUIREMENT, BucketSpec, Manifest
from nxd_infer.artifact.names import BUCKET_KERNEL_NAME, weight_name
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.util.reading import MOST_LEVELS


def require_flat(value: Any, what: Path) -> None:
    """Raise ArtifactCorruptError if the JSON of the file ``what`` is nested deeper than anything we write."""
    level = [value]
    for _ in range(MOST_LEVELS):
        held = [item for item in level if isinstance(item, dict | list)]
        level = [inner for item in held for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ArtifactCorruptError(f"{what} is damaged: it is nested more than {MOST_LEVELS} levels deep")


def check_structure(path: Path, manifest: Manifest) -> None:
    """Check what the rest of the package relies on: every reference resolves, every needed file is listed."""
    problems: list[str] = []
    if manifest.tp_degree < 1:
        problems.append(f"tp degree {manifest.tp_degree}")
    if manifest.pp_degree < 1:
        problems.append(f"pp degree {manifest.pp_degree}")
    elif manifest.pp_degree > 1 and PIPELINE_REQUIREMENT not in manifest.requires:
        problems.append(f"pp degree {manifest.pp_degree} without requiring {PIPELINE_REQUIREMENT!r}")
    if not manifest.buckets:
        problems.append("no buckets")
    names = [bucket.name for bucket in manifest.buckets]
    problems += [f"bucket {name!r} twice" for name in sorted({name for name in names if names.count(name) > 1})]
    states = {state.name for state in manifest.states}
    weights = {weight.name for weight in manifest.weights}
    for bucket in manifest.buckets:
        if len(bucket.graphs) != manifest.world_size:
            problems.append(f"bucket {bucket.name!r} has {len(bucket.graphs)} graphs for {manifest.world_size} ranks")
        problems += _stage_problems(bucket, manifest.pp_degree)
        problems += [f"graph {g} of bucket {bucket.name!r}" for g in bucket.graphs if g not in manifest.graphs]
        named = set() if bucket.structure is None else set(_names_in(bucket.structure))
        strange = sorted(named - {output.name for output in bucket.outputs})
        problems += [f"output {name!r} of bucket {bucket.name!r}" for name in strange]
    for key, graph in manifest.graphs.items():
        problems += [f"state {name!r} of graph {key}" for name in graph.states if name not in states]
        problems += [f"weight {name!r} of graph {key}" for name in graph.weights if name not in weights]
        if not any(name.startswith(f"graphs/{key}/") for name in manifest.files):
            problems.append(f"no file of graph {key}")
    ranks = range(0 if problems else manifest.world_size)  # the degree may be trusted only without problems
    needed = [weight_name(rank) for rank in ranks] + [f"ops/{op}.so" for op in manifest.ops]
    if BUCKET_KERNEL_REQUIREMENT in manifest.requires:
        needed.append(BUCKET_KERNEL_NAME)
    problems += [f"file {name} is not listed" for name in needed if name not in manifest.files]
    if problems:
        raise ArtifactCorruptError(f"{path} does not hold together: {'; '.join(problems[:5])}")


def _stage_problems(bucket: BucketSpec, stages: int) -> list[str]:
    """Return what keeps the stages of a bucket from handing one another what they need."""
    if len(bucket.stages) != (stages if stages > 1 else 0):
        return [f"bucket {bucket.name!r} has {len(bucket.stages)} stages for a pipeline of {stages}"]
    outputs = [spec.name for spec in bucket.outputs]
    handed = [spec.name for spec in bucket.handed]
    known: list[str] = []
    problems = []
    for number, stage in enumerate(bucket.stages):
        unmade = [name for name in stage.takes if name not in known or name not in handed]
        problems += [f"stage {number} of bucket {bucket.name!r} takes {name!r}" for name in unmade]
        known += stage.gives
    if bucket.stages and sorted(known) != sorted([*outputs, *handed]):
        problems.append(f"the stages of bucket {bucket.name!r} do not give each output and handed value once")
    return problems


def _names_in(structure: Any) -> list[str]:
    """Return the output names in a bucket's structure, and invalid entries as text."""
    if not isinstance(structure, dict | list):
        return [str(structure)]
    return [n for entry in (structure.values() if isinstance(structure, dict) else structure) for n in _names_in(entry)]
