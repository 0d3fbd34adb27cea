"""A reference checkpoint, open for reading. For its files see :mod:`nxd_infer.checkpoint.neuronx.folder`.

These files hold each rank's tensors but not their layouts. The layouts come from the model that is loaded
(:meth:`ReferenceArchive.know`), or offline from a model's configuration, from rules, or from the tensors themselves
(:mod:`nxd_infer.checkpoint.neuronx.layouts`). With them such a checkpoint works like any other. ZeRO-1 states are
those of ``torch_xla``'s optimizer: of each parameter, padded along its first dimension, one of ``dp`` equal parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.neuronx.folder import MARK, Place, files_of_ranks
from nxd_infer.context import AXES
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import DictSource, ParamLayout, duplicates
from nxd_infer.layout.files.one_rank import read_rank
from nxd_infer.layout.files.pickles import read_pickle
from nxd_infer.layout.flat import slices_of
from nxd_infer.layout.merge import Shard
from nxd_infer.optimizer.sharded_files import MASTER


class ReferenceArchive:
    """A reference checkpoint, open for reading: like an Archive, once its layouts are known.

    Raises CheckpointError if a rank's file is missing or exists twice.
    """

    def __init__(self, folder: Path):
        self.where, self._folder = str(folder), folder
        # What parallel_layers.save wrote is flat.
        self._flat = not (folder / MARK).exists() and not (folder / "model").is_dir()
        self._model = files_of_ranks(folder if self._flat else folder / "model")
        self._optimizer = self._model if self._flat else files_of_ranks(folder / "optim")
        places = [*self._model, *self._optimizer]
        dp, tp, pp = (1 + max((place[axis] for place in places), default=0) for axis in range(3))
        self.degrees: dict[str, int] = {**dict.fromkeys(AXES, 1), "dp": dp, "tp": tp, "pp": pp}
        self._require_all("model", self._model, 1)
        self._require_all("optimizer", {} if self._flat else self._optimizer, dp)
        self._states: dict[Path, Any] = {}
        self._layouts: dict[str, ParamLayout] | None = None
        self._names: list[str] = []
        self._groups: list[list[str]] = []

    def _require_all(self, what: str, ranks: Mapping[Place, Path], dp: int) -> None:
        places = itertools.product(range(dp), range(self.degrees["tp"]), range(self.degrees["pp"]))
        if lacking := [place for place in places if ranks and place not in ranks]:
            names = [f"dp_rank_{d:02d}_tp_rank_{t:02d}_pp_rank_{p:02d}" for d, t, p in lacking[:8]]
            raise CheckpointError(
                f"{self.where} lacks the {what} of {len(lacking)} rank(s): {', '.join(names)}; restore the files"
            )

    # --- what the files hold --------------------------------------------------------------------------

    def _load(self, path: Path) -> Any:
        if path not in self._states:
            self._states[path] = read_rank(path, mapped=True)[0]
        return self._states[path]

    def _state(self, ranks: Mapping[Place, Path], place: Place, key: str) -> Any:
        """Return the model or optimizer that a rank saved."""
        path = ranks[place]
        value = self._load(path)
        inner = value.get(key) if isinstance(value, Mapping) else None
        if inner is None and (not self._flat or (key == "model" and _has_tensors(value))):
            inner = value
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{path} holds no {key!r} state; it holds {type(value).__name__} {_keys(value)}")
        return _as_optimizer(inner, path) if key == "optimizer" else inner

    def _has_optimizer(self) -> bool:
        if not self._flat or not self._optimizer:
            return bool(self._optimizer)
        value = self._load(self._optimizer[0, 0, 0])
        return isinstance(value, Mapping) and "optimizer" in value

    def stages(self) -> Iterator[list[Mapping[str, Tensor]]]:
        """Yield, per pipeline stage, the model's tensors of every tensor-parallel rank. Raises CheckpointError."""
        if not self._model:
            raise CheckpointError(f"{self.where} holds no model; it was saved without")
        for pp in range(self.degrees["pp"]):
            ranks = [self._state(self._model, (0, tp, pp), "model") for tp in range(self.degrees["tp"])]
            yield [
                {name: item for name, item in rank.items() if isinstance(name, str) and isinstance(item, Tensor)}
                for rank in ranks
            ]

    # --- interface of Archive --------------------------------------------------------------------------------

    def know(
        self,
        layouts: Mapping[str, ParamLayout],
        optimizer_names: Sequence[str] = (),
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        """Set the layouts of the parameters, by name, and the order of the optimizer's parameters.

        ``groups``: the names of each group's, those of other pipeline stages included.
        """
        self._layouts = {**one_by_one(layouts), **layouts}
        self._names = list(optimizer_names)
        self._groups = [list(names) for names in groups]

    def verify(self, kinds: Iterable[str], share: int = 0, of: int = 1) -> None:
        """Do nothing: these files have no checksums (except those that are zip files, which check each tensor)."""

    def open(self, kinds: Iterable[str]) -> None:
        """Do nothing: the reference writes its files in place."""

    def replaced(self) -> bool:
        """Like :meth:`Archive.replaced`; its files have no mark that would tell."""
        return False

    def parts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Like :meth:`Archive.parts`; there is one."""
        if kind == "model" and self._model:
            yield 0, {"pieces": {}}
        if kind == "optimizer" and self._has_optimizer():
            state = self._state(self._optimizer, (0, 0, 0), "optimizer")
            groups = [{key: item for key, item in group.items() if key != "params"} for group in state["param_groups"]]
            yield 0, {"pieces": {}, "param_groups": groups}

    def value(self, rank: int, kind: str) -> Any:
        """Like :meth:`Archive.value`, for ``"values"``."""
        if self._flat:
            state = self._load(self._model[0, 0, 0])
            if not isinstance(state, Mapping) or ("model" not in state and _has_tensors(state)):
                state = {}
            rest = {key: item for key, item in state.items() if key not in ("model", "optimizer", "scheduler")}
            values = {"user_content": rest or None, "scheduler": state.get("scheduler")}
        else:
            values = {name: self._beside(self._folder / f"{name}.pt") for name in ("user_content", "scheduler")}
        return {name: item for name, item in values.items() if item is not None or name == "user_content"}

    def _beside(self, path: Path) -> Any:
        try:
            return read_pickle(path, mapped=True) if path.exists() else None
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Move {path.name} away to load the rest of the checkpoint") from error

    def pieces(self, kind: str) -> list[Shard]:
        """Like :meth:`Archive.pieces`. Raises CheckpointError if the layouts are unknown or do not fit."""
        if self._layouts is None:
            raise CheckpointError(f"{self.where}: these files do not say what their tensors are parts of")
        return self._model_pieces(self._layouts) if kind == "model" else self._optimizer_pieces(self._layouts)

    def _model_pieces(self, layouts: Mapping[str, ParamLayout]) -> list[Shard]:
        shards: list[Shard] = []
        seen: set[str] = set()
        wrong: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        degree = self.degrees["tp"]
        for ranks in self.stages():
            for name in (name for name in ranks[0] if name not in seen):
                layout = layouts.get(name) or ParamLayout.of(list(ranks[0][name].shape), name)
                shapes = [tuple(rank[name].shape) if name in rank else () for rank in ranks]
                expected = layout.rank_shape(degree)
                if any(shape != expected for shape in shapes):
                    wrong.append((name, next(shape for shape in shapes if shape != expected), expected))
                    continue
                for tp, rank in enumerate(ranks):
                    shards.append(Shard.of(name, tp, DictSource(rank), layout, degree))
                self._require_equal_copies(name, layout, ranks)
            seen |= ranks[0].keys()
        if wrong:
            shown = ", ".join(f"{name} is {list(have)}, wanted {list(want)}" for name, have, want in wrong[:12])
            raise WeightMismatchError(
                f"{self.where}: at {degree} tensor-parallel rank(s) the model's tensors would have other shapes: "
                f"{shown}" + (f", ... ({len(wrong)} in total)" if len(wrong) > 12 else ""),
                mismatched=tuple(wrong),
            )
        return shards

    def _require_equal_copies(self, name: str, layout: ParamLayout, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Check the order of replicated key/value heads: it differs between hardware, and only ours can be read."""
        for holding in duplicates(layout, len(ranks)):
            copies = [ranks[rank][name][slices_of(local)] for rank, local in holding.places]
            if any(not copy.equal(copies[0]) for copy in copies[1:]):
                places = [rank for rank, _ in holding.places]
                raise CheckpointError(
                    f"{self.where}: {name!r} should have the same heads on ranks {places}, and they differ: its "
                    "key/value heads are replicated in another order (whole blocks one after the other). Convert it to "
                    "an unsharded checkpoint with the tool that wrote it, and load that"
                )

    def _optimizer_pieces(self, layouts: Mapping[str, ParamLayout]) -> list[Shard]:
        if not self._has_optimizer():
            raise CheckpointError(f"{self.where} holds no optimizer; it was saved without")
        dp, tp, pp = (self.degrees[axis] for axis in ("dp", "tp", "pp"))
        shards: list[Shard] = []
        for stage, d, t in itertools.product(range(pp), range(dp), range(tp)):
            state = self._state(self._optimizer, (d, t, stage), "optimizer")
            names = self._numbered(stage)
            count = sum(len(group["params"]) for group in state["param_groups"])
            if count != len(names):
                raise WeightMismatchError(
                    f"{self.where}: the optimizer's state is of {count} parameters, and this one has "
                    f"{len(names)}; make it with the same parameters in the same groups"
                )
            zero1 = "base_state" in state
            if d > 0 and not zero1:
                continue  # without ZeRO-1 all data-parallel ranks have equal states
            entries, masters = state["base_state" if zero1 else "state"], state.get("sharded_master_weights", {})
            for number, name in enumerate(names):
                if name in layouts:  # else this stage trains what others have here
                    entry = dict(entries.get(number, {}))
                    if number in masters:
                        entry[MASTER] = masters[number]
                    shards += self._optimizer_piece(name, layouts[name], entry, t, d, dp if zero1 else 1)
        return shards

    def _numbered(self, pp: int) -> list[str]:
        """Return the names of the parameters that a stage's optimizer numbers, in its order.

        Each stage numbers its own. Which those are, and their order where this rank does not train all of them, is that
        of the stage's model.
        """
        own = set(self._names)
        if self.degrees["pp"] == 1 and all(own.issuperset(group) for group in self._groups):
            return self._names
        if (0, 0, pp) not in self._model:
            raise CheckpointError(
                f"{self.where}: the optimizer's files number the parameters of each pipeline stage, and the model's, "
                "which name them, are not there: restore them, or start the optimizer anew"
            )
        held = list(self._state(self._model, (0, 0, pp), "model"))
        names: list[str] = []
        for group in self._groups:
            members = set(group)
            here = [name for name in held if name in members]
            own_order = [name for name in self._names if name in members & set(here)]
            if len(own_order) == len(here):
                here = own_order
            elif [name for name in here if name in own] != own_order:
                raise CheckpointError(
                    f"{self.where}: the optimizer's parameters are in another order than the model's, so their numbers "
                    "in a pipeline stage are not known: load it without pipeline stages, and save it there"
                )
            names += here
        return names

    def _optimizer_piece(
        self, name: str, layout: ParamLayout, state: Mapping[str, Any], tp: int, part: int, parts: int
    ) -> list[Shard]:
        """Return the state of one of equal parts of a rank's parameter; nothing for a part that is all padding."""
        shape = layout.rank_shape(self.degrees["tp"])
        rows, inner = shape[0] if shape else 1, math.prod(shape[1:])
        share = -(-rows // parts)
        first, last = min(part * share, rows), min((part + 1) * share, rows)
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for key, item in state.items():
            if not isinstance(item, Tensor):
                values[key] = item
            elif item.numel() == 1 and item.dim() == 0:
                tensors[f"{name}|{key}"] = item
            elif tuple(item.shape) == (share, *shape[1:]):
                tensors[f"{name}|{key}"] = item[: last - first].reshape(-1)
            else:
                raise WeightMismatchError(
                    f"{self.where}: the optimizer's {key!r} of {name!r} is {list(item.shape)}, wanted "
                    f"{[share, *shape[1:]]} (part {part} of {parts})",
                    mismatched=((name, tuple(item.shape), (share, *shape[1:])),),
                )
        if first == last:
            return []
        return [
            Shard.of(name, tp, DictSource(tensors), layout, self.degrees["tp"], (first * inner, last * inner), values)
        ]


AnyArchive = Archive | ReferenceArchive


def one_by_one(layouts: Mapping[str, ParamLayout]) -> dict[str, ParamLayout]:
    """Return the logical tensors of fused parameters as separate layouts, for files that store them separately."""
    separate: dict[str, ParamLayout] = {}
    for layout in layouts.values():
        for part, name in layout.sources:
            axes = [dict(getattr(plan, "named", ())).get(part, plan) for plan in layout.axes]
            separate[name] = ParamLayout.of(axes, name)
    return separate


def _as_optimizer(state: Mapping[Any, Any], path: Path) -> Mapping[Any, Any]:
    """Return ``state``. Raises CheckpointError if it is not an optimizer's."""
    groups, entries = state.get("param_groups"), state.get("base_state", state.get("state"))
    fits = isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)
    if not fits or not isinstance(entries, Mapping) or not all(isinstance(one, Mapping) for one in entries.values()):
        raise CheckpointError(f"{path}: the optimizer's state must have 'param_groups', and 'state' or 'base_state'")
    return state


def _has_tensors(value: Any) -> bool:
    """Whether ``value`` is itself a state dict."""
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _keys(value: Any) -> str:
    return str([str(key) for key in value][:8]) if isinstance(value, Mapping) else ""
