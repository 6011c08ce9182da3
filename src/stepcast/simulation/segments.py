"""Layers as pieces: the ops of a phase, issued in order, in the lanes of one rank."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from stepcast.ir.group import Channel
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import group_of
from stepcast.ir.workload import Block, Layer
from stepcast.simulation.costs import Beside, Issue, Seconds
from stepcast.simulation.issued import Issued, Looks, looks_of, own_cost, row_of
from stepcast.simulation.lanes import COMPUTE, Lanes
from stepcast.simulation.outline import PAIRED, Issues, Loses, Outline, Own, Terms
from stepcast.simulation.pieces import NO_LANE, Cost, Piece, TimedOp
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules.paired import PairPart, merge_parts


class _Outlined(NamedTuple):
    """A piece whose costs are told by the numbers of ops."""

    piece: Piece
    own: tuple[int, ...]
    """Of each cost that is an op's own the number of the op."""
    others: tuple[tuple[int, Cost], ...]
    """The other costs, and which they are of all."""


def _outlined(piece: Piece) -> _Outlined:
    own = [said.at if isinstance(said, Own) else 0 for said in piece.costs]
    others = [(at, said) for at, said in enumerate(piece.costs) if not isinstance(said, Own)]
    return _Outlined(piece, tuple(own), tuple(others))


class Pieces:
    """Pieces under the same terms: those of the same layers are one object, those that look alike are
    outlined once.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.lanes = terms, terms.lanes
        self._made: ByIdentity[Piece] = ByIdentity(4096)
        self._outlined: dict[tuple[object, ...], _Outlined] = {}

    def begin(self, streams: int) -> Piece:
        """The begin of a slot, or of two that are interleaved: input k is what stream k needs."""
        return self._made.get((), lambda: _begin(self.lanes, streams), "begin", streams)

    def end(self, streams: int) -> Piece:
        """Output k is what stream k made; one that made nothing hands on what it was given."""
        return self._made.get((), lambda: _end(self.lanes, streams), "end", streams)

    def slot(self, blocks: Sequence[Block], kind: SlotAction, factor: float) -> list[tuple[Piece, int]]:
        """The pieces of *blocks*, each with its repeats, in the order in which a slot of that *kind* runs
        them; its stage computes by *factor* slower than it should.
        """
        ordered = blocks if kind is SlotAction.FORWARD else blocks[::-1]
        chain = [(self._layers(block.layers, kind, True, factor), block.repeat) for block in ordered]
        if chain and _loses(chain[-1][0]):
            # To collectives that run on beside the next piece: there is none after the last.
            piece, repeat = chain.pop()
            chain += [(piece, repeat - 1)] if repeat > 1 else []
            chain.append((self._layers(ordered[-1].layers, kind, False, factor), 1))
        return chain

    def _layers(self, layers: Sequence[Layer], kind: SlotAction, goes_on: bool, factor: float) -> Piece:
        """One slot's ops of *layers*, after which it *goes on* with others or not."""
        return self._made.of(layers, self._of_layers, (kind, goes_on, factor))

    def _of_layers(self, layers: Sequence[Layer], key: tuple[SlotAction, bool, float]) -> Piece:
        kind, goes_on, factor = key
        row = row_of(layers, kind)
        costs = row.costs if factor == 1.0 else None
        return self._filled(row.issued, row.looks, (), 1, goes_on, factor, costs)

    def interleaved(self, streams: Sequence[Sequence[Issued]], seconds: Seconds, factor: float) -> Piece:
        """Return the ops of two slots that run as a pair, in the order that ends earliest.

        One computes while the other exchanges tokens with its experts; all other communication holds up both
        (DeepSeek-V3, 2024, section 3.2.1; Megatron-Core's model_chunk_schedule_plan.py: dispatch and combine
        have a stream of their own, attention and MLP of both share one).
        """
        cut = [self._cut_at_exchanges(stream) for stream in streams]
        first, second = (
            [PairPart(exchanges, _lasts_s(ops, seconds, factor)) for exchanges, ops in parts] for parts in cut
        )
        left = [iter(parts) for parts in cut]
        numbers: list[int] = []
        issued: list[Issued] = []
        for number in merge_parts(first, second):
            _, ops = next(left[number])
            numbers += [number] * len(ops)
            issued += ops
        return self._filled(issued, (looks_of(issued),), tuple(numbers), len(streams), False, factor)

    def _cut_at_exchanges(self, stream: Sequence[Issued]) -> list[tuple[bool, list[Issued]]]:
        """Return the ops of a slot in runs, with whether a run exchanges tokens with experts or computes."""

        def exchanges(issued: Issued) -> bool:
            group = group_of(issued.op.work)
            return issued.op.blocking and group in PAIRED and group not in self.terms.alone

        return [(kind, list(run)) for kind, run in groupby(stream, key=exchanges)]

    def once(self, issued: Sequence[Issued], name: str, others: int, finish: bool, factor: float) -> Piece:
        """What runs once per step, when *others* have come and, to *finish*, all communication has ended.

        Its output is the end of everything issued so far.
        """
        looks = looks_of(issued)
        key = (looks, name, others, finish)
        outlined = self._outlined.get(key)
        if outlined is None:
            outlined = self._outlined[key] = _outlined(self._once(looks, name, others, finish))
        return _costing(outlined, issued, factor)

    def _once(self, looks: Looks, name: str, others: int, finish: bool) -> Piece:
        lanes, outline = self.lanes, Outline(self.terms, 1)
        waits = lanes.collectives if finish else ()
        begins = (lanes.turn, lanes.given(0), lanes.done(0))
        first = TimedOp(name, 0.0, COMPUTE, inputs=tuple(range(others)), lanes=waits, keeps=begins)
        outline.ops.append(first)
        for at, look in enumerate(looks.each):
            outline.issue(0, at, look)
        outline.ops.append(TimedOp("end of round", 0.0, COMPUTE, lanes=(lanes.done(0), *lanes.collectives)))
        last = len(outline.ops) - 1
        return Piece.of(name, outline.ops, lanes=lanes.count, inputs=others, outputs=(last,))

    def _filled(
        self,
        issued: Sequence[Issued],
        looks: tuple[Looks, ...],
        streams: tuple[int, ...],
        count: int,
        goes_on: bool,
        factor: float,
        costs: Sequence[Cost] | None = None,
    ) -> Piece:
        """The piece of ops that were *issued*, each in its stream; without *streams*, all in the first."""
        key = (looks, streams, goes_on)
        outlined = self._outlined.get(key)
        if outlined is None:
            outline = Outline(self.terms, count)
            for at, look in enumerate(look for part in looks for look in part.each):
                outline.issue(streams[at] if streams else 0, at, look)
            outlined = self._outlined[key] = _outlined(outline.piece(goes_on))
        return _costing(outlined, issued, factor, costs)


