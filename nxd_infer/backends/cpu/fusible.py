"""The operators that can be fused, and what each is in the language of :mod:`nxd_infer.ops.fused`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from nxd_infer.graph.passes import aten
from nxd_infer.ops.fused import BINARY, DTYPES, UNARY

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_DIMS, _MOST_WIDTH = 9, 1 << 22
"""Of a value, in ``csrc/operators/fused``."""


class Writer:
    """Writes the program of a group: of its nodes in their order, after its inputs."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self._values: dict[fx.Node, int] = {}
        self._constants: dict[str, int] = {}
        self._squares: dict[int, int] = {}
        self._dtypes: list[str] = []
        self._new: set[int] = set()
        """Values that can be returned: what functions made, once."""

    def input(self, node: fx.Node) -> None:
        """Define a node as the next input."""
        self._values[node] = self._next(NAMES[node.meta["val"].dtype])

    def write(self, node: fx.Node) -> None:
        """Add the statements of a node of :func:`fusible`."""
        self._values[node] = _RULES[node.target][1](self, node)

    def read(self, value: Any) -> int:
        """Return the number of a node's value, or of a Python number's."""
        if isinstance(value, fx.Node):
            return self._values[value]
        number = repr(float(torch.tensor(value, dtype=torch.float32)))  # -0.0 is not 0.0
        if number not in self._constants:
            self._constants[number] = self.add("constant", number)
            self._new.remove(self._constants[number])
        return self._constants[number]

    def kept(self, node: fx.Node) -> int:
        """Return the number of a node's value in its dtype, which :meth:`read` leaves to who reads it."""
        value, dtype = self._values[node], node.meta["val"].dtype
        return value if self._dtypes[value] == NAMES[dtype] else self.function("copy", value, dtype=dtype)

    def returned(self, node: fx.Node) -> int:
        """Return the number of a node's value as a new one of its own."""
        value = self.kept(node)
        if value not in self._new:
            value = self.function("copy", value, dtype=node.meta["val"].dtype)
        self._new.remove(value)
        return value

    def of(self, node: fx.Node, name: str, *operands: Any) -> int:
        """Add a function of nodes, numbers (floats) and values (integers), rounded to the dtype of ``node``."""
        return self.function(name, *operands, dtype=node.meta["val"].dtype)

    def function(self, name: str, *operands: Any, dtype: torch.dtype = torch.float32) -> int:
        """The same, rounded to ``dtype``."""
        numbers = [operand if type(operand) is int else self.read(operand) for operand in operands]
        made = self.add(name, NAMES[dtype], *numbers, dtype=NAMES[dtype])
        if name == "square" and dtype == torch.float32:
            self._squares[made] = numbers[0]
        return made

    def sum(self, value: int) -> int:
        """Add the sum of a row's values."""
        return self.add("sum_of_squares", self._squares[value]) if value in self._squares else self.add("sum", value)

    def mean(self, value: int, width: int) -> int:
        """Add the mean of a row's ``width`` values."""
        return self.function("div", self.sum(value), float(width))

    def slice(self, value: int, begin: int, end: int) -> int:
        """Add some columns of a value. A single one is float32."""
        made = self.add("slice", value, begin, end, dtype=self._dtypes[value])
        self._new.remove(made)
        return self.function("copy", made) if end - begin == 1 and self._dtypes[value] == "bfloat16" else made

    def add(self, *words: Any, dtype: str = "float32") -> int:
        """Add a statement; return the number of what it makes."""
        self.statements.append(" ".join(map(str, words)))
        made = self._next(dtype)
        self._new.add(made)
        return made

    def _next(self, dtype: str) -> int:
        self._dtypes.append(dtype)
        return len(self._dtypes) - 1


