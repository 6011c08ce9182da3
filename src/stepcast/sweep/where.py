"""The filter of a spec: an expression over a point's words, of arithmetic and comparison alone."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.inputs.errors import FormatError
from stepcast.ir.limits import EXPRESSION

# No power and no shift: a few characters of them would be numbers of any size.
ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Name, ast.Load, ast.Constant),
    *(ast.Tuple, ast.List),
)


class Filter:
    """Whether a point is asked; what a point does not say is None."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        EXPRESSION.check(len(text))
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise FormatError(f'where = {text!r} is no expression, as "tp * pp <= gpus"') from None
        self.names = tuple(sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}))
        for node in ast.walk(tree):
            if not isinstance(node, ALLOWED):
                raise FormatError(
                    f"where = {text!r}: {type(node).__name__.lower()} has no place there; "
                    "expected names, numbers, texts, + - * / // %, comparisons, and, or, not, in"
                )
        if unknown := [name for name in self.names if name not in names]:
            raise FormatError(
                f"where = {text!r}: no point has {unknown[0]!r}; points have {', '.join(names)}"
            )
        self.text = text
        self._code = compile(tree, "where", "eval")

    def __call__(self, words: Mapping[str, Any]) -> bool:
        values = {name: words.get(name) for name in self.names}
        try:
            return bool(eval(self._code, {"__builtins__": {}}, values))
        except (TypeError, ZeroDivisionError) as error:
            raise FormatError(f"where = {self.text!r}: {error}, for {values}") from None
