"""torch_neuronx, the real one or the stand-in, keeps what is relied on; and where it does not, that is seen."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends.neuron import cores, runtime
from tests.integration.neuron.behaviour import CHECKS, Tools
from tests.integration.neuron.contract import FILE, contract
from tests.integration.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, neuron_machine

pytestmark = pytest.mark.skipif(not HAS_XLA, reason=NEEDS_XLA)
OF_A_MACHINE = [name for name in CHECKS if "core" in name or "platform" in name or "group" in name]
"""Those that need one that can be described as one likes, or look inside the stand-in."""

MUTATIONS = [
    (
        "_cores",
        'VARIABLE = "NEURON_RT_VISIBLE_CORES"',
        'VARIABLE = "NEURON_RT_CORES"',
        "cores are those that the variable names",
    ),
    ("_cores", "if ranks not in limits", "if False and limits", "a degree that the platform lacks is refused"),
    ("_cores", "or _taken[0] % ranks", "", "a group that starts elsewhere is refused"),
    ("_cores", "if core >= there", "if core > 99", "a core that is not there is refused"),
    ("_cores", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN", "a core of another process is refused"),
    ("_cores", "if target != platform", "if False", "a program for another platform is refused"),
    ("_executor", '    r"\\bf64\\[\\d": "NCC_ESPP004: float64",\n', "", "float64 is refused"),
    ("_executor", "(s8|s16|u16|c64|c128)", "(c64|c128)", "eight bits with a sign are refused"),
    ("_executor", "(s32|s64|u32|pred)", "(pred)", "sums of integers over ranks are refused"),
    ("_executor", "(s64|u8|u64)", "(u8)", "right shifts of 64 bits are refused"),
    ("_executor", "= (s32|s64)\\[[^=]* dot", "= (u8)\\[[^=]* dot", "matrix products of integers are refused"),
    ("_model", 'if into["type"] != "INPUT_STATE"', "if False", "an alias is a states"),
    (
        "_model",
        '(out["shape"], out["data_type"]) != (into["shape"], into["data_type"])',
        "False",
        "an alias is of its states shape",
    ),
    ("_model", "if len(set(taken)) != len(taken)", "if False", "no two results alias one state"),
    ("_model", "if world_size != local_ranks_size", "if False", "ranks are all on one machine"),
    ("_model", "state.host.copy_(results[result])", "pass", "states change where they lie and are no results"),
    ("_model", "if number not in self._aliases", "", "states change where they lie and are no results"),
    (
        "_model",
        "if self._states is None or not self._complete",
        "if self._states is None and self._run([])",
        "a model that was never initialised answers zeros",
    ),
    ("_model", "return self._states is not None", "return True", "a model that was never initialised answers zeros"),
    ("_model", "or not self._complete", "", "a weight of another name is not missed and gives zeros"),
    (
        "_model",
        "return self._states is not None",
        "return self._complete",
        "a weight of another name is not missed and gives zeros",
    ),
    ("_model", "> 2**31 - 1", "> 2**63 - 1", "an integer beyond 32 bits is refused"),
    ("_model", "> 2**31 - 1", "> 2**15 - 1", "an integer beyond 32 bits is refused"),
    ("_model", 'list(tensor.shape) != entry["shape"] or', "", "an input of another shape is refused"),
    (
        "_model",
        '"FLOAT": (torch.float32,)',
        '"FLOAT": (torch.float32, torch.float16)',
        "an input of another type is refused",
    ),
    ("_model", "isinstance(tensor, DeviceTensor) or tensor.device.type", '"cpu"', "an input on a core is refused"),
    ("_model", "or tensor.rank != rank", "", "a tensor on another ranks core is refused"),
    ("_model", "if len(given) != self._ranks", "if False", "there is a dictionary for each rank"),
    ("_model", "if start_rank != 0", "if False", "the first rank is 0"),
    ("_model", "if not isinstance(value, kind) or isinstance(value, bool)", "if False", "arguments are of their types"),
    ("_device", "if device is None or device.index is None", "if device is None", "a tensor on a core names its rank"),
    (
        "_device",
        "(source.shape, source.dtype) != (to.host.shape, to.host.dtype) or",
        "",
        "only what fits is copied to a core",
    ),
    ("_device", "or not source.is_contiguous()", "", "only what fits is copied to a core"),
    ("_device", "if not host.is_contiguous()", "if False", "loaded tensors are contiguous"),
    ("proto.metaneff_pb2", "if field not in self.FIELDS", "if False", "a message has no other fields"),
]
"""A module of the stand-in, a text in it, what stands there instead, and the check that sees it."""

SEEN = (AssertionError, KeyError, RuntimeError, StopIteration, TypeError, ValueError)
"""What a check may raise, which raises nothing without a change."""

LIMITS = [
    (("degrees", "inf2"), [1, 2, 3], "a degree that the platform lacks is refused"),
    (("degrees", "inf2"), [1, 4], "states change where they lie and are no results"),
    (("cores_a_device",), 4, "a core that is not there is refused"),
]
"""A limit of the contract that the stand-in reads, another value, and the check that sees it."""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    """On a machine of which this process has taken no core yet."""
    with neuron_machine(tmp_path / "machine", "inf2.24xlarge", 6):
        runtime.load()
        if REAL:
            cores.claim(2)
        else:
            os.environ[cores.VISIBLE] = "0-1"
            give_back()
        yield Tools(tmp_path, tmp_path / "machine")
        if not REAL:
            give_back()


def stand_in(module: str) -> types.ModuleType:
    return importlib.import_module(f"torch_neuronx.{module}")


def give_back() -> None:
    taken: Any = stand_in("_cores")
    for file in taken._files:
        os.close(file)
    taken._files.clear()
    taken._taken.clear()


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_kept(name: str, tools: Tools) -> None:
    if REAL and name in OF_A_MACHINE:
        pytest.skip("it needs a machine that can be described as one likes")
    CHECKS[name](tools)


def mutate(module: types.ModuleType, old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    """Give the functions and constants of ``module`` what they would be with ``new`` in place of ``old``."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module.__name__}"
    other = types.ModuleType(module.__name__)
    other.__file__ = module.__file__
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), vars(other))
    exchange(module, other, patch)


