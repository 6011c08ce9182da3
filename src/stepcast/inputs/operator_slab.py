"""A slab of an operator table as columns, all rows at once; it loads numpy, which small tables do without."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stepcast.inputs.op_times import Cells
from stepcast.inputs.operator_rows import Columns

Code = Callable[[int, str], int | None]


def plain_columns(
    slab: str, separator: str, width: int, phases: Sequence[tuple[int, int, int]], process: int, code: Code
) -> Columns | None:
    """The rows of *slab*, or None where some cell is not as usual and must be looked at.

    *phases* are the places of the time, the word and the size of each; the name comes first.
    """
    cells = Cells(slab, separator, width)
    if not cells.plain:
        return None
    numbers = [*(time for time, _, _ in phases), process]
    decimals = cells.decimals(*numbers)
    if decimals is None:
        return None
    columns = Columns([cells.picked(0).decode().replace(separator, "\n")[:-1]])
    for phase, (time, word, size) in enumerate(phases):
        codes, elements = _codes(cells, phase, word, code), cells.whole(size)
        if codes is None or elements is None:
            return None
        _fill(columns.times_ms[phase], decimals[time])
        _fill(columns.words[phase], codes)
        _fill(columns.elements[phase], elements)
    _fill(columns.process_ms, decimals[process])
    return columns


def _codes(cells: Cells, phase: int, word: int, code: Code) -> Any:
    if (text := cells.constant(word)) is not None:
        number = code(phase, text)
        return None if number is None else np.full(len(cells), number)
    texts, of_row = cells.words(word)
    numbers = [code(phase, text) for text in texts]
    return None if None in numbers else np.array(numbers)[of_row]


def _fill(column: "array[Any]", values: Any) -> None:
    column.frombytes(np.ascontiguousarray(values, dtype=column.typecode).tobytes())
