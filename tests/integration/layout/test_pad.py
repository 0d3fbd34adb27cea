"""Padded attention on real ranks; tests/unit/layout has the other shapes and ways."""

from __future__ import annotations

from typing import Any

from tests.support.layout.pad_models import Shape, compare, padded_with_layouts
from tests.support.ranks import run_ranks

CASES = [
    (Shape(heads, kv_heads), style, loaded)
    for heads, kv_heads in ((6, 3), (10, 2))
    for style, loaded in (("separate", "before"), ("fused", "before"), ("unfused", "after"))
]


def padded() -> list[Any]:
    return [padded_with_layouts(*case) for case in CASES]


def test_padding_matches_a_naive_reference():
    for case, found in zip(CASES, zip(*run_ranks(padded, 4), strict=True), strict=True):
        assert compare([result for result, _ in found], case[0], found[0][1]) < 1e-10, case
