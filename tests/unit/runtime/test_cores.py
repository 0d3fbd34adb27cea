"""What a process may use of the processor: control groups of both kinds, cores that share a physical one, claims."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nxd_infer.runtime.supervisor import cores
from nxd_infer.util.machine import available_cores, compute_threads, physical_core, processor_share, processors
from tests.support.runtime.machines import machine as machine


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"sys/cpu.max": "max 100000"}, float("inf")),
        ("0::/pod/app", {"sys/pod/cpu.max": "400000 100000", "sys/pod/app/cpu.max": "50000 100000"}, 0.5),
        (
            "5:cpu,cpuacct:/docker/7f\n0::/",
            {"sys/cpu,cpuacct/cpu.cfs_quota_us": "300000", "sys/cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/", {"sys/cpu/cpu.cfs_quota_us": "-1", "sys/cpu/cpu.cfs_period_us": "100000"}, float("inf")),
    ],
)
def test_a_share_is_the_least_that_any_control_group_grants(tmp_path, groups, files, expected):
    written(tmp_path, {"cgroup": groups, **files})
    assert processor_share(tmp_path / "cgroup", tmp_path / "sys") == expected
    assert processor_share(tmp_path / "none", tmp_path) == float("inf")


def test_logical_cores_of_a_physical_one(tmp_path):
    written(tmp_path, {"cpu0/topology/core_cpus_list": "0,8", "cpu8/topology/thread_siblings_list": "0,8"})
    assert physical_core(0, tmp_path) == physical_core(8, tmp_path) == "0,8"
    assert physical_core(3, tmp_path) == "3"
    real = available_cores()
    assert 1 <= compute_threads() <= processors() <= len(real)


@pytest.mark.parametrize(("pair", "expected"), [("far", [7, 6, 5, 4]), ("near", [7, 5, 3, 1])])
def test_threads_get_a_physical_core_each_while_there_are_some(machine, pair, expected):
    machine(8, pair)
    assert cores.default_threads(1) == 4 and cores.default_threads(2) == 2 and cores.default_threads(8) == 1
    first = cores.choose_cores(2, 2)
    assert first == [expected[:2], expected[2:]]
    assert not set(cores.choose_cores(1, 4)[0]) & set(expected)  # then their other halves
    cores.release_cores(first)
    assert cores.choose_cores(1, 4) == [expected]


def test_models_of_one_process_share_the_cores_out(machine, monkeypatch):
    machine(4, "alone")
    first = cores.choose_cores(2, 1)
    assert first == [[3], [2]]  # low cores are left to the caller
    assert cores.choose_cores(1, 2) == [[1, 0]]  # another model gets what is free
    cores.release_cores(first)
    assert cores.choose_cores(2, 1) == [[3], [2]]
    assert cores.choose_cores(3, 2) == [[], [], []]  # more threads than cores: the kernel places them
    monkeypatch.setenv("NXD_INFER_PIN", "0")
    assert cores.choose_cores(1, 1) == [[]]
    assert cores.default_threads(1) == 4 and cores.default_threads(8) == 1
    assert cores.default_threads(2, 3) == 3  # what the graphs were compiled for


def test_first_threads_of_models_that_share_cores_have_different_ones(machine):
    machine(2, "alone")
    found = [cores.choose_cores(1, 2) for _ in range(3)]
    assert found == [[[1, 0]], [[0, 1]], [[1, 0]]]
    cores.release_cores(found[1])
    assert cores.choose_cores(1, 2) == [[0, 1]]
    assert cores.choose_cores(2, 1) == [[1], [0]]


def test_a_quota_bounds_the_threads_and_leaves_them_to_the_kernel(machine):
    machine(64, "far", share=2.5)
    assert cores.default_threads(1) == 2 and cores.default_threads(2) == 1
    assert cores.choose_cores(1, 2) == [[]]  # every container of the host would choose the same
    machine(4, "far", share=0.5)
    assert cores.default_threads(1) == 1
    machine(4, "far", share=4.0)
    assert cores.default_threads(1) == 2 and cores.choose_cores(1, 2) == [[3, 2]]


def test_a_place_that_is_somebody_elses_is_not_used(machine, tmp_path):
    machine(2, "far")
    (tmp_path / f"nxd-infer-cores-{os.getuid()}").symlink_to(tmp_path)
    assert cores.choose_cores(1, 2) == [[1, 0]]
    assert [path.name for path in tmp_path.iterdir()] == [f"nxd-infer-cores-{os.getuid()}"]
