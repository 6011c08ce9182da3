"""A Recording run again on the links of a cluster: meetings that fall together share them.

A meeting takes the time that it took, or that a change gave it, where its links have room for that: what
groups did to each other in the measured run is in its times, and is not added again. Where changes bring more
together than the links can carry, it takes longer.
"""

from math import ceil

import numpy as np

from stepcast.analyze.play import Played, played, script_of
from stepcast.analyze.recording import Meeting, Recording
from stepcast.cost.collectives import price, route_of
from stepcast.cost.collectives.flows import collective_flows, members_of, message_flows
from stepcast.hardware import Cluster
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.hardware.path import resolve
from stepcast.ir.flows import FlowSet, Ints
from stepcast.ir.group import FAMILIES, Group
from stepcast.ir.ranks import RankGrid, grid_of
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.simulation.fluid.engine import Shared, simulate_fluid
from stepcast.simulation.fluid.system import Traffic, waits_of

KINDS = {str(kind): kind for kind in CollectiveKind}


def play_shared(recording: Recording, cluster: Cluster) -> Played:
    """Simulate *recording* on *cluster*."""
    gpus = recording.layout.gpus
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"the run has {gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")
    script = script_of(recording)
    program = script.program.written_out
    duration_s = program.task_durations_s()
    meetings = np.flatnonzero(program.rank[program.task_calls()] >= script.real_ranks)
    sending = _Sending(cluster, recording)
    sets: list[FlowSet] = []
    kinds = np.full(program.tasks, -1, np.int64)
    for task, number in zip(meetings.tolist(), script.meeting_of_rank, strict=True):
        flows = sending.flows(recording.meetings[number])
        if flows is not None and duration_s[task] > 0:
            kinds[task] = len(sets)
            sets.append(flows)
    tasks = np.flatnonzero(kinds >= 0)
    traffic = Traffic(
        sending.network.links,
        tuple(sets),
        np.arange(len(sets)),
        np.arange(len(sets)),
        duration_s[tasks][np.argsort(kinds[tasks])],
        np.ones(len(sets)),
    )
    shared = Shared(program, duration_s, traffic, kinds, np.zeros(program.tasks), waits_of(program))
    return played(script, simulate_fluid(shared, record=False).times)


class _Sending:
    """The flows of meetings."""

    def __init__(self, cluster: Cluster, recording: Recording) -> None:
        layout = recording.layout
        self.cluster, self.layout = cluster, layout
        self.grid: RankGrid = grid_of(layout)
        self.seats: Ints = seats_of(cluster, layout)
        nodes = ceil((int(self.seats.max()) + 1) / cluster.node.gpus)
        self.network: Network = network_of(cluster, nodes)
        self.rows = {
            family: {tuple(sorted(row)): at for at, row in enumerate(members_of(self.grid, family).tolist())}
            for family in FAMILIES
            if family != Group.WORLD
        }
        self.known: dict[object, FlowSet] = {}

    def flows(self, meeting: Meeting) -> FlowSet | None:
        """None of what moves nothing that is known, or between ranks that are no group."""
        size, members = meeting.size_bytes, meeting.members
        if not size or len(members) < 2 or meeting.transfer_s <= 0:
            return None
        if meeting.kind == "message":
            ends = members[::-1] if "backward" in meeting.name else members
            source, target = self.seats[list(ends)][:, None]
            return message_flows(self.network, source, target, np.array([float(size)]), meeting.transfer_s)
        row = self.rows.get(meeting.group, {}).get(tuple(members))
        if row is None or meeting.kind not in KINDS:
            return None
        work = Collective(KINDS[meeting.kind], size, Group(meeting.group))
        key = (work, meeting.transfer_s)
        if key not in self.known:
            path = resolve(self.cluster, self.seats[list(members)].tolist())
            algorithm = price(work.kind, size, route_of(path, self.cluster)).algorithm
            if algorithm is None:
                return None
            self.known[key] = collective_flows(
                self.network, self.seats, self.grid, work, algorithm, meeting.transfer_s
            )
        return self.known[key].of_group(row)
