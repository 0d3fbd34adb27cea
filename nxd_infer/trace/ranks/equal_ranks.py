"""Ranks whose graphs are equal are exported once.

All ranks are built the same way. If Python code could not tell a rank's module from that of the first rank, and
neither ``func`` nor ``forward`` has read the rank as a number, both have the same graphs: only the values of
parameters, buffers and states differ. In doubt a rank is exported by itself.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from nxd_infer.context import Axis, ParallelContext
from nxd_infer.graph.likeness import alike
from nxd_infer.layout.shard import named_tensors
from nxd_infer.parallel_layers.mappings import Elements
from nxd_infer.trace.ranks.rank_graphs import Built, RankGraphs, is_symbolic


class Watch:
    """Whether something has read the rank: while ``tracing`` anything, else code that may tell others."""

    def __init__(self) -> None:
        self.tracing = False
        self.read = False

    def note(self) -> None:
        self.read = self.read or self.tracing or not _read_by_a_layer()


def _read_by_a_layer() -> bool:
    """Return whether a layer of ours asks for the rank, to find its part of a tensor, and not for somebody else."""
    frame = sys._getframe(2)
    name = __name__
    while frame is not None and (name in _HAND_ON or frame.f_code.co_name == "rank"):  # the layers' property
        frame = frame.f_back
        name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.startswith(_LAYERS)


_HAND_ON = (__name__, "nxd_infer.context")
_LAYERS = ("nxd_infer.parallel_layers.", "nxd_infer.modules.", "nxd_infer.distributed.")


class _Watched:
    """A description of the rank that notes when the rank is read. A copy is the same object, so that it notes it, too;
    a pickle holds the plain description."""

    watch: Watch
    plain: type
    says: tuple[str, ...]
    """Attributes that differ between the ranks."""

    @classmethod
    def of(cls, plain: Any, watch: Watch) -> Any:
        own = cls(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
        vars(own)["watch"] = watch
        return own

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).says:
            self.watch.note()
        return super().__getattribute__(name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        return self.plain, tuple(vars(self)[field.name] for field in dataclasses.fields(self.plain))


class WatchedContext(_Watched, ParallelContext):
    """A rank's context. One that other code makes of it (``dataclasses.replace``) has a watch that nobody asks, but its
    maker has read the rank."""

    watch = Watch()
    plain = ParallelContext
    says = ("rank", "collectives")

    def axis(self, name: str) -> Axis:
        return _WatchedAxis.of(self.layout.axis(name, vars(self)["rank"]), self.watch)


class _WatchedAxis(_Watched, Axis):
    watch = Watch()
    plain = Axis
    says = ("rank", "ranks")


_FREE = (_Watched, Elements)
"""Elements describe gradients: export does not read them."""


class EqualRanks:
    """The first rank's graphs, for the ranks that have the same."""

    def __init__(self) -> None:
        self._built: list[Built] = []
        self._stages: list[RankGraphs] = []

    @property
    def kept(self) -> bool:
        return bool(self._stages)

    def keep(self, built: list[Built], watch: Watch, stages: list[RankGraphs]) -> None:
        """Keep the graphs of a rank that has been traced, if they may be those of others."""
        if not self._stages and not watch.read:
            self._built, self._stages = built, stages

    def of(self, built: list[Built], watch: Watch) -> list[RankGraphs]:
        """Return the kept graphs with the values of ``built``; [] if its graphs may differ."""
        if not self._stages or watch.read or not _equal(self._built, built):
            return []
        return [dataclasses.replace(graphs, built=built, _tensors={}) for graphs in self._stages]


def _equal(first: list[Built], other: list[Built]) -> bool:
    """Return whether two ranks have the same graphs. Not known if there are several modules, which share their weights
    by values."""
    if any(built is not ranks[0] for ranks in (first, other) for built in ranks):
        return False
    pairs = alike(first[0], other[0], _FREE)
    if pairs is None:
        return False
    registered = {id(tensor) for tensor in named_tensors(first[0].module).values()}
    constants = [pair for pair in pairs if id(pair[0]) not in registered]
    return all(not is_symbolic(a) and not is_symbolic(b) and torch.equal(a, b) for a, b in constants)
