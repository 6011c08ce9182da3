"""The use of links while a step ran, how that slowed its communication, and the breakdown of its time."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import Links
from stepcast.ir.layout import Channel, Group
from stepcast.ir.types import FactDict, dataclass, pick, sum_by_key
from stepcast.simulation.breakdown import StageTime, round_bubble_s
from stepcast.simulation.fluid.engine import FluidRun, Pairs
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.program import Times
from stepcast.simulation.step import Step

# Where the time of a step went, from the start and end of every task.
#
# As ``simulation.breakdown`` tells it of the folded engine: on each stage every moment is computing, waiting
# while a communication of some group runs, waiting for the host, or the bubble.


def stage_times_of(step: Step, times: Times, waits: Pairs) -> tuple[StageTime, ...]:
    """Return the breakdown of every stage of *step*, from the start and end of every task."""
    program, lanes = step.program.written_out, step.lanes
    groups: tuple[Channel, ...] = tuple(dict.fromkeys([Group.PP, *lanes.groups]))
    lane_of, rank_of = program.task_lanes(), program.rank[program.task_calls()]
    is_optimizer = program.per_task(
        [
            np.isin(np.arange(segment.shape.ops), list(segment.piece.optimizer_ops)).astype(np.int64)
            for segment in program.segments
        ]
    )
    message_s = np.zeros(0) if lanes.receives else _message_waits_s(times, waits, rank_of, lane_of, step)
    by_rank = np.split(np.arange(program.tasks), program.task_start[program.table.rank_start[1:-1]])
    stages = []
    for stage in range(step.schedule.stages):
        own = by_rank[stage]
        computing = own[lane_of[own] == COMPUTE]
        # The gaps before each task that computes, in which the stage did not compute.
        from_s = np.concatenate([[0.0], times.end_s[computing[:-1]]]) if len(computing) else np.zeros(0)
        to_s = np.maximum(times.start_s[computing], from_s)
        left_s = to_s - from_s
        exposed = dict.fromkeys(groups, 0.0)
        total = dict.fromkeys(groups, 0.0)
        host_s = 0.0
        for lane in range(1, len(lanes.lanes)):
            tasks = own[lane_of[own] == lane]
            group = lanes.group(lane)
            if group is not None:
                total[group] += float((times.end_s[tasks] - times.start_s[tasks]).sum())
            if group is Group.PP and not lanes.receives:
                continue  # a message in the sender's own lane holds nobody up
            part = np.minimum(_busy_s(tasks, times, from_s, to_s), left_s)
            left_s = left_s - part
            if group is None:
                host_s += float(part.sum())
            else:
                exposed[group] += float(part.sum())
        if len(message_s):
            exposed[Group.PP] += float(np.minimum(message_s[computing], left_s).sum())
        for group in groups if lanes.receives else groups[1:]:
            exposed[group] = min(exposed[group], total[group])
        seconds = times.end_s[computing] - times.start_s[computing]
        optimizer_s = float(seconds[is_optimizer[computing] > 0].sum())
        compute_s = float(seconds.sum()) - optimizer_s
        bubble = times.makespan_s - compute_s - optimizer_s - host_s - sum(exposed.values())
        stages.append(
            StageTime(
                stage=stage,
                compute_s=compute_s,
                optimizer_s=optimizer_s,
                exposed_s=exposed,
                host_s=host_s,
                bubble_s=round_bubble_s(bubble, times.makespan_s),
                communication_s=total,
            )
        )
    return tuple(stages)


def _busy_s(tasks: IntArray, times: Times, from_s: FloatArray, to_s: FloatArray) -> FloatArray:
    """Return for how long of each gap one of *tasks*, which follow one another, runs."""
    if not len(tasks):
        return np.zeros(len(from_s))
    start_s, end_s = times.start_s[tasks], times.end_s[tasks]
    at_s = np.ravel(np.column_stack([start_s, end_s]))
    busy_s = np.concatenate([[0.0], np.cumsum(end_s - start_s)])
    before = np.ravel(np.column_stack([busy_s[:-1], busy_s[1:]]))
    until, since = (np.interp(moment_s, at_s, before) for moment_s in (to_s, from_s))
    return np.asarray(until - since, np.float64)


def _message_waits_s(times: Times, waits: Pairs, rank_of: IntArray, lane_of: IntArray, step: Step) -> FloatArray:
    """Return for each task that computes how long its stage waited for a message under way to it."""
    sent, waiting = waits
    messages = (lane_of >= 1) & (lane_of <= len(step.lanes.messages))
    across = messages[sent] & (rank_of[sent] != rank_of[waiting]) & (rank_of[waiting] < step.schedule.stages)
    sent, waiting = sent[across], waiting[across]
    # The first task that computes after it, in the same rank; tasks of a rank follow one another.
    computing = np.flatnonzero(lane_of == COMPUTE)
    next_index = np.searchsorted(computing, waiting)
    known = next_index < len(computing)
    first = computing[np.minimum(next_index, len(computing) - 1)] if len(computing) else waiting
    known &= rank_of[first] == rank_of[waiting]
    sent, first = sent[known], first[known]
    place = np.searchsorted(computing, first)
    same = (place > 0) & (rank_of[computing[place - 1]] == rank_of[first])
    free_s = np.where(same, times.end_s[computing[place - 1]], 0.0)
    taken_s = np.minimum(times.end_s[sent] - free_s, times.end_s[sent] - times.start_s[sent])
    waits_s = np.zeros(len(lane_of))
    np.maximum.at(waits_s, first, np.clip(taken_s, 0.0, None))
    return waits_s


# Rates that hold for a while, summed over bins of time.


def bin_rates(
    row: IntArray, from_s: FloatArray, to_s: FloatArray, rate: FloatArray, rows: int, edges_s: FloatArray
) -> FloatArray:
    """Return rows x bins: the time integral of the *rate* of each span in the bins that it touches."""
    bins = len(edges_s) - 1
    width_s = edges_s[-1] / bins if bins and edges_s[-1] > 0 else 0.0
    if not len(row) or width_s == 0:
        return np.zeros((rows, bins))
    from_s, to_s = np.minimum(from_s, edges_s[-1]), np.minimum(to_s, edges_s[-1])
    first = np.minimum((from_s / width_s).astype(np.int64), bins - 1)
    last = np.minimum((to_s / width_s).astype(np.int64), bins - 1)
    # The part that a span fills of its first and its last bin, and the full bins between.
    inside = first == last
    head = np.where(inside, to_s - from_s, (first + 1) * width_s - from_s)
    tail = np.where(inside, 0.0, to_s - last * width_s)
    size = rows * bins
    total = np.bincount(row * bins + first, rate * head, size) + np.bincount(row * bins + last, rate * tail, size)
    change = np.zeros(rows * (bins + 1))
    long = ~inside
    np.add.at(change, row[long] * (bins + 1) + first[long] + 1, rate[long] * width_s)
    np.add.at(change, row[long] * (bins + 1) + last[long], -rate[long] * width_s)
    whole = np.cumsum(change.reshape(rows, bins + 1), axis=1)[:, :bins]
    return np.asarray(total.reshape(rows, bins) + whole, np.float64)


BINS = 120
FULL = 0.95
"""A link that carries this share of its capacity is full: a collective alone comes to no more than 99 %."""


@dataclass(frozen=True)
class TrafficOwner:
    """The owner of some traffic."""

    name: str  # the group (dp, pp, ep), or another job
    what: str  # the kind of its operations: all-reduce, send activations
    stage: int | None = None


@dataclass(frozen=True)
class OperationTimes:
    """OperationTimes of one kind: how often they ran, how long they took, and would have taken alone."""

    who: TrafficOwner
    count: int
    alone_s: float
    took_s: float
    slowest: float  # the most by which one of them was slower than alone, as a factor

    @property
    def slowdown(self) -> float:
        return self.took_s / self.alone_s if self.alone_s > 0 else 1.0

    def facts(self) -> dict[str, object]:
        owner = "group=who.name operation=who.what stage=who.stage"
        return pick(self, f"{owner} count alone_s took_s slowdown slowest")


@dataclass(frozen=True)
class HotLink:
    """A link, how much it carried, and for whom."""

    link: int
    name: str
    tier: str
    equal_links: int  # links that did the same, itself included
    carried_bytes: float
    share: float  # of what it could have carried in the whole step
    full_s: float  # how long no more would have gone over it
    users: Mapping[str, float]  # bytes by the group that sent them, most first
    share_in: FloatArray  # in each bin

    def facts(self) -> dict[str, object]:
        return {
            **pick(self, "link=name tier"),
            "alike": self.equal_links,
            **pick(self, "bytes=carried_bytes share full_s"),
            "users": dict(self.users),
            "share_over_time": self.share_in.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Observed:
    """The use of links from the start of a step to its end, in bins of equal length.

    Links of one class did the same: rows of links are by class, and ``class_of`` has the class of each link.
    """

    run: FluidRun
    who: tuple[TrafficOwner, ...]  # of each set of the traffic
    bins: int = BINS

    @property
    def links(self) -> Links:
        return self.run.shared.traffic.links

    @property
    def step_s(self) -> float:
        return self.run.makespan_s

    @cached_property
    def edges_s(self) -> FloatArray:
        return np.linspace(0.0, self.step_s, self.bins + 1)

    @property
    def class_of(self) -> IntArray:
        """The class of each link."""
        return self.run.shared.traffic.flow_classes.link

    @cached_property
    def class_links(self) -> IntArray:
        """The number of links of each class."""
        return np.bincount(self.class_of)

    @cached_property
    def _first_link(self) -> IntArray:
        """One link of each class."""
        return np.unique(self.class_of, return_index=True)[1]

    @cached_property
    def class_tier(self) -> IntArray:
        return self.links.tier[self._first_link]

    @cached_property
    def level_s(self) -> FloatArray:
        """Classes of flows x bins: the time integral of their levels."""
        run, traffic = self.run, self.run.shared.traffic
        classes, fluid = traffic.classes, run.fluid_times
        total = bin_rates(
            run.system.class_of[fluid.flow], fluid.from_s, fluid.to_s, fluid.level, len(classes.amount), self.edges_s
        )
        of_set, from_s, to_s, pace = self._unslowed
        if len(of_set):
            per_set = bin_rates(of_set, from_s, to_s, pace, len(traffic.sets), self.edges_s)
            total += classes.amount[:, None] * per_set[classes.set_of]
        return total

    @cached_property
    def _unslowed(self) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
        """OperationTimes that share no link that could be short: their set, start, end, and share of it a second.

        They run at one pace, so the engine records no rates of theirs.
        """
        run, shared = self.run, self.run.shared
        tasks = np.flatnonzero(np.append(run.system.is_fixed, False)[shared.flows_of])
        of_set = shared.flows_of[tasks]
        until_s = run.fluid_times.end_s[tasks] - shared.tail_s[tasks]
        return of_set, run.fluid_times.start_s[tasks], until_s, (1.0 / shared.traffic.alone_s)[of_set]

    @cached_property
    def bytes_in(self) -> FloatArray:
        """Classes of links x bins: the bytes that one link of each carried."""
        return self._carried(self.level_s)

    def _carried(self, level_s: FloatArray) -> FloatArray:
        classes = self.run.shared.traffic.classes
        flow, link, bytes_on = classes.entries
        carried = np.zeros((len(classes.capacity), level_s.shape[1]))
        use = bytes_on / classes.amount[flow]
        order = np.argsort(link, kind="stable")
        if len(order):
            present, first = np.unique(link[order], return_index=True)
            carried[present] = np.add.reduceat(use[order, None] * level_s[flow[order]], first, axis=0)
        return carried

    @cached_property
    def share_in(self) -> FloatArray:
        """Classes of links x bins: how much of its capacity one link of each used: rows of a heat map."""
        width_s = self.step_s / self.bins if self.step_s else 1.0
        return self.bytes_in / (self.links.capacity_bytes_per_s[self._first_link] * width_s)[:, None]

    @cached_property
    def tier_share(self) -> FloatArray:
        """Tiers x bins: how much of the capacity of all its links was used."""
        capacity = self.links.capacity_bytes_per_s[self._first_link] * self.class_links
        capacities = np.bincount(self.class_tier, capacity, len(self.links.tiers))
        used = self._by_tier(self.share_in * capacity[:, None], np.add)
        return np.divide(used, capacities[:, None], out=np.zeros_like(used), where=capacities[:, None] > 0)

    @cached_property
    def tier_busiest(self) -> FloatArray:
        """Tiers x bins: how much of its capacity the busiest link used."""
        return self._by_tier(self.share_in, np.maximum)

    def _by_tier(self, values: FloatArray, join: np.ufunc) -> FloatArray:
        joined = np.zeros((len(self.links.tiers), self.bins))
        join.at(joined, self.class_tier, values)
        return joined

    @cached_property
    def link_bytes(self) -> FloatArray:
        """The bytes that each link carried."""
        total: FloatArray = self.bytes_in.sum(axis=1)[self.class_of]
        return total

    def hottest(self, most: int = 10) -> tuple[HotLink, ...]:
        """Return the links that used most of their capacity, one for each class."""
        classes = self.run.shared.traffic.classes
        total = self.bytes_in.sum(axis=1)
        share = total / (classes.capacity * max(self.step_s, 1e-300))
        order = np.lexsort((self._first_link, -share))[:most].tolist()
        used = [number for number in order if total[number] > 0]
        return tuple(self._describe_link(number, float(total[number]), float(share[number])) for number in used)

    def _describe_link(self, link_class: int, total: float, share: float) -> HotLink:
        classes = self.run.shared.traffic.classes
        flow, link, bytes_on = classes.entries
        here = np.flatnonzero(link == link_class)
        moved = bytes_on[here] / classes.amount[flow[here]] * self.level_s[flow[here]].sum(axis=1)
        names = (self.who[number].name for number in classes.set_of[flow[here]].tolist())
        users = sum_by_key(zip(names, moved.tolist(), strict=True))
        first = int(self._first_link[link_class])
        return HotLink(
            first,
            self.links.name(first),
            self.links.tiers[int(self.links.tier[first])],
            int(self.class_links[link_class]),
            total,
            share,
            self._full_s(link_class, here),
            dict(sorted(users.items(), key=lambda item: (-item[1], item[0]))),
            self.share_in[link_class],
        )

    def _full_s(self, link_class: int, entries: IntArray) -> float:
        """Return how long a link of class *link_class* was full, from the rates of all that crosses it."""
        run, classes = self.run, self.run.shared.traffic.classes
        fluid = run.fluid_times
        flow, _, bytes_on = classes.entries
        use = np.zeros(len(classes.amount))
        use[flow[entries]] = bytes_on[entries] / classes.amount[flow[entries]]
        takes = use[run.system.class_of[fluid.flow]] * fluid.level
        of_set, from_s, to_s, pace = self._unslowed
        bytes_of_set = np.bincount(classes.set_of[flow[entries]], bytes_on[entries], len(run.shared.traffic.sets))
        takes = np.concatenate([takes, bytes_of_set[of_set] * pace])
        mine = takes > 0
        starts = np.concatenate([fluid.from_s, from_s])[mine]
        times = np.concatenate([starts, np.concatenate([fluid.to_s, to_s])[mine]])
        change = np.concatenate([takes[mine], -takes[mine]])
        order = np.argsort(times, kind="stable")
        taken = np.cumsum(change[order])[:-1]
        lasts = np.diff(np.minimum(times[order], self.step_s))
        return float(lasts[taken >= FULL * classes.capacity[link_class]].sum())

    @cached_property
    def operations(self) -> tuple[OperationTimes, ...]:
        """The operations of the step by owner and kind, the most slowed first."""
        run, shared = self.run, self.run.shared
        number: dict[TrafficOwner, int] = {}
        of_set = np.array([number.setdefault(owner, len(number)) for owner in self.who], np.int64)
        tasks = np.flatnonzero(shared.flows_of >= 0)
        row = of_set[shared.flows_of[tasks]]
        tail_s = (shared.tail_s - shared.still_s)[tasks]
        took = run.fluid_times.end_s[tasks] - run.fluid_times.start_s[tasks] - tail_s
        alone = shared.duration_s[tasks] - tail_s
        slowest = np.ones(len(number))
        np.maximum.at(slowest, row, took / np.maximum(alone, 1e-300))
        counts = np.bincount(row, minlength=len(number))
        sums = [np.bincount(row, seconds, len(number)) for seconds in (alone, took)]
        operations = [
            OperationTimes(who, int(counts[index]), float(sums[0][index]), float(sums[1][index]), float(slowest[index]))
            for who, index in number.items()
            if counts[index]
        ]
        return tuple(sorted(operations, key=lambda operation: -operation.slowdown))

    def _tier_facts(self, index: int, tier: str) -> dict[str, object]:
        mine = self.links.tier == index
        return {
            "tier": tier,
            "links": int(mine.sum()),
            # Of the slowest, where they differ.
            "capacity_bytes_per_s": float(self.links.capacity_bytes_per_s[mine].min(initial=np.inf)),
            "bytes": float(self.link_bytes[mine].sum()),
            "share": float(self.tier_share[index].mean()),
            "busiest_share": float(self.tier_busiest[index].max(initial=0.0)),
            "share_over_time": self.tier_share[index].tolist(),
            "busiest_over_time": self.tier_busiest[index].tolist(),
        }

    def facts(self, most: int = 10) -> FactDict:
        """Return plain values, as the command line prints with ``--json``."""
        return {
            "step_s": self.step_s,
            "links": len(self.links),
            "tiers": [self._tier_facts(index, tier) for index, tier in enumerate(self.links.tiers)],
            "hottest": [link.facts() for link in self.hottest(most)],
            "operations": [operation.facts() for operation in self.operations],
        }
