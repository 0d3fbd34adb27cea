"""Small HLO modules as torch_xla writes them: those that break a limit of Neuron's, and those that break none.

``python -m tests.support.neuron.hlo_samples`` writes them anew beside this file, where torch_xla 2.9 is installed;
the tests of the lint read them everywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("hlo")
GROUPS = [[0, 1]]


def made(name: str) -> str:
    """The module ``name`` as protobuf's JSON, from torch_xla."""
    build, shapes = samples()[name]
    return lowered(build, shapes, name)[0].hlo_json()


def lowered(build: Callable[..., Any], shapes: list[tuple[str, list[int]]], name: str) -> tuple[Any, list[int]]:
    """torch_xla's module ``name``, and which of ``shapes`` (dtypes and shapes) each of its parameters is."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
    import torch
    import torch_xla

    xla: Any = torch_xla._XLAC
    device = torch_xla.device()
    xla._set_xla_all_numbers_special_scalars(True)
    xla._set_all_reduce_token(str(device), None)
    given = [torch.zeros(shape, dtype=getattr(torch, dtype)).to(device) for dtype, shape in shapes]
    results = build(*given)
    context = xla.lowering.LoweringContext(name)
    context.build(list(results) if isinstance(results, tuple) else [results])
    places = {context.tensor_parameter_id(tensor): place for place, tensor in enumerate(given)}
    return context, [
        places[number] for number in sorted(context.device_parameter_id_tensor_mapping()) if number in places
    ]


def stored(name: str) -> str:
    return (FOLDER / f"{name}.json").read_text()


def plain(text: str) -> Any:
    """A module without what says where it came from."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            dropped = ("metadata", "stackFrameIndex", "frontendAttributes")
            return {key: without(entry) for key, entry in value.items() if key not in dropped}
        return [without(entry) for entry in value] if isinstance(value, list) else value

    return without(json.loads(text))


def samples() -> dict[str, tuple[Callable[..., Any], list[tuple[str, list[int]]]]]:
    """By name: what computes it, and the dtypes and shapes of its parameters."""
    import torch
    import torch.nn.functional as F

    try:
        import torch_xla
        import torch_xla.core.xla_model as xm
    except ImportError:  # whoever only wants their names
        torch_xla = xm = None
    xm_: Any = xm
    xla: Any = torch_xla

    def all_reduce(x: Any) -> Any:
        """Not xla_model's: among one rank alone that one does nothing."""
        return xla._XLAC._xla_all_reduce("sum", x, 1.0, GROUPS, False)

    def written(state: Any, new: Any, place: Any) -> Any:
        own = state.clone()
        own.index_put_((place,), new)
        return own

    def reads_new(state: Any, new: Any, place: Any) -> Any:
        own = written(state, new, place)
        return own.sum(0), own

    def reads_for_nothing(state: Any, new: Any) -> Any:
        own = state.clone()
        view = own.narrow(0, 0, 4).narrow(1, 0, 3)
        updated = view + new
        view.copy_(updated)
        return updated.sum(0), own

    def reads_old(state: Any, new: Any, place: Any) -> Any:
        own = written(state, new, place)
        return (state * 2).sum(0), own

    return {
        # --- that break a limit ---
        "float64": (lambda x: x.double().exp().float(), [("float32", [2])]),
        "int8": (lambda x: (x.to(torch.int8) * 2).float(), [("float32", [4])]),
        "complex64": (lambda x: torch.view_as_complex(x).abs(), [("float32", [4, 2])]),
        "topk_int32": (lambda x: torch.topk(x, 2)[0], [("int32", [2, 8])]),
        "sort_int64": (lambda x: torch.sort(x)[0], [("int64", [2, 8])]),
        "shift_int64": (torch.bitwise_right_shift, [("int64", [8]), ("int64", [8])]),
        "scatter_add_int32": (
            lambda x, i: torch.zeros(2, 8, dtype=torch.int32, device=x.device).scatter_add(1, i, x),
            [("int32", [2, 4]), ("int64", [2, 4])],
        ),
        "all_reduce_int32": (all_reduce, [("int32", [2, 4])]),
        "reduce_scatter_int32": (
            lambda x: xm_.reduce_scatter(xm_.REDUCE_SUM, x, 1.0, 0, 2, groups=GROUPS, pin_layout=False),
            [("int32", [4, 4])],
        ),
        "matmul_int32": (lambda x, y: x @ y, [("int32", [2, 4]), ("int32", [4, 4])]),
        "constant_64_bits": (lambda x: x + (1 << 40), [("int64", [4])]),
        "gather_outside": (lambda x: x[torch.arange(5, 12, device=x.device)], [("float32", [8, 4])]),
        "scatter_outside": (
            lambda x, v: x.index_put((torch.arange(5, 12, device=x.device),), v),
            [("float32", [8, 4]), ("float32", [7, 4])],
        ),
        "reads_old": (reads_old, [("float32", [4, 3]), ("float32", [1, 3]), ("int64", [1])]),
        # --- that break none ---
        "linear": (lambda x, w: F.linear(x, w).relu() + 1.0, [("float32", [2, 4]), ("float32", [4, 4])]),
        "all_reduce": (all_reduce, [("float32", [2, 4])]),
        "all_gather_int64": (
            lambda x: xm_.all_gather(x, dim=1, groups=GROUPS, pin_layout=False),
            [("int64", [2, 4])],
        ),
        "topk": (lambda x: torch.topk(x, 2), [("float32", [2, 8])]),
        "embedding": (lambda w, i: F.embedding(i, w), [("float32", [8, 4]), ("int64", [2])]),
        "scatter_add": (
            lambda x, i: torch.zeros(2, 8, device=x.device).scatter_add(1, i, x),
            [("float32", [2, 4]), ("int64", [2, 4])],
        ),
        "gather_inside": (lambda x: x[torch.arange(5, 8, device=x.device)], [("float32", [8, 4])]),
        "gather_from_the_end": (lambda x: x[torch.arange(-3, 0, device=x.device)], [("float32", [8, 4])]),
        "number_of_float64": (lambda x: x.masked_fill(x > 0, 0.5), [("float32", [2, 4])]),
        "reads_for_nothing": (reads_for_nothing, [("float32", [4, 3]), ("float32", [1, 3])]),
        "reads_new": (reads_new, [("float32", [4, 3]), ("float32", [1, 3]), ("int64", [1])]),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for sample in samples():
        (FOLDER / f"{sample}.json").write_text(json.dumps(plain(made(sample)), separators=(",", ":")) + "\n")
