"""One rank's tensors on its NeuronCore, which keep their memory there: new values are copied into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from nxd_infer.backends.hlo.placement import Cell, as_parameter
from nxd_infer.backends.neuron import runtime


class CoreCell(Cell):
    """A tensor that lives on the host until it is loaded (:func:`load_weights`), and in one place on a core then."""

    on_core = False

    def put(self, tensor: Tensor) -> None:
        if self.on_core:
            self.value.copy_(tensor.reshape(self.value.shape).contiguous())
        else:
            self.value = tensor

    def on_host(self) -> Tensor:
        return self.value.cpu().reshape(self.shape) if self.on_core else self.value

    def live_in(self, tensor: Tensor) -> None:
        self.value, self.on_core = tensor, True


def load_weights(ranks: Sequence[Mapping[str, Cell]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Copy to the cores what is not there yet of these cells, which are the same ones for every rank; ``shapes`` are
    those that the program takes them in."""
    missing = [name for name, cell in ranks[0].items() if not _core(cell).on_core]
    if missing:
        host = [{name: rank[name].value.reshape(shapes[name]).contiguous() for name in missing} for rank in ranks]
        for loaded, rank in zip(runtime.to_cores(host), ranks, strict=True):
            for name in missing:
                _core(rank[name]).live_in(loaded[name])


def load_states(rank: int, cells: Iterable[Cell]) -> None:
    """Give states memory on the core of ``rank``, with the values that they have here."""
    for cell in map(_core, cells):
        if not cell.on_core:
            first = as_parameter(cell.value)
            cell.live_in(runtime.zeros(first.shape, first.dtype, rank))
            cell.put(first)


def _core(cell: Cell) -> CoreCell:
    assert isinstance(cell, CoreCell)
    return cell
