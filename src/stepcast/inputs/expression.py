"""Conditions in a file: expressions over named values, with nothing in them that could do harm."""

import ast
import operator
from collections.abc import Callable, Sequence
from functools import partial

from stepcast.inputs.source import FormatError
from stepcast.ir.limits import EXPRESSION
from stepcast.ir.types import Facts


def _compute_numbers(compute: Callable[..., object], *sides: object) -> object:
    if not all(isinstance(side, int | float) for side in sides):
        raise TypeError("text can only be compared")
    return compute(*sides)


# No power and no shift: a few characters of them would be numbers of any size.
_BINARY: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: partial(_compute_numbers, operator.mul),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: partial(_compute_numbers, operator.mod),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}
_UNARY: dict[type[ast.AST], Callable[..., object]] = {ast.Not: operator.not_, ast.USub: operator.neg}
EXPECTED = "names, numbers, texts, + - * / // %, comparisons, and, or, not, in"

Value = Callable[[Facts], object]


def _join(parts: Sequence[Value], deciding: bool, words: Facts) -> object:
    """Return the first of *parts* whose truth is *deciding*, or the last, as ``or`` and ``and`` do."""
    for part in parts:
        if bool(result := part(words)) is deciding:
            break
    return result


class Expression:
    """A value of points, such as a condition on them; names that a point lacks are None."""

    def __init__(self, text: str, names: Sequence[str] | None = None) -> None:
        EXPRESSION.check(len(text))
        self.text, self._names = text, names
        try:
            self._value = self._read(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            raise FormatError(f'where = {text!r} is not an expression, such as "tp * pp <= gpus"') from None

    def __call__(self, words: Facts) -> bool:
        return bool(self.value(words))

    def value(self, words: Facts) -> object:
        try:
            return self._value(words)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise FormatError(f"where = {self.text!r}: {error}, for {dict(words)}") from None

    def _read(self, node: ast.AST) -> Value:
        """Return a function from the words of a point to the value of *node*."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            constant = node.value
            return lambda words: constant
        if isinstance(node, ast.Name):
            if self._names is not None and node.id not in self._names:
                known = ", ".join(self._names)
                raise FormatError(f"where = {self.text!r}: no point has {node.id!r}; points have {known}")
            name = node.id
            return lambda words: words.get(name)
        if isinstance(node, ast.Tuple | ast.List):
            items = [self._read(element) for element in node.elts]
            return lambda words: [item(words) for item in items]
        if isinstance(node, ast.BoolOp):
            return partial(_join, [self._read(part) for part in node.values], isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            function, operand = _UNARY[type(node.op)], self._read(node.operand)
            return lambda words: function(operand(words))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            compute, left, right = _BINARY[type(node.op)], self._read(node.left), self._read(node.right)
            return lambda words: compute(left(words), right(words))
        if isinstance(node, ast.Compare) and all(type(comparison) in _BINARY for comparison in node.ops):
            sides = [self._read(side) for side in (node.left, *node.comparators)]
            functions = [_BINARY[type(comparison)] for comparison in node.ops]

            def value(words: Facts) -> bool:
                values = [side(words) for side in sides]
                return all(compare(values[index], values[index + 1]) for index, compare in enumerate(functions))

            return value
        raise FormatError(f"where = {self.text!r}: {type(node).__name__.lower()} is not allowed; expected {EXPECTED}")
