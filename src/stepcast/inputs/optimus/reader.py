"""OptimusPrime training logs: the standard output of a pipeline-parallel PyTorch run, all ranks mixed.

What is read: the settings printed at the start, ``[rank:R stage:S] ... forward time ... - step K`` with
one ``layer[NAME]: total=T ms`` record per layer, and ``| epoch .. | ms/batch ..`` lines. The rest
(warnings of torchrun and NCCL, the graph) is skipped. Prints of two ranks are glued but never cut, so the
text is searched for whole patterns and line ends mean nothing.
"""

import re
from typing import TYPE_CHECKING

from stepcast.inputs.source import Source

if TYPE_CHECKING:
    from stepcast.ir.runlog import RunLog

MARKS = re.compile(
    r"> Total parameters in model: [0-9]|> GAS: [0-9]|transformer-block\(module\) forward time"
    r"|\| epoch +[0-9]+ \| +[0-9]+/ *[0-9]+ batches \|"
)


def looks_like(head: str) -> bool:
    """Whether the first part of the text has a print that only this program makes."""
    return MARKS.search(head) is not None


def read(source: Source) -> "RunLog":
    # Recognising a file must not load numpy.
    from stepcast.inputs.optimus.log import read_log

    return read_log(source.slabs(errors="replace"), source.path)