def exchange(here: Any, other: Any, patch: pytest.MonkeyPatch) -> None:
    for name, value in vars(other).items():
        own = vars(here).get(name)
        value, own = (getattr(each, "__func__", each) for each in (value, own))
        if isinstance(own, types.FunctionType) and isinstance(value, types.FunctionType):
            patch.setattr(own, "__code__", value.__code__)
        elif isinstance(own, type) and own.__module__ == getattr(here, "__name__", ""):
            exchange(own, value, patch)
        elif name.strip("_").isupper():
            patch.setattr(here, name, value)


@pytest.mark.skipif(REAL, reason="it changes the stand-in")
@pytest.mark.parametrize(("module", "old", "new", "check"), MUTATIONS)
def test_a_change_of_the_stand_in_is_seen(
    module: str, old: str, new: str, check: str, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_processes(check, monkeypatch)
    mutate(stand_in(module), old, new, monkeypatch)
    with pytest.raises(SEEN):
        CHECKS[check](tools)


@pytest.mark.skipif(REAL, reason="it changes the stand-in")
@pytest.mark.parametrize(("path", "value", "check"), LIMITS)
def test_a_change_of_a_limit_is_seen(
    path: tuple[str, ...], value: Any, check: str, tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_processes(check, monkeypatch)
    other = contract()
    *way, last = path
    inner = other["limits"]
    for key in way:
        inner = inner[key]
    inner[last] = value
    (tmp_path / FILE.name).write_text(json.dumps(other))
    monkeypatch.setattr(stand_in("_cores"), "CONTRACT", tmp_path / FILE.name)
    with pytest.raises(SEEN):
        CHECKS[check](tools)


def without_processes(check: str, patch: pytest.MonkeyPatch) -> None:
    """What is let through is not loaded or run: torch_xla ends its process over inputs that do not fit."""
    if check in OF_A_MACHINE:
        patch.setattr(stand_in("_executor"), "load", lambda hlo, ranks: (ranks, 0))
    if "input" in check:
        patch.setattr(stand_in("_executor"), "run", ran)


def ran(program: Any, ranks: Any) -> Any:
    raise AssertionError("it ran")


@pytest.mark.skipif(REAL, reason="it changes the stand-in")
def test_every_check_has_a_change_that_it_sees() -> None:
    assert {check for *_, check in MUTATIONS} == {*CHECKS}