_Applies = Callable[[fx.Node], bool]
_Write = Callable[[Writer, fx.Node], int]
_RULES: dict[Any, tuple[_Applies, _Write]] = {}
_VIEWS = (aten.slice.Tensor, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


def fusible(node: fx.Node) -> bool:
    """Whether a node can be in a group: by its operator, arguments, dtypes, and the layout of its values."""
    if node.op != "call_function" or node.target not in _RULES:
        return False
    values, sources = _tensors(node), [value for source in node.all_input_nodes for value in _tensors(source)]
    if not all(isinstance(one, torch.Tensor) and one.dtype in NAMES for one in [*values, *sources]):
        return False
    if not all(0 < one.dim() <= _MOST_DIMS for one in values):
        return False
    if not all(isinstance(size, int) for one in [*values, *sources] for size in one.shape):
        return False  # it depends on values, which is refused where the graph is stored
    for one in [*values, *sources]:
        *_, width = one.shape or (1,)
        if one.numel() == 0 or width > _MOST_WIDTH or (width == 1 and one.dtype == torch.bfloat16):
            return False  # a single value per row is float32
    return (is_view(node) or row_major(values[0])) and _RULES[node.target][0](node)


def is_view(node: fx.Node) -> bool:
    """Whether a node is some columns of another one, or a list of such."""
    return node.target in _VIEWS or (node.target is operator.getitem and getattr(node.args[0], "target", "") in _VIEWS)


def _tensors(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def shape(node: fx.Node) -> torch.Size:
    """Return the shape of a node's value; of a list, of the first."""
    return _tensors(node)[0].shape


def row_major(value: torch.Tensor) -> bool:
    """Whether a tensor is dense, with each of its rows in one piece."""
    stride = value.shape[-1]
    if value.stride(-1) != 1 and stride > 1:
        return False
    for dim in memory_order(value):
        if value.shape[dim] > 1 and value.stride(dim) != stride:
            return False
        stride *= value.shape[dim]
    return True


def memory_order(value: torch.Tensor) -> list[int]:
    """Return the dimensions but the last in the order of memory, last one first."""
    return sorted(range(value.dim() - 1), key=lambda dim: (value.stride(dim), -dim))


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _last(node: fx.Node, dim: Any, of: fx.Node | None = None) -> bool:
    """Whether ``dim``, or the only one in it, is the last."""
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return len(dims) == 1 and dims[0] in (-1, len(shape(of or node)) - 1)


def _rule(*targets: Any, applies: _Applies = lambda node: True) -> Callable[[_Write], _Write]:
    def add(write: _Write) -> _Write:
        _RULES.update((target, (applies, write)) for target in targets)
        return write

    return add


# --- element by element -------------------------------------------------------------------------------


def _plain(node: fx.Node) -> bool:
    """Whether no operand is wider than the result, and numbers are numbers: torch casts others before it computes."""
    wide = any(source.meta["val"].dtype == torch.float32 for source in node.all_input_nodes)
    numbers = all(isinstance(value, (int, float, fx.Node)) and not isinstance(value, bool) for value in node.args)
    narrow = node.meta["val"].dtype != torch.float32
    return len(node.args) == 2 and numbers and not (wide and narrow) and node.kwargs.get("alpha", 1) in (1, 1.0)


for _name in BINARY:
    for _target in (getattr(aten, _name).Tensor, getattr(aten, _name).Scalar):
        _RULES[_target] = (_plain, lambda to, node, name=_name: to.of(node, name, *_numbers(node.args)))
for _name in set(UNARY) - {"copy", "gelu", "gelu_tanh"}:  # which are not PyTorch's of these names
    _RULES[getattr(aten, _name).default] = (
        lambda node: True,
        lambda to, node, name=_name: to.of(node, name, node.args[0]),
    )


def _numbers(arguments: Any) -> list[Any]:
    return [one if isinstance(one, fx.Node) else float(one) for one in arguments]


@_rule(aten.gelu.default)
def _gelu(to: Writer, node: fx.Node) -> int:
    tanh = node.kwargs.get("approximate", "none") == "tanh"
    return to.of(node, "gelu_tanh" if tanh else "gelu", node.args[0])


@_rule(aten.pow.Tensor_Scalar, applies=lambda node: node.args[1] in (2, 3, 0.5, -0.5))
def _power(to: Writer, node: fx.Node) -> int:
    x, exponent = node.args
    if exponent in (0.5, -0.5):
        return to.of(node, "sqrt" if exponent == 0.5 else "rsqrt", x)
    square = to.of(node, "square", x)
    return square if exponent == 2 else to.of(node, "mul", square, x)


@_rule(aten.to.dtype, aten._to_copy.default, applies=lambda node: "memory_format" not in node.kwargs)
def _cast(to: Writer, node: fx.Node) -> int:
    source: Any = node.args[0]
    narrower = node.meta["val"].dtype == torch.bfloat16 != source.meta["val"].dtype
    return to.of(node, "copy", source) if narrower else to.read(source)


# --- along a row --------------------------------------------------------------------------------------


def _keeps(node: fx.Node) -> bool:
    dim, keep = _argument(node, 1, "dim"), _argument(node, 2, "keepdim", False)
    return keep is True and _last(node, dim) and _argument(node, 3, "dtype") is None


@_rule(aten.mean.dim, applies=_keeps)
def _mean(to: Writer, node: fx.Node) -> int:
    source: Any = node.args[0]
    return to.mean(to.read(source), shape(source)[-1])


@_rule(aten.sum.dim_IntList, applies=_keeps)
def _sum(to: Writer, node: fx.Node) -> int:
    return to.sum(to.read(node.args[0]))


@_rule(aten.amax.default, applies=_keeps)
def _amax(to: Writer, node: fx.Node) -> int:
    return to.add("amax", to.read(node.args[0]))


def _softmax_of_rows(node: fx.Node) -> bool:
    wide = node.all_input_nodes[0].meta["val"].dtype == torch.float32 != node.meta["val"].dtype
    return _last(node, node.args[1]) and not wide  # torch casts before it computes


@_rule(aten.softmax.int, applies=_softmax_of_rows)
def _softmax(to: Writer, node: fx.Node) -> int:
    x = to.read(node.args[0])
    weights = to.function("exp", to.function("sub", x, to.add("amax", x)))
    return to.of(node, "div", weights, to.sum(weights))


def _normal_shape(node: fx.Node) -> bool:
    return len(_argument(node, 1, "normalized_shape")) == 1


@_rule(aten.layer_norm.default, applies=_normal_shape)
def _layer_norm(to: Writer, node: fx.Node) -> int:
    source: Any = node.args[0]
    x, width = to.read(source), shape(source)[-1]
    centred = to.function("sub", x, to.mean(x, width))
    return _normalised(to, node, centred, width, 4, _argument(node, 3, "bias"))


@_rule(aten.rms_norm.default, applies=lambda node: _normal_shape(node) and _argument(node, 3, "eps") is not None)
def _rms_norm(to: Writer, node: fx.Node) -> int:
    source: Any = node.args[0]
    return _normalised(to, node, to.read(source), shape(source)[-1], 3, None)


def _normalised(to: Writer, node: fx.Node, x: int, width: int, eps: int, bias: Any) -> int:
    """Divide by the root of the mean square; scale and shift."""
    variance = to.mean(to.function("square", x), width)
    root = to.function("rsqrt", to.function("add", variance, float(_argument(node, eps, "eps", 1e-5))))
    after = [(name, one) for name, one in (("mul", _argument(node, 2, "weight")), ("add", bias)) if one is not None]
    if not after:
        return to.of(node, "mul", x, root)
    x = to.function("mul", x, root)
    for name, one in after[:-1]:
        x = to.function(name, x, one)
    return to.of(node, after[-1][0], x, after[-1][1])


# --- columns ------------------------------------------------------------------------------------------


@_rule(
    aten.slice.Tensor,
    applies=lambda node: _last(node, _argument(node, 1, "dim", 0)) and _argument(node, 4, "step", 1) == 1,
)
def _slice(to: Writer, node: fx.Node) -> int:
    source: Any = node.args[0]
    begin, width = _argument(node, 2, "start", 0) or 0, shape(source)[-1]
    begin = max(begin + width, 0) if begin < 0 else begin
    return to.slice(to.read(source), begin, begin + shape(node)[-1])


@_rule(
    *_VIEWS[1:],
    applies=lambda node: _last(node, _argument(node, 2, "dim", 0), node.args[0]),  # pyright: ignore[reportArgumentType]
)
def _pieces(to: Writer, node: fx.Node) -> int:
    return to.read(node.args[0])


@_rule(operator.getitem, applies=is_view)
def _piece(to: Writer, node: fx.Node) -> int:
    pieces: Any = node.args[0]
    index: Any = node.args[1]
    widths = [piece.shape[-1] for piece in _tensors(pieces)]
    index = range(len(widths))[index]
    begin = sum(widths[:index])
    return to.slice(to.read(pieces), begin, begin + widths[index])


def _along_rows(node: fx.Node) -> bool:
    parts: Any = node.args[0]
    same = len({part.meta["val"].dtype for part in parts}) == 1
    return same and _last(node, _argument(node, 1, "dim", 0)) and all(len(shape(p)) == len(shape(node)) for p in parts)


@_rule(aten.cat.default, applies=_along_rows)
def _concatenate(to: Writer, node: fx.Node) -> int:
    parts: Any = node.args[0]
    numbers = [to.kept(part) for part in parts]
    return to.add("concatenate", len(parts), *numbers, dtype=NAMES[node.meta["val"].dtype])
