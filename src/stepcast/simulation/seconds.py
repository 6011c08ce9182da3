"""The seconds of the works of a step, and the codes by which the ops of pieces find them.

A piece is built once for all layers with the same features, and its costs are places in lists of works. Its record is
all that the compiled engine needs of it: its shape, and for each op a code. Records of all pieces are in one array.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import chain as join
from itertools import count, product
from operator import add
from threading import Lock
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.layout import Group
from stepcast.ir.types import dataclass
from stepcast.ir.work import CollectiveKind
from stepcast.simulation.segments import Chain, Cost, Piece, ProgramError

TICK_S = 2.0**-46
"""Prices are whole numbers of ticks of 14 femtoseconds. Sums of them are exact up to two minutes, so that work that is
folded, unfolded or run event by event ends at the same bit."""
MESSAGE, LEAD = "message", "lead"
"""The costs of a message between two stages, and of a host that began before the step."""
CODES: dict[Cost, int] = {MESSAGE: 1, LEAD: 2}
FIRST_WORK, CONTENTION = 3, -1
"""The code of the first work of a list, and that of what computing loses; ops that take nothing have 0. Codes of issues
are those of their works, negative."""
CollectiveGroup = tuple[CollectiveKind, Group]
KIND_NUMBERS: dict[CollectiveGroup, int] = {pair: number for number, pair in enumerate(product(CollectiveKind, Group))}
"""The number of each kind of collective of a group."""
MOST_RECORDED, MOST_CHAINS = 2**21, 2**15
"""The size of the records of pieces, and the chains, from which on records are made anew for the next program."""


def in_ticks(seconds: FloatArray) -> FloatArray:
    """Return *seconds* rounded to whole ticks."""
    lowest, highest = np.minimum.reduce(seconds, initial=0.0), np.maximum.reduce(seconds, initial=0.0)
    if not (lowest >= 0 and highest < np.inf):  # of NaN, neither is true
        raise ProgramError("a duration is negative or not finite")
    rounded: FloatArray = np.rint(seconds / TICK_S) * TICK_S
    return rounded


class CostSlot(NamedTuple):
    """In place of a cost: the place of a work in a list, whose seconds the op takes, or those that a host takes to
    issue it.
    """

    place: int
    is_issue: bool = False


class ContentionSlot(NamedTuple):
    """In place of a cost: what the computing of a piece loses to the collectives that overlap it.

    A collective of share k takes k seconds of computing for each second that both run: as long as it lasts, or as long
    as the computing between it and the first op that waits for it. One that nothing in the piece waits for outlasts the
    piece and overlaps the next one, which is taken to be equal. Collectives of one lane follow one another, so together
    they overlap at most all that the piece computes.
    """

    windows: tuple[tuple[int, CollectiveGroup, tuple[int, ...]], ...]
    """The place of each collective, its kind and group, and the indices of the computing that may overlap it; an empty
    tuple means all.
    """
    computing: tuple[int, ...]  # the places of the ops that compute


class PieceTable:
    """The records of pieces, end to end in one array."""

    def __init__(self, is_coded: bool = True) -> None:
        self.is_coded, self._lock = is_coded, Lock()
        self._clear()

    def _clear(self) -> None:
        self.records, self.size = np.zeros(2**12, np.int64), 0
        self._pieces: dict[Piece, int] = {}
        self._chains: dict[Chain, list[int]] = {}

    def find(self, chains: Sequence[Chain]) -> tuple[IntArray, list[list[int]]]:
        """Return the records, and where those of the pieces of each chain begin."""
        with self._lock:
            if self.size > MOST_RECORDED or len(self._chains) > MOST_CHAINS:
                self._clear()  # whoever uses the records of before has their array
            places = [self._chains.get(chain) or self._find_pieces(chain) for chain in chains]
            return self.records, places

    def _find_pieces(self, chain: Chain) -> list[int]:
        places = self._chains[chain] = [self._find_piece(piece) for piece in chain.pieces]
        return places

    def _find_piece(self, piece: Piece) -> int:
        if piece not in self._pieces:
            record, place = encode_piece(piece, self.is_coded), self.size
            self._pieces[piece], self.size = place, place + len(record)
            while self.size > len(self.records):
                self.records = np.concatenate([self.records, np.zeros_like(self.records)])
            self.records[place : self.size] = record
        return self._pieces[piece]


def encode_piece(piece: Piece, is_coded: bool) -> list[int]:
    """Return the record of *piece*: the sizes of its shape, those of its waits and exits, the packed shape, the code of
    each op if it *is coded*, and what decides the seconds that computing loses.
    """
    shape = piece.shape
    waits, exits = shape.compact
    record = [*shape.sizes, sum(map(len, waits)) + len(exits), *shape.touched, *map(len, waits)]
    record += [*join.from_iterable(waits), *exits]
    for cost in piece.costs if is_coded else ():
        match cost:
            case CostSlot():
                record.append(-FIRST_WORK - cost.place if cost.is_issue else FIRST_WORK + cost.place)
            case ContentionSlot():
                record.append(CONTENTION)
            case _:
                record.append(CODES[cost] if cost else 0)
    if is_coded and record[-1] == CONTENTION:
        slot = piece.costs[-1]
        assert isinstance(slot, ContentionSlot)
        groups = dict.fromkeys([group for _, (_, group), _ in slot.windows])
        numbers = dict(zip(groups, count(), strict=False))
        record += [len(numbers), len(slot.computing), *[FIRST_WORK + place for place in slot.computing]]
        record.append(len(slot.windows))
        for place, kind, window in slot.windows:
            record += [FIRST_WORK + place, KIND_NUMBERS[kind], numbers[kind[1]], len(window), *window]
    return record


TABLE = PieceTable()
"""The records of all pieces whose costs are places in lists."""


@dataclass(frozen=True, eq=False)
class WorkSeconds:
    """The seconds of the works of some lists, from which those of ops follow."""

    seconds: FloatArray  # in ticks: 0, of a message, of the lead of a host, of all works, of all issues
    exact_s: FloatArray  # the same before they are rounded or slowed down
    starts: IntArray  # the first work of each list, after that of the list -1
    factors: FloatArray  # for each list, how many times slower than it should be its stage computes
    shares: FloatArray  # by kinds of collectives: seconds of computing that they take for each second of overlap
    slows: FloatArray  # and how many times slower than they should be they are

    @property
    def works(self) -> int:
        """The number of works, and by how much their issues come later."""
        return int(self.starts[-1])

    def spread(self, pieces: Sequence[tuple[Piece, int]]) -> FloatArray:
        """Return the seconds of each op of *pieces*, whose costs belong to lists, one piece after the other."""
        codes = [code_ops(piece) for piece, _ in pieces]
        code = np.concatenate([np.zeros(0, np.int64), *codes])
        start = np.repeat(self.starts[[own + 1 for _, own in pieces]], list(map(len, codes)))
        work, issue = start + code, self.works + start - code
        places = np.where(code >= FIRST_WORK, work, np.where(code < CONTENTION, issue, code))
        seconds: FloatArray = self.seconds[places]
        slots = [(piece.costs[-1], own) for piece, own in pieces if piece.costs]
        lost_s = [self._find_lost_s(slot, own) for slot, own in slots if isinstance(slot, ContentionSlot)]
        seconds[code == CONTENTION] = in_ticks(np.array(lost_s, np.float64))
        return seconds

    def _find_lost_s(self, slot: ContentionSlot, own: int) -> float:
        """Return what the computing of a piece loses, whose works are those of the list *own*."""
        start, stop = self.starts[own + 1 : own + 3].tolist()
        factor, exact_s = float(self.factors[own + 1]), self.exact_s[FIRST_WORK + start : FIRST_WORK + stop].tolist()
        seconds = [exact_s[place] for place in slot.computing]
        computing_s = _add_up(seconds) * factor
        overlap_s: dict[Group, float] = defaultdict(float)
        taken_s: dict[Group, float] = defaultdict(float)
        for place, kind, window in slot.windows:
            number = KIND_NUMBERS[kind]
            both_s = _add_up([seconds[index] for index in window]) * factor if window else computing_s
            both_s = min(both_s, exact_s[place] * float(self.slows[number]))
            overlap_s[kind[1]] += both_s
            taken_s[kind[1]] += float(self.shares[number]) * both_s
        lost_s = [taken_s[group] * min(1.0, computing_s / both_s) for group, both_s in overlap_s.items() if both_s > 0]
        return _add_up(lost_s)


def _add_up(seconds: Sequence[float]) -> float:
    """Return the sum in the order of *seconds*, which ``sum`` rounds in another way from Python 3.12 on."""
    return reduce(add, seconds, 0.0)


@lru_cache(maxsize=4096)
def find_shared(piece: Piece) -> tuple[bool, frozenset[CollectiveGroup]]:
    """Return whether *piece* has messages, and the kinds of collectives that slow its computing down."""
    slots = [cost for cost in piece.costs[-1:] if isinstance(cost, ContentionSlot)]
    return MESSAGE in piece.costs, frozenset([kind for slot in slots for _, kind, _ in slot.windows])


@lru_cache(maxsize=4096)
def code_ops(piece: Piece) -> IntArray:
    """Return the code of each op of *piece*."""
    record, ops = encode_piece(piece, True), piece.shape.ops
    first = 5 + len(piece.shape.touched) + ops + record[4]
    return np.array(record[first : first + ops], np.int64)
