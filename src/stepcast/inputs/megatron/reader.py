"""Megatron-LM rank traces: one line per operation that a rank ran in one traced iteration.

Written by the instrumented Megatron-LM of Echo (fwyc0573/Megatron-LM). Times are milliseconds; a
timestamp is the END of an operation on the host's clock, so clocks of two hosts are unrelated.
Every rank has a lane "ops" with its operations; their parts lie on one lane per group ("tp", "dp", ...)
and name the operation as parent. Details keep the file's words, and two marks of ours: ``fused_with`` on
the second line of one fused send and receive (count it once) and ``untimed`` where no time was taken.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline

FIRST_LINE = re.compile(r"\s*rank:[0-9]+:[A-Za-z_]\w*\(\w+=", re.ASCII)


def looks_like(head: str) -> bool:
    """Whether the text begins with an operation of a rank."""
    return FIRST_LINE.match(head) is not None


def read_run(sources: Sequence[Source]) -> "Timeline":
    """All given ranks of one run as one Timeline."""
    # Recognising a file must not load numpy.
    from stepcast.inputs.megatron.lines import TraceColumns
    from stepcast.inputs.megatron.timeline import Assembly

    columns = TraceColumns()
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise FormatError("is given twice; expected each rank of the run once", source.path)
        seen.add(source.path)
        columns.add_file(source.path, source.each_line())
    return Assembly(columns).timeline(", ".join(source.path for source in sources[:3]))