@lru_cache(maxsize=256)
def pieces_under(terms: Terms) -> Pieces:
    return Pieces(terms)


def _begin(lanes: Lanes, streams: int) -> Piece:
    """A pair begins when the inputs of both have come (deepseek-ai/DualPipe, _forward_backward_chunk)."""
    ops = [TimedOp("turn", 0.0, NO_LANE, lanes=(COMPUTE,), keeps=(lanes.turn,))]
    every = tuple(range(streams))
    for stream in every:
        ops.append(TimedOp("given", 0.0, NO_LANE, inputs=every, keeps=(lanes.given(stream),)))
        ops.append(TimedOp("fresh", 0.0, NO_LANE, lanes=(lanes.begin,), keeps=(lanes.done(stream),)))
    return Piece.of("begin", ops, lanes=lanes.count, inputs=streams)


def _end(lanes: Lanes, streams: int) -> Piece:
    """A pair sends both results when both are made, as there."""
    made = (*map(lanes.done, range(streams)), *map(lanes.given, range(streams)), lanes.turn)
    ops = [TimedOp("made", 0.0, NO_LANE, lanes=made, keeps=(lanes.done(stream),)) for stream in range(streams)]
    return Piece.of("end", ops, lanes=lanes.count, outputs=range(streams))


def _costing(
    outlined: _Outlined, issued: Sequence[Issued], factor: float, costs: Sequence[Cost] | None = None
) -> Piece:
    """The piece with what its ops cost: their own *costs* where these are known."""
    own = [own_cost(each, factor) for each in issued] if costs is None else costs

    def other(said: Cost) -> Cost:
        if isinstance(said, Issues):
            _, op, backward = issued[said.at]
            return Issue(op.work, backward, op.kernels)
        if isinstance(said, Loses):
            computing = tuple([issued[at].op.work for at in said.computing])
            windows = [(issued[at].op.work, window) for at, window in said.windows]
            return Beside(tuple(windows), computing, factor)  # type: ignore[arg-type]
        return said

    found: list[Cost] = [own[at] for at in outlined.own] if own else [0.0] * len(outlined.own)
    for at, said in outlined.others:
        found[at] = other(said)
    return outlined.piece.costing(tuple(found))


def _loses(piece: Piece) -> bool:
    """Whether its computing loses to collectives beside it, which is told last."""
    return bool(piece.costs) and isinstance(piece.costs[-1], Beside)


def _lasts_s(ops: Sequence[Issued], seconds: Seconds, factor: float) -> float:
    """Return the seconds until *ops* of one slot have computed and all that holds them up has ended."""
    ready_s = 0.0
    free_s: dict[Channel, float] = {}
    ended_s: dict[str, float] = {}
    for _, op, _ in ops:
        start_s = max([ready_s, *(ended_s.get(name, 0.0) for name in op.after)])
        group = group_of(op.work)
        if group is None:
            ready_s = end_s = start_s + seconds(op.work) * factor
        else:
            end_s = free_s[group] = max(start_s, free_s.get(group, 0.0)) + seconds(op.work)
            if op.blocking:
                ready_s = end_s
        ended_s[op.name] = end_s
    return ready_s
