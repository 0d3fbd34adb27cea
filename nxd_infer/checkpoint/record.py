"""Check a rank's record of its files before it is trusted: it may have no checksum, or be made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nxd_infer.errors import CheckpointError, ShardingError
from nxd_infer.layout import ParamLayout, TensorLayout
from nxd_infer.layout.describe import read_plans
from nxd_infer.layout.files.manifest import whole
from nxd_infer.util.reading import parse_json

KINDS = ("model", "optimizer", "values")
FIX = "restore the file, or load another tag"


def read_record(text: bytes, where: str) -> dict[str, Any]:
    """Read a rank's JSON record. Raises CheckpointError naming the value if it is not a valid record.

    Each of KINDS in it has ``file``, and either ``structure`` or ``pieces``; an optimizer's pieces also
    ``param_groups``. ``place`` is the rank's place in the job.
    """
    try:
        record = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be read: {error}; {FIX}") from error

    def check(what: str, fits: bool, wanted: str, value: Any) -> None:
        if not fits:
            raise CheckpointError(f"{where}: {what} must be {wanted}, got {value!r:.80}; {FIX}")

    if not isinstance(record, dict):
        raise CheckpointError(f"{where} must hold an object, got {record!r:.80}; {FIX}")
    place = record.get("place")
    placed = isinstance(place, dict) and all(whole(place.get(axis)) for axis in ("tp", "dp"))
    check("'place'", placed, "an object with a whole number for tp and dp", place)
    for kind in KINDS:
        if kind not in record:
            continue
        part = record[kind]
        named = isinstance(part, dict) and isinstance(part.get("file"), str)
        check(repr(kind), named, "an object with the name of a file", part)
        pieces = part.get("pieces", {})
        objects = isinstance(pieces, dict) and all(isinstance(piece, dict) for piece in pieces.values())
        check(f"{kind!r}: 'pieces'", objects, "an object of objects", pieces)
        if kind == "optimizer" and "structure" not in part:
            groups = part.get("param_groups")
            listed = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
            check(f"{kind!r}: 'param_groups'", listed, "a list of objects", groups)
            names = part.get("group_names", [])
            listed = isinstance(names, list) and all(isinstance(group, list) for group in names)
            listed = listed and all(isinstance(name, str) for group in names for name in group)
            check(f"{kind!r}: 'group_names'", listed, "a list of lists of names", names)
    return record


def read_piece(name: str, piece: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of an archive's ``Piece`` that are stored with it. Raises CheckpointError if one is invalid."""
    try:
        start, stop = _numbers(piece["range"])
        values = piece.get("values", {})
        if not isinstance(values, dict):
            raise TypeError(f"'values' is {values!r:.80}")
        layout, shape = TensorLayout.from_json(piece["layout"]), _numbers(piece["shape"])
        logical = {key: _numbers(of_all) for key, of_all in piece["logical"].items()}
        agree = layout.shape == shape and start <= stop <= math.prod(shape) and logical.keys() >= set(layout.names)
        if not agree or any(len(of_all) != len(shape) for of_all in logical.values()):
            raise ValueError("its layout, its shapes and its range do not agree")
        return {
            "layout": layout,
            "shape": shape,
            "start": start,
            "stop": stop,
            "logical": logical,
            "values": values,
            "plans": _plans(piece.get("plans")),
            "dtype": piece.get("dtype"),
        }
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, ShardingError) as error:
        raise CheckpointError(f"{where}: {name!r} is damaged: {error!r:.200}; {FIX}") from error


def _plans(stored: Any) -> ParamLayout | None:
    return read_plans(stored) if stored else None


def _numbers(values: Any) -> tuple[int, ...]:
    """Return sizes or indices of a tensor."""
    if not all(whole(value) and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} are not sizes")
    return tuple(values)
