"""Run a module on tensors that are not its own, and see what it assigned to itself meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from nxd_infer.errors import TraceError


@contextlib.contextmanager
def swapped(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Put ``tensors`` in place of the module's own (under every name they have) inside the block.

    Yields a dictionary that holds, afterwards, what the module assigned to a buffer or parameter by itself. Assigning
    a new tensor to a plain attribute is an error that names it.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    slots: dict[int, list[tuple[nn.Module, str, str]]] = {}
    names: dict[str, int] = {}
    plain: list[tuple[nn.Module, str, str, Tensor]] = []
    for path, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            saved.append((table, dict(table)))
            for name, value in table.items():
                if value is not None:
                    qualified = f"{path}.{name}" if path else name
                    slots.setdefault(id(value), []).append((child, name, qualified))
                    names[qualified] = id(value)
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                plain.append((child, name, f"{path}.{name}" if path else name, value))
    for path, child in module.named_modules(remove_duplicate=False):  # a module may have several names
        for name in (*child._parameters, *child._buffers):
            value = child._parameters.get(name, child._buffers.get(name))
            if value is not None:
                names.setdefault(f"{path}.{name}" if path else name, id(value))
    expected: list[tuple[nn.Module, str, str, Tensor]] = []
    replaced: dict[int, tuple[str, Tensor]] = {names[name]: (name, tensor) for name, tensor in tensors.items()}
    for key, places in slots.items():
        for child, name, qualified in places:
            if key in replaced:
                # As a buffer: a module refuses a plain tensor under the name of a parameter.
                child._parameters.pop(name, None)
                child._buffers[name] = replaced[key][1]
                expected.append((child, name, *replaced[key]))
            else:
                expected.append((child, name, qualified, getattr(child, name)))
    changed: dict[str, Tensor] = {}
    try:
        yield changed
        for child, name, qualified, value in expected:
            now = getattr(child, name, None)
            if now is not value and isinstance(now, Tensor):
                changed[qualified] = now
    finally:
        for table, values in saved:
            table.clear()
            table.update(values)
    for child, name, qualified, value in plain:
        if getattr(child, name, None) is not value:
            object.__setattr__(child, name, value)
            raise TraceError(not_registered(qualified))


def not_registered(name: str) -> str:
    return (
        f"the model changes the tensor {name!r} while it runs, which is neither a buffer nor a parameter: register it "
        f"as a buffer (register_buffer({name.rpartition('.')[2]!r}, ...)), so that it is kept between calls"
    )
