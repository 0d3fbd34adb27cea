"""Any value of JSON, for Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 5), st.text(max_size=6),
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([5e-324, 1e308, -0.0, 1e-40, "", "a", "\x00"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
