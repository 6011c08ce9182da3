"""Layers as segments: the ops of a phase, issued in order, in the lanes of one rank.

Computation runs in the compute lane, each group's communication in a lane of its own. A blocking
communication starts when the computation before it has ended and holds up the computation after it; a
non-blocking one holds up nobody but the ops that name it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Transfer, Work
from stepcast.ir.workload import Layer, Op, Phase, Stage
from stepcast.simulation.arrays import Segment, TimedOp
from stepcast.simulation.schedule import Kind

COMPUTE = 0
COMPUTE_NAME = "compute"
SEND_NAMES = ("pp send activations", "pp send gradients")
RECEIVE_NAMES = ("pp receive activations", "pp receive gradients")
HOST_NAME = "host"

Seconds = Callable[[Work], float]
IssueSeconds = Callable[[Work, bool], float]
"""(work, whether in a backward) -> seconds the host needs to issue it."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of every rank: compute, those of the pipeline's messages, then one for each group.

    Messages that both sides stop for need lanes to receive in; others arrive in the sender's. An eager host
    has a lane of its own, in which it issues what the others run.
    """

    groups: tuple[Group, ...]
    receives: bool = False
    host: bool = False

    @property
    def messages(self) -> tuple[str, ...]:
        return SEND_NAMES + RECEIVE_NAMES if self.receives else SEND_NAMES

    @property
    def names(self) -> tuple[str, ...]:
        groups = (str(group) for group in self.groups)
        return (COMPUTE_NAME, *self.messages, *groups, *((HOST_NAME,) if self.host else ()))

    @property
    def collectives(self) -> tuple[int, ...]:
        """The lanes of the groups."""
        first = 1 + len(self.messages)
        return tuple(range(first, first + len(self.groups)))

    @property
    def host_lane(self) -> int | None:
        return len(self.names) - 1 if self.host else None

    def of(self, group: Group) -> int:
        return 1 + len(self.messages) + self.groups.index(group)

    def group(self, lane: int) -> Group | None:
        """The group whose communication runs in *lane*; None for computing and for the host."""
        if lane in (COMPUTE, self.host_lane):
            return None
        at = lane - 1 - len(self.messages)
        return Group.PP if at < 0 else self.groups[at]


@dataclass(frozen=True, slots=True)
class Issued:
    """An op with the layer it belongs to."""

    layer: Layer
    op: Op
    backward: bool = False


def phase_ops(layers: Sequence[Layer], kind: Kind) -> list[Issued]:
    """The ops of one slot in the order in which they are issued.

    A whole backward hands its gradient on when it has ended, as autograd does; a split one after its input
    half.
    """
    if kind is Kind.FORWARD:
        return [Issued(layer, op) for layer in layers for op in layer.forward]
    phases = {
        Kind.BACKWARD: (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
        Kind.INPUT: (Phase.INPUT_GRADIENT,),
        Kind.WEIGHT: (Phase.WEIGHT_GRADIENT,),
    }[kind]
    return [
        Issued(layer, op, backward=True)
        for layer in reversed(layers)
        for phase in phases
        for op in layer.ops(phase)
    ]


def once_ops(layers: Iterable[Layer], phases: Sequence[Phase]) -> list[Issued]:
    """The ops of layers that run once per step, all their *phases* together."""
    return [Issued(layer, op) for layer in layers for phase in phases for op in layer.ops(phase)]


def used_groups(stages: Iterable[Stage]) -> tuple[Group, ...]:
    """The groups that communicate, in the order of the Group table."""
    used = {
        op.work.group
        for stage in stages
        for layer, _ in stage.counted_layers(1)
        for phase in Phase
        for op in layer.ops(phase)
        if isinstance(op.work, Collective | Transfer)
    }
    return tuple(group for group in Group if group in used)


def segment_of_ops(
    name: str,
    streams: Sequence[Sequence[Issued]],
    lanes: Lanes,
    seconds: Seconds,
    issue_s: IssueSeconds | None = None,
    takes: Seconds | None = None,
) -> Segment:
    """A segment of one slot, or of two that are interleaved; input and output k belong to stream k.

    *takes* is the share of the computing beside it that a work costs; None: nothing.
    """
    build = _Build(lanes, seconds, streams, issue_s, takes)
    for stream, issued in _interleaved(streams, seconds):
        build.issue(stream, issued)
    outputs = [build.output(stream) for stream in range(len(streams))]
    build.wait_for_the_rest()
    return Segment.of(name, build.ops, lanes=len(lanes.names), inputs=len(streams), outputs=outputs)


def _interleaved(streams: Sequence[Sequence[Issued]], seconds: Seconds) -> list[tuple[int, Issued]]:
    """Ops of all streams, each stream in its own order: always the op that can start first, so that one
    stream computes while the other communicates (DeepSeek-V3, 2024, section 3.2.1); of two the one whose
    stream has done less.
    """
    if len(streams) == 1:
        return [(0, issued) for issued in streams[0]]
    orders = [_Order(stream, seconds) for stream in streams]
    free_s: dict[Group | None, float] = {}
    placed = []
    while any(order.left for order in orders):
        starts = [
            (order.start_s(free_s), order.done_share, number)
            for number, order in enumerate(orders)
            if order.left
        ]
        start_s, _, number = min(starts)
        placed.append((number, orders[number].take(start_s, free_s)))
    return placed


class _Order:
    """One stream of ops, as far as it has been issued."""

    def __init__(self, ops: Sequence[Issued], seconds: Seconds) -> None:
        self.ops, self.at = ops, 0
        self.lengths_s = [seconds(issued.op.work) for issued in ops]
        self.total_s = sum(self.lengths_s) or 1.0
        self.done_s = self.ready_s = 0.0
        self.ended_s: dict[str, float] = {}

    @property
    def left(self) -> bool:
        return self.at < len(self.ops)

    @property
    def done_share(self) -> float:
        return self.done_s / self.total_s

    def start_s(self, free_s: dict[Group | None, float]) -> float:
        """When the next op can start: its lane is free, and what it waits for has ended."""
        op = self.ops[self.at].op
        named_s = max((self.ended_s.get(name, 0.0) for name in op.after), default=0.0)
        return max(self.ready_s, free_s.get(_lane_key(op), 0.0), named_s)

    def take(self, start_s: float, free_s: dict[Group | None, float]) -> Issued:
        issued, length_s = self.ops[self.at], self.lengths_s[self.at]
        end_s = start_s + length_s
        free_s[_lane_key(issued.op)] = self.ended_s[issued.op.name] = end_s
        if issued.op.blocking or not isinstance(issued.op.work, Collective | Transfer):
            self.ready_s = end_s
        self.done_s += length_s
        self.at += 1
        return issued


def _lane_key(op: Op) -> Group | None:
    return op.work.group if isinstance(op.work, Collective | Transfer) else None


class _Build:
    """The ops of one segment as they are issued."""

    def __init__(
        self,
        lanes: Lanes,
        seconds: Seconds,
        streams: Sequence[Sequence[Issued]],
        issue_s: IssueSeconds | None,
        takes: Seconds | None = None,
    ) -> None:
        self.lanes, self.seconds, self.takes = lanes, seconds, takes
        self.issue_s = issue_s
        self.ops: list[TimedOp] = []
        # Per stream: the last computation, the blocking communication that the next op waits for, and the
        # op that makes what is handed on.
        self.computed: list[int | None] = [None] * len(streams)
        self.awaited: list[tuple[int, ...]] = [()] * len(streams)
        self.made: list[int | None] = [None] * len(streams)
        self.named: list[dict[str, int]] = [{} for _ in streams]
        self.streams = streams
        self.elsewhere: dict[str, tuple[int, ...]] | None = None
        # What the host waits for before it issues more.
        self.read: tuple[int, ...] = ()

    def issue(self, stream: int, issued: Issued) -> None:
        work, layer = issued.op.work, issued.layer
        duration_s = self.seconds(work)
        communicates = isinstance(work, Collective | Transfer)
        if communicates and duration_s == 0:
            return
        name = layer.op_name(issued.op)
        after, lanes = self._named_waits(stream, issued.op)
        after += self.awaited[stream] + self._issued(issued)
        if communicates:
            assert isinstance(work, Collective | Transfer)
            if (computed := self.computed[stream]) is not None:
                after += (computed,)
            elif issued.op.blocking:
                lanes += (COMPUTE,)
            lane = self.lanes.of(work.group)
            ahead = not issued.op.blocking
            takes = self.takes(work) if self.takes else 0.0
            at = self._add(stream, name, duration_s + layer.process_s, lane, after, lanes, ahead, takes)
            if issued.op.blocking:
                self.awaited[stream] = (at,)
        else:
            at = self._add(stream, name, duration_s, COMPUTE, after, lanes)
            self.computed[stream] = at
            self.awaited[stream] = ()
        self.named[stream][issued.op.name] = at
        if issued.op.host_reads:
            self.read = (at,)
        if issued.op.blocking or not communicates:
            self.made[stream] = at

    def _issued(self, issued: Issued) -> tuple[int, ...]:
        """The host's own op, which an eager host ends before the work can start.

        It waits for results that it reads.
        """
        host = self.lanes.host_lane
        if self.issue_s is None or host is None or issued.layer.captured:
            return ()
        before, self.read = self.read, ()
        duration_s = self.issue_s(issued.op.work, issued.backward) * issued.op.kernels
        self.ops.append(TimedOp("issue", duration_s, host, before))
        return (len(self.ops) - 1,)

    def _named_waits(self, stream: int, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ops of this segment that *op* names, and the lanes of those that were issued in an earlier one."""
        if not op.after:
            return (), ()
        named = self.named[stream]
        here = tuple(named[name] for name in op.after if name in named)
        earlier = [name for name in op.after if name not in named]
        return here, tuple(dict.fromkeys(lane for name in earlier for lane in self._issued_in(name)))

    def _issued_in(self, name: str) -> tuple[int, ...]:
        """The lane of the communication called *name* in another phase of these layers; unknown, any."""
        if self.elsewhere is None:
            layers = {id(issued.layer): issued.layer for stream in self.streams for issued in stream}
            self.elsewhere = {
                op.name: (self.lanes.of(op.work.group),)
                for layer in layers.values()
                for phase in Phase
                for op in layer.ops(phase)
                if isinstance(op.work, Collective | Transfer)
            }
        return self.elsewhere.get(name, self.lanes.collectives)

    def _add(
        self,
        stream: int,
        name: str,
        duration_s: float,
        lane: int,
        after: tuple[int, ...],
        lanes: tuple[int, ...],
        ahead: bool = False,
        takes: float = 0.0,
    ) -> int:
        """Append an op. The first ops of a stream wait for its input, unless they run *ahead* of it."""
        begins = self.computed[stream] is None and not self.awaited[stream]
        inputs = (stream,) if begins and not ahead else ()
        self.ops.append(TimedOp(name, duration_s, lane, tuple(dict.fromkeys(after)), inputs, lanes, takes))
        return len(self.ops) - 1

    def wait_for_the_rest(self) -> None:
        """A blocking communication at the end holds up the next segment too."""
        awaited = tuple(at for stream in self.awaited for at in stream)
        if awaited:
            self.ops.append(TimedOp("wait", 0.0, COMPUTE, awaited))

    def output(self, stream: int) -> int:
        """The op that ends what the stream hands on; a stream that makes nothing passes its input on."""
        made = self.made[stream]
        if made is None:
            made = self.computed[stream]
        if made is None:
            made = self._add(stream, "nothing to do", 0.0, COMPUTE, (), ())
        return made
