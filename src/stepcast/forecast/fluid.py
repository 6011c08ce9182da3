"""A step whose communication shares the network: its operations as flows over the links of its cluster."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np

from stepcast.cost.collectives.choose import Algorithm, CollectivePrice, price
from stepcast.cost.collectives.flows import collective_flows, message_flows, transfer_flows
from stepcast.cost.pricing import Pricer, crossing_share
from stepcast.hardware import Cluster, Place
from stepcast.hardware.cluster import NetworkKind
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.flows import FlowSet, Repeating
from stepcast.ir.layout import Group, Layout
from stepcast.ir.types import dataclass
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer
from stepcast.simulation.breakdown import StageTime
from stepcast.simulation.engine import spread_seconds
from stepcast.simulation.fluid.engine import FluidRun, SharedProgram, Traffic, simulate_fluid, transfers, waits_of
from stepcast.simulation.fluid.filling import SAME
from stepcast.simulation.fluid.observed import Observed, TrafficOwner, stage_times_of
from stepcast.simulation.lanes import SEND_NAMES
from stepcast.simulation.seconds import in_ticks
from stepcast.simulation.step import Step

MOST_STILL = 0.999
"""The most of a price that is latency: the rest moves its few bytes."""


def without_sharing(cluster: Cluster) -> Cluster:
    """Return *cluster* as each group would find it by itself: short switches and failed links come later."""
    topology = replace(cluster.topology, oversubscription=1.0, pod_oversubscription=1.0, failed=(), slow=())
    if topology.kind is NetworkKind.DRAGONFLY:  # whose links are few even where they are not short
        topology = replace(topology, kind=NetworkKind.FAT_TREE)
    return cluster if topology == cluster.topology else replace(cluster, topology=topology)


@dataclass(frozen=True, eq=False)
class FluidStep:
    """A step run by the fluid engine."""

    step: Step
    run: FluidRun
    who: tuple[TrafficOwner, ...]

    @cached_property
    def observed(self) -> Observed:
        """The use of the links."""
        return Observed(self.run, self.who)

    def stage_times(self) -> tuple[StageTime, ...]:
        return stage_times_of(self.step, self.run.times, self.run.shared.waits)


def run_fluid(
    step: Step,
    pricer: Pricer,
    cluster: Cluster,
    others: Sequence[Repeating] = (),
    *,
    nodes: int | None = None,
    compiled: bool | None = None,
) -> FluidStep:
    """Run *step*, whose prices are those of *pricer* for each group alone, on *cluster* together with *others*.

    *nodes*: of the cluster, where others use more than the step does.
    """
    seats, network = _seat_ranks(cluster, pricer.layout, pricer.place, nodes)
    shared, who = _FlowBuilder(step, pricer, network, seats).build(others)
    return FluidStep(step, simulate_fluid(shared, compiled=compiled), who)


def _seat_ranks(cluster: Cluster, layout: Layout, place: Place, nodes: int | None = None) -> tuple[IntArray, Network]:
    """Return the GPU of each rank, and the network of the nodes that they need or of so many *nodes*."""
    seats = seats_of(cluster, layout, place)
    return seats, network_of(cluster, nodes or ceil((int(seats.max()) + 1) / cluster.node.gpus))


def share_step(step: Step, pricer: Pricer, network: Network, seats: IntArray) -> SharedProgram:
    """Return the tasks of *step* as flows on *network*, where its ranks have *seats*."""
    return _FlowBuilder(step, pricer, network, seats).build(())[0]


class _FlowBuilder:
    """Finds the tasks of a step that are flows, and their flows."""

    def __init__(self, step: Step, pricer: Pricer, network: Network, seats: IntArray) -> None:
        self.step, self.pricer, self.network, self.seats = step, pricer, network, seats
        self.program = step.program.written_out
        self.layout = replace(pricer.layout, vpp=1)
        # Of each set of flows: its place, its times alone and of latency, and whose it is.
        self.sets: list[tuple[FlowSet, int, float, float, TrafficOwner]] = []
        self.known: dict[object, FlowSet] = {}

    def build(self, others: Sequence[Repeating]) -> tuple[SharedProgram, tuple[TrafficOwner, ...]]:
        """Return the program with its flows and those of *others*, and the owner of each set of flows."""
        program = self.program
        waits = waits_of(program)
        works, delays = zip(*self.step.works, strict=True)
        seconds = self.step.program.write_out_seconds(spread_seconds(self.step.program, self.step.base_seconds))
        # Ops of one work are one kind of cost.
        first: dict[int, int] = {}
        cost_of_op = np.array(
            [first.setdefault(id(work), op) if work else op for op, work in enumerate(works)], np.int64
        )
        ops = [program.ops_of[number] for ((number, _),) in program.chains]
        place = program.per_task([np.arange(own.start, own.stop) for own in ops])
        cost, lane = cost_of_op[place], program.task_lanes()
        rank = program.rank[program.task_calls()]
        peer = _find_peers(rank, waits, self.step.schedule.stages)
        peer[:, (lane < 1) | (lane > len(self.step.lanes.messages))] = -1
        duration_s = seconds[cost]
        tails = in_ticks(np.array(delays, np.float64))
        sends = np.array([isinstance(work, Collective | Transfer) for work in works], bool)
        flows_of = np.full(program.tasks, -1, np.int64)
        chosen = np.flatnonzero(sends[cost] & (lane >= 0) & (duration_s > tails[cost]))
        keys = np.stack([cost[chosen], rank[chosen], lane[chosen], *peer[:, chosen]], axis=1)
        distinct, index = np.unique(keys, axis=0, return_inverse=True)
        lanes = len(program.lanes)
        kinds = np.full(len(distinct), -1, np.int64)
        for number, (cost_number, of_rank, of_lane, source, target) in enumerate(distinct.tolist()):
            work = works[cost_number]
            assert isinstance(work, Collective | Transfer)
            price_s = float(seconds[cost_number] - tails[cost_number])
            # In this part of its time it waits for what is on its way and sends nothing: sharing does not change it.
            share = min(self.pricer.start_share(work), MOST_STILL)
            still_s = float(in_ticks(np.array([price_s * share]))[0])
            flows, who = self.find_flows(work, of_rank, of_lane, source, target, price_s - still_s)
            if flows is not None and (flows.bytes_on > 0).any():
                kinds[number] = len(self.sets)
                self.sets.append((flows, of_rank * lanes + of_lane, price_s - still_s, still_s, who))
        flows_of[chosen] = kinds[index.ravel()]
        repeats = []
        for number, other in enumerate(others):
            owner = TrafficOwner(other.name, "other traffic")
            repeats.append((len(self.sets), other.start_s, other.period_s))
            self.sets.append((other.flows, program.ranks * lanes + number, other.alone_s, 0.0, owner))
        sets, places, alone_s, all_still_s, owners = zip(*self.sets, strict=True) if self.sets else ((),) * 5
        traffic = Traffic(self.network.links, sets, np.array(places, np.int64), np.array(alone_s))
        latency_s = np.array([*all_still_s, 0.0])[flows_of]
        tail_s = np.where(flows_of >= 0, tails[cost], 0.0) + latency_s
        shared = SharedProgram(program, duration_s, traffic, flows_of, tail_s, waits, repeats, latency_s)
        return shared, owners

    def find_flows(
        self, work: Collective | Transfer, rank: int, lane: int, source: int, target: int, price_s: float
    ) -> tuple[FlowSet | None, TrafficOwner]:
        """Return what *work* in *lane* of *rank* sends; from stage *source* to *target* if it is a message between
        stages.
        """
        lanes = self.step.lanes
        group = str(lanes.group(lane))
        if 1 <= lane <= len(lanes.messages):
            if lane > len(SEND_NAMES):  # a receive waits for where it comes from
                source, target = target, source
            owner = TrafficOwner(group, lanes.lanes[lane].removeprefix("pp "), source)
            assert isinstance(work, Transfer)
            return self.find_message(work, source, target, price_s), owner
        kind = str(work.kind) if isinstance(work, Collective) else str(work.direction)
        return self.find_exchange(work, rank, price_s), TrafficOwner(group, kind, rank)

    def find_message(self, work: Transfer, source: int, target: int, price_s: float) -> FlowSet | None:
        if min(source, target) < 0:
            return None
        key = (work, source, target, price_s)
        if key not in self.known:
            layout = self.pricer.layout
            places = np.arange(layout.rank_of_stage(1))
            ends = [self.seats[layout.rank_of_stage(stage) + places] for stage in (source, target)]
            # Messages that both sides stop for have a task on each.
            size = np.full(len(places), work.size_bytes / (2 if self.step.lanes.receives else 1))
            self.known[key] = message_flows(self.network, ends[0], ends[1], size, price_s)
        return self.known[key]

    def find_exchange(self, work: Collective | Transfer, stage: int, price_s: float) -> FlowSet | None:
        if isinstance(work, Transfer):
            if work.direction is Direction.RECEIVE:
                return None  # its sender has the flows
            return transfer_flows(self.network, self.seats, self.layout, work, price_s, stage=stage)
        algorithm = self.pricer.choose(work).algorithm
        if algorithm is None:
            return None
        crossing = 1.0
        if work.kind is CollectiveKind.ALL_TO_ALL and work.group is Group.EP and self.pricer.once_per_node:
            nodes = self.pricer.route(work.group).nodes
            crossing = crossing_share(nodes, self.pricer.once_per_node) if nodes > 1 else 1.0
        return collective_flows(
            self.network, self.seats, self.layout, work, algorithm, price_s, stage=stage, crossing=crossing
        )


def _find_peers(rank: IntArray, waits: tuple[IntArray, IntArray], stages: int) -> IntArray:
    """Return 2 x tasks: the stages that each task is between, if it waits for a task of another rank or one of another
    rank waits for it; of others its own.

    A message in its sender's lane is waited for by its receiver. One that has a rank of its own waits for
    both and its receiver waits for it. One that both stop for waits, on each side, for the other.
    """
    peers = np.stack([rank, np.full_like(rank, -1)])
    before, after = waits
    across = rank[before] != rank[after]
    before, after = before[across], after[across]
    # Waits for another rank: the other is where it comes from, or where it goes.
    peers[1, after] = rank[before]
    peers[1, before] = np.where(rank[after] < stages, rank[after], peers[1, before])
    apart = rank >= stages
    own = apart[after]
    target = peers[1, after[own]]
    source = np.where(rank[before[own]] != target, rank[before[own]], -1)
    peers[0, apart] = -1
    np.maximum.at(peers[0], after[own], source)
    return peers


@dataclass(frozen=True, eq=False)
class SharedCollective:
    """A collective that all groups of its family run at once."""

    alone: CollectivePrice
    seconds: float
    network: Network
    flows: FlowSet
    near: float = 0.0  # changes of rates below this share were not followed

    @property
    def slowdown(self) -> float:
        """The slowdown against one group alone on a network that is nowhere short."""
        return self.seconds / self.alone.seconds if self.alone.seconds > 0 else 1.0

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.alone.busbw_bytes_per_s / self.slowdown

    @cached_property
    def busy(self) -> FloatArray:
        """The share of the time that each link is busy."""
        links = self.network.links
        carried = self.flows.on_links(len(links)) / links.capacity_bytes_per_s
        return carried / self.seconds if self.seconds > 0 else carried

    def busiest(self, most: int = 5) -> list[tuple[str, float]]:
        """Return the busiest links and the share of the time that each is busy."""
        order = np.argsort(-self.busy, kind="stable")[:most].tolist()
        names = self.network.links.name
        return [(names(link), float(self.busy[link])) for link in order if self.busy[link] > 0]


def shared_collective(
    cluster: Cluster,
    layout: Layout,
    work: Collective,
    algorithm: Algorithm | None = None,
    *,
    place: Place = Place.EVEN,
    crossing: float = 1.0,
) -> SharedCollective:
    """Run *work* by all its groups in *layout* at once, on the links of *cluster*."""
    pricer = Pricer(without_sharing(cluster), layout, place=place, alone=True)
    alone = price(work.kind, work.size_bytes, pricer.route(work.group), algorithm)
    seats, network = _seat_ranks(cluster, layout, place)
    if alone.algorithm is None:
        empty = FlowSet.of(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))
        return SharedCollective(alone, alone.seconds, network, empty)
    still_s = alone.seconds * min(alone.start_share, MOST_STILL)
    moving_s = alone.seconds - still_s
    flows = collective_flows(network, seats, layout, work, alone.algorithm, moving_s, crossing=crossing)
    times = transfers(network.links, flows, alone_s=np.full(len(flows), moving_s))
    slowed = float((times.end_s / moving_s).max(initial=1.0)) > 1 + SAME
    seconds = float(times.end_s.max()) + still_s if slowed else alone.seconds
    return SharedCollective(alone, seconds, network, flows, 0.0 if times.exact else times.near)
