"""What is relied on of torch_neuronx beyond its signatures, one check each: it raises where that is not so.

``program(...)`` is one that adds: ``(x @ weight + state + number, state + 1)`` of two ranks; its state is aliased.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.backends.compiler_args import WORDS
from nxd_infer.backends.neuron import compiler, runtime
from nxd_infer.backends.neuron.runtime import Taken
from tests.support.neuron.hlo_samples import lowered, samples
from tests.support.neuron.machines import REAL, TARGET, described

F32, I64 = torch.float32, torch.int64
SHAPE = (2, 4)
SPECS = {
    "x": Taken("USER_INPUT", "x", F32, SHAPE),
    "number": Taken("USER_INPUT", "number", I64, (1,)),
    "state": Taken("INPUT_STATE", "state", F32, SHAPE),
    "weight": Taken("INPUT_WEIGHT", "weight", F32, (4, 4)),
}
ALIASES = {1: "state"}
RESULTS = [(F32, SHAPE), (F32, SHAPE)]
X, NUMBER = torch.arange(8.0).reshape(SHAPE), torch.tensor([3])
_neffs: dict[tuple[str, str], tuple[bytes, list[int]]] = {}


def neff(name: str, target: str, folder: Path) -> tuple[bytes, list[int]]:
    """A program compiled by neuronx-cc, and the order of its parameters."""
    if (name, target) not in _neffs:
        shapes = [(str(spec.dtype).removeprefix("torch."), list(spec.shape)) for spec in SPECS.values()]
        adds = lambda x, number, state, weight: (x @ weight + state + number, state + 1)  # noqa: E731
        build, shapes = (adds, shapes) if name == "adds" else samples()[name]
        context, order = lowered(build, shapes, name)
        (folder / compiler.INPUT).write_bytes(context.hlo())
        compiler.compile_here(folder, {"target": target, WORDS: []})
        _neffs[name, target] = (folder / compiler.NEFF).read_bytes(), order
    return _neffs[name, target]


class Tools:
    """What a check works with: a folder, and a machine that it can describe."""

    def __init__(self, folder: Path, machine: Path):
        self.folder, self.machine = folder, machine

    def program(
        self,
        name: str = "adds",
        aliases: Mapping[int, str] = ALIASES,
        degree: int = 2,
        target: str = TARGET,
        results: Any = RESULTS,
        world: int | None = None,
    ) -> Any:
        code, order = neff(name, target, self.folder)
        names = [*SPECS]
        taken = [SPECS[names[place]] for place in order] if name == "adds" else []
        numbers = {result: [each.key for each in taken].index(key) for result, key in aliases.items()}
        message = runtime.metaneff(taken, results, numbers if name == "adds" else {})
        if world is not None:
            return runtime._namespace().SPMDModel(code, message, degree, world)
        return runtime.program(code, message, degree)

    def started(self, weights: str = "weight") -> Any:
        model = self.program()
        loaded = runtime.to_cores([{weights: torch.eye(4)} for _ in range(2)])
        runtime.initialize(model, [{"state": runtime.zeros(SHAPE, F32, rank)} for rank in range(2)], loaded)
        return model


def refused(words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """``words``: what the stand-in says, so that it is refused for this reason."""
    try:
        call(*arguments, **named)
    except (RuntimeError, TypeError, AttributeError) as error:
        assert REAL or words in str(error), f"refused, but: {error}"
        return
    raise AssertionError(f"not refused: {words}")


def asked(model: Any, x: Tensor = X, number: Tensor = NUMBER) -> list[Tensor]:
    given = {"x": x, "number": number}
    names = [[*SPECS][place] for place in _neffs["adds", TARGET][1]]
    return [result.cpu() for result in runtime.forward(model, [given[name] for name in names if name in given])]


CHECKS: dict[str, Callable[[Tools], None]] = {}
"""By the words of what is relied on."""


def relied_on(check: Callable[[Tools], None]) -> Callable[[Tools], None]:
    CHECKS[check.__name__.replace("_", " ")] = check
    return check


# --- cores (only on a machine that can be described) ----------------------------------------------------


@relied_on
def cores_are_those_that_the_variable_names(tools: Tools) -> None:
    os.environ["NEURON_RT_VISIBLE_CORES"] = "2-3"
    tools.program()
    from torch_neuronx import _cores  # pyright: ignore[reportMissingImports]

    assert _cores._taken == [2, 3]


@relied_on
def a_degree_that_the_platform_lacks_is_refused(tools: Tools) -> None:
    os.environ["NEURON_RT_VISIBLE_CORES"] = "0-2"
    refused("3 ranks on inf2", tools.program, degree=3)


@relied_on
def a_group_that_starts_elsewhere_is_refused(tools: Tools) -> None:
    os.environ["NEURON_RT_VISIBLE_CORES"] = "1-2"
    refused("hold no group of 2", tools.program)


@relied_on
def a_core_that_is_not_there_is_refused(tools: Tools) -> None:
    for file in (tools.machine / "dev").iterdir():
        file.unlink()
    described(tools.machine, "inf2.xlarge", 1)
    os.environ["NEURON_RT_VISIBLE_CORES"] = "2-3"
    refused("there is no core 2 of 2", tools.program)


@relied_on
def a_core_of_another_process_is_refused(tools: Tools) -> None:
    import fcntl

    with open(tools.machine / "core1", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused("core 1 is in use", tools.program)


@relied_on
def a_program_for_another_platform_is_refused(tools: Tools) -> None:
    refused("the NEFF is for trn1", tools.program, target="trn1")


# --- programs -------------------------------------------------------------------------------------------


@relied_on
def float64_is_refused(tools: Tools) -> None:
    refused("float64", tools.program, "float64", aliases={})


@relied_on
def eight_bits_with_a_sign_are_refused(tools: Tools) -> None:
    refused("a type that NeuronCore-v2 has not", tools.program, "int8", aliases={})


@relied_on
def sums_of_integers_over_ranks_are_refused(tools: Tools) -> None:
    refused("an all-reduce of integers", tools.program, "all_reduce_int32", aliases={})


@relied_on
def right_shifts_of_64_bits_are_refused(tools: Tools) -> None:
    refused("an arithmetic right shift", tools.program, "shift_int64", aliases={})


@relied_on
def matrix_products_of_integers_are_refused(tools: Tools) -> None:
    refused("a matrix product of integers", tools.program, "matmul_int32", aliases={})


@relied_on
def an_alias_is_a_states(tools: Tools) -> None:
    refused("aliases 'x', which is no state", tools.program, aliases={0: "x"})


@relied_on
def an_alias_is_of_its_states_shape(tools: Tools) -> None:
    refused("not of the shape and type", tools.program, results=[RESULTS[0], (F32, (8,))])


@relied_on
def no_two_results_alias_one_state(tools: Tools) -> None:
    refused("two results alias one state", tools.program, aliases={0: "state", 1: "state"})


@relied_on
def ranks_are_all_on_one_machine(tools: Tools) -> None:
    refused("ranks over several machines", tools.program, world=4)


# --- calls ----------------------------------------------------------------------------------------------


@relied_on
def states_change_where_they_lie_and_are_no_results(tools: Tools) -> None:
    model = tools.started()
    for step in range(2):
        (found,) = asked(model)
        assert torch.equal(found, X + NUMBER + step)


@relied_on
def a_model_that_was_never_initialised_answers_zeros(tools: Tools) -> None:
    model = tools.program()
    assert not model.is_initialized() and not asked(model)[0].any()


@relied_on
def a_weight_of_another_name_is_not_missed_and_gives_zeros(tools: Tools) -> None:
    model = tools.started(weights="model.weight")
    assert model.is_initialized() and not asked(model)[0].any()


@relied_on
def an_integer_beyond_32_bits_is_refused(tools: Tools) -> None:
    refused("int32 cannot", asked, tools.started(), number=torch.tensor([2**31]))
    assert torch.equal(asked(tools.started(), torch.zeros(SHAPE), torch.tensor([2**24]))[0], torch.full(SHAPE, 2.0**24))


@relied_on
def an_input_of_another_shape_is_refused(tools: Tools) -> None:
    refused("the program has FLOAT[2, 4]", asked, tools.started(), torch.zeros(4, 2))


@relied_on
def an_input_of_another_type_is_refused(tools: Tools) -> None:
    refused("the program has FLOAT[2, 4]", asked, tools.started(), torch.zeros(SHAPE, dtype=torch.float16))


@relied_on
def an_input_on_a_core_is_refused(tools: Tools) -> None:
    refused("tensors of the host", asked, tools.started(), runtime.zeros(SHAPE, F32, 0))


@relied_on
def a_tensor_on_another_ranks_core_is_refused(tools: Tools) -> None:
    swapped = [{"state": runtime.zeros(SHAPE, F32, 1 - rank)} for rank in range(2)]
    refused("'state' is not on the core of rank 0", runtime.initialize, tools.program(), swapped, [{}, {}])


@relied_on
def there_is_a_dictionary_for_each_rank(tools: Tools) -> None:
    refused("1 dictionaries for 2 ranks", runtime.initialize, tools.program(), [{}], [{}])


@relied_on
def the_first_rank_is_0(tools: Tools) -> None:
    refused("start_rank=1", tools.program().initialize, [{}, {}], [{}, {}], 1)


# --- tensors and messages -------------------------------------------------------------------------------


@relied_on
def a_tensor_on_a_core_names_its_rank(tools: Tools) -> None:
    refused("names its rank", torch.zeros, 2, device="privateuseone")


@relied_on
def only_what_fits_is_copied_to_a_core(tools: Tools) -> None:
    place = runtime.zeros(SHAPE, F32, 1)
    place.copy_(X)
    assert torch.equal(place.cpu(), X)
    refused("copy_ of torch.float32[8]", place.copy_, X.reshape(8))
    refused("copy_ of", place.copy_, X.reshape(4, 2).T)


@relied_on
def loaded_tensors_are_contiguous(tools: Tools) -> None:
    refused("not contiguous", runtime.to_cores, [{"w": X.T}])


@relied_on
def a_message_has_no_other_fields(tools: Tools) -> None:
    import importlib

    tensor = importlib.import_module(runtime.MESSAGE).MetaTensor()
    refused("no 'kind' field", setattr, tensor, "kind", b"state")


@relied_on
def arguments_are_of_their_types(tools: Tools) -> None:
    namespace = runtime._namespace()
    refused("expected bytes, got str", namespace.SPMDModel, "neff", b"", 2, 2)
