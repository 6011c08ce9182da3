"""Which report each layer record of an OptimusPrime log belongs to.

Ranks print into one stream. A report is a header and one record per layer of its stage, but two ranks'
prints are glued together, so that headers and records of several reports mix. What a stage reports, its
signature, is the same sequence of (layer, ops) every step. It is learnt from reports that stand alone;
a glued record then belongs to the oldest open report that expects it next.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
NO_BLOCK = -1

# Enough to learn from; a long log repeats itself.
MOST_LEARNT_FROM = 1000
# More reports than this are never open at once; what is older was damaged.
MOST_OPEN = 256


@dataclass(frozen=True)
class Tokens:
    """Headers and records in the order of the log; ``sign`` numbers a record's (layer, ops), -1: a header.

    *header_of* numbers each token's header if it is one, *stages* and *ranks* are by header.
    """

    sign: Array
    header_of: Array
    ranks: Array
    stages: Array


@dataclass(frozen=True)
class Attribution:
    """The report of each token (-1: none, or itself a header), and what was doubtful."""

    block_of: Array
    signatures: dict[int, tuple[int, ...]]
    glued: int
    ambiguous: int
    orphans: int


@dataclass(slots=True)
class OpenBlock:
    number: int
    rank: int
    expected: tuple[int, ...]
    next: int = 0


def attribute(tokens: Tokens) -> Attribution:
    signatures = learn_signatures(tokens)
    block_of = np.full(len(tokens.sign), NO_BLOCK, dtype=np.int64)
    taken = take_whole_blocks(tokens, signatures, block_of)
    glued, ambiguous, orphans = take_glued_records(tokens, signatures, block_of, taken)
    return Attribution(block_of, signatures, glued, ambiguous, orphans)


def learn_signatures(tokens: Tokens) -> dict[int, tuple[int, ...]]:
    """What each stage reports: the commonest sequence of records between two headers."""
    headers = np.flatnonzero(tokens.sign < 0)
    if not len(headers):
        return {}
    ends = np.append(headers[1:], len(tokens.sign))
    alone = (ends - headers > 1) & (np.diff(headers, prepend=-2) > 1)
    signatures = {}
    for stage in np.unique(tokens.stages).tolist():
        found: Counter[tuple[int, ...]] = Counter()
        mine = np.flatnonzero(alone & (tokens.stages == stage))[:MOST_LEARNT_FROM]
        for start, end in zip(headers[mine].tolist(), ends[mine].tolist(), strict=True):
            if end - start <= 4096:  # a damaged log may have no more headers at all
                found[tuple(tokens.sign[start + 1 : end].tolist())] += 1
        if found:
            # Of equally common ones the first.
            signatures[stage] = max(found, key=found.__getitem__)
    return signatures


def take_whole_blocks(
    tokens: Tokens, signatures: dict[int, tuple[int, ...]], block_of: Array
) -> npt.NDArray[np.bool_]:
    """Attribute reports that stand alone; returns which tokens that settles, headers included."""
    taken = np.zeros(len(tokens.sign), dtype=bool)
    headers = np.flatnonzero(tokens.sign < 0)
    # After another header, records may be the other's.
    alone = np.diff(headers, prepend=-2) > 1
    for stage, signature in signatures.items():
        starts = headers[alone & (tokens.stages == stage)]
        starts = starts[starts + len(signature) < len(tokens.sign)]
        places = starts[:, None] + 1 + np.arange(len(signature))
        whole = (tokens.sign[places] == np.array(signature)).all(axis=1)
        starts, places = starts[whole], places[whole]
        block_of[places] = tokens.header_of[starts][:, None]
        taken[places] = True
        taken[starts] = True
    return taken


def take_glued_records(
    tokens: Tokens, signatures: dict[int, tuple[int, ...]], block_of: Array, taken: npt.NDArray[np.bool_]
) -> tuple[int, int, int]:
    """Attribute the rest one by one; returns how many were glued, ambiguous, and nobody's."""
    glued = ambiguous = orphans = 0
    open_blocks: list[OpenBlock] = []
    rest = np.flatnonzero(~taken)
    for place, sign in zip(rest.tolist(), tokens.sign[rest].tolist(), strict=True):
        if sign < 0:
            number = int(tokens.header_of[place])
            rank = int(tokens.ranks[number])
            # A rank prints one report at a time.
            open_blocks = [block for block in open_blocks if block.rank != rank][-MOST_OPEN:]
            open_blocks.append(OpenBlock(number, rank, signatures.get(int(tokens.stages[number]), ())))
            continue
        waiting = [b for b in open_blocks if b.next < len(b.expected) and b.expected[b.next] == sign]
        if not waiting:
            # A record of this report was lost, or nothing is known of its stage.
            waiting = [b for b in open_blocks if sign in b.expected[b.next :]]
            waiting = waiting or [b for b in open_blocks[-1:] if not b.expected]
        if not waiting:
            orphans += 1
            continue
        block = waiting[0]
        ambiguous += len(waiting) > 1
        glued += 1
        block_of[place] = block.number
        if block.expected:
            block.next = block.expected.index(sign, block.next) + 1
            if block.next == len(block.expected):
                open_blocks.remove(block)
    return glued, ambiguous, orphans
