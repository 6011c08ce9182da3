"""GPU kernels by the class of their work, and how long those that torch.compile fuses take together.

Element-wise kernels are limited by memory, so their times are the bytes they move. Neighbours become one kernel, which
takes as long as the longest of them and a share of the others: what these read and write themselves.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter

import numpy as np

from stepcast.analyze.result import load_rules
from stepcast.ir.arrays import BoolArray, FloatArray, Int32Array, IntArray
from stepcast.ir.tables import constants
from stepcast.ir.timeline import NONE, Timeline

MATMUL, ATTENTION, NORM, LOSS = "matmul", "attention", "norm", "softmax and loss"
EMBEDDING, ELEMENTWISE, OTHER = "embedding and sort", "element-wise", "other"

COPY, COMMUNICATION = "copy", "communication"

PRODUCTS = (MATMUL, ATTENTION)
FUSIBLE = (ELEMENTWISE, NORM, LOSS)

MEASURED = constants("kineto")
MASKED: dict[str, tuple[float, float]] = MEASURED["masked"]  # how much longer attention takes, forward and backward
# Code that looks at the mask to leave it out cannot do so while it is compiled or captured.
READS_BACK, ATTENDS = "aten::is_nonzero", "aten::scaled_dot_product_attention"
RULES = load_rules()["kernels"]
PATTERNS = {name: re.compile(text) for name, text in RULES["patterns"].items()}
# Classes of kernels and patterns of their names; the first match counts.
CLASSES = [
    (label, re.compile("|".join(words for _, words in rows).lower()))
    for label, rows in groupby(RULES["classes"], itemgetter(0))
]


@cache
def kernel_class(name: str) -> str:
    """Return the class of work of a GPU kernel by its name."""
    inductor = PATTERNS["inductor"].match(name)
    if inductor is not None and inductor[1] in ("poi", "for"):
        return ELEMENTWISE
    words = PATTERNS["libraries"].sub("", name.lower())
    classes = (label for label, pattern in CLASSES if pattern.search(words))
    return next((label for label in classes if inductor is None or label not in PRODUCTS), OTHER)


@cache
def is_fusible(name: str) -> bool:
    """Return True for kernels that torch.compile fuses with their neighbours; those of Triton are fused already.

    The gradients of embeddings, which eager code sorts, become additions in such a kernel too.
    """
    return (
        kernel_class(name) in (*FUSIBLE, EMBEDDING) or bool(PATTERNS["also_fused"].search(name))
    ) and not name.startswith("triton")


def find_mask_check(names: Sequence[str], name_of: Int32Array | IntArray) -> str:
    """Return which mask the host decided to leave out before the first attention, after it read values of the GPU.

    *name_of* are the host's operators in their order. transformers asks whether all positions are unpadded
    (``all``), and for causal attention whether a sum or the number of packed sequences equals (``eq``) what it expects.
    """
    name_of = name_of[np.char.startswith(np.array(names), "aten::")[name_of]]
    number_of = {name: number for number, name in enumerate(names)}
    attends, reads = (np.flatnonzero(name_of == number_of.get(name, NONE)) for name in (ATTENDS, READS_BACK))
    for read in reads[reads < attends[0]].tolist() if len(attends) else ():
        before = {names[name] for name in name_of[max(read - 4, 0) : read].tolist()}
        if before & {"aten::eq", "aten::all"}:
            return "causal" if "aten::eq" in before else "padding"
    return ""


def mask_factor(name: str, mask: str) -> float:
    """Return how much longer a kernel of attention takes with a mask."""
    forward, backward = MASKED.get(mask, (1.0, 1.0)) if kernel_class(name) == ATTENTION else (1.0, 1.0)
    return forward if PATTERNS["forward"].search(name) else backward if PATTERNS["backward"].search(name) else 1.0


def rows_of_unfused(timeline: Timeline, calls: IntArray) -> BoolArray:
    """Return which calls an operator made that torch.compile does not fuse."""
    is_unfused = np.array([bool(PATTERNS["unfused"].search(name)) for name in timeline.names], dtype=bool)
    within: BoolArray = np.zeros(len(calls), dtype=bool)
    callers = np.where(calls == NONE, NONE, timeline.parent_of[calls])
    while (callers != NONE).any():
        within |= (callers != NONE) & is_unfused[timeline.name_of[callers]]
        callers = np.where(callers == NONE, NONE, timeline.parent_of[callers])
    return within


def fuse(
    names: Sequence[str], name_of: Int32Array | IntArray, duration_s: FloatArray, can_fuse: BoolArray
) -> tuple[IntArray, FloatArray]:
    """Return the first row of each part of a stream, and the seconds of its kernel if it were compiled.

    Rows are in the order of the stream. What cannot be fused is a part of its own, with its own time.
    """
    ends, reads, drops, strided = (
        np.array([bool(PATTERNS[what].search(name)) for name in names], dtype=bool)[name_of]
        for what in ("sums", "statistics", "dropout", "strided")
    )
    duration_s = np.where(strided & can_fuse, MEASURED["strided_share"] * duration_s, duration_s)
    joins = can_fuse[1:] & can_fuse[:-1] & ~ends[:-1]
    starts: IntArray = np.concatenate([[0], 1 + np.flatnonzero(~joins)]).astype(np.int64)
    longest_s = np.maximum.reduceat(duration_s, starts)
    part_of = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(duration_s))))
    next_s = np.append(longest_s, np.inf)[1 + part_of]
    seconds = np.where(reads & can_fuse, np.minimum(duration_s, MEASURED["read_share"] * next_s), duration_s)
    longest_s = np.maximum.reduceat(seconds, starts)
    others_s = np.add.reduceat(seconds, starts) - longest_s
    dropout_s = MEASURED["dropout_factor"] * np.add.reduceat(np.where(drops & can_fuse, seconds, 0.0), starts)
    return starts, np.maximum(longest_s, dropout_s) + MEASURED["own_share"] * others_s
