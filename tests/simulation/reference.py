"""A slow event simulator, written without the engines: tasks, a clock, a heap."""

import heapq
import random
from collections import defaultdict, deque
from dataclasses import dataclass

from stepcast.simulation.program import Program, ProgramBuilder
from stepcast.simulation.segments import NO_LANE, Segment, TimedOp


def seconds_of(op: TimedOp) -> float:
    assert isinstance(op.cost, float)
    return op.cost


@dataclass(frozen=True)
class Piece:
    """A segment before it is compiled."""

    ops: tuple[TimedOp, ...]
    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    rank: int
    piece: int
    sources: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Plan:
    """A random program: the calls in an order in which they could run."""

    lanes: int
    ranks: int
    pieces: tuple[Piece, ...]
    calls: tuple[Call, ...]

    def program(self) -> Program:
        builder = ProgramBuilder(tuple(f"lane {lane}" for lane in range(self.lanes)), self.ranks)
        segments = [
            Segment.of(f"piece {number}", piece.ops, lanes=self.lanes, inputs=piece.inputs, outputs=piece.outputs)
            for number, piece in enumerate(self.pieces)
        ]
        for call in self.calls:
            builder.call(call.rank, segments[call.piece], call.sources)
        return builder.program()

    def in_program_order(self) -> list[int]:
        return sorted(range(len(self.calls)), key=lambda call: (self.calls[call].rank, call))


Task = tuple[int, int]


def waits(plan: Plan) -> tuple[dict[Task, set[Task]], dict[tuple[int, int], list[Task]]]:
    """For each task (call, op) the tasks it waits for, and for each lane of a rank its tasks in order."""
    needs: dict[Task, set[Task]] = {}
    lanes: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for number, call in enumerate(plan.calls):
        piece = plan.pieces[call.piece]
        for index, op in enumerate(piece.ops):
            found = {(number, earlier) for earlier in op.after}
            for port in op.inputs:
                source = call.sources[port]
                if source is not None:
                    found.add((source[0], plan.pieces[plan.calls[source[0]].piece].outputs[source[1]]))
            found |= {lanes[call.rank, lane][-1] for lane in op.lanes if lanes[call.rank, lane]}
            needs[number, index] = found
            if op.lane != NO_LANE:
                lanes[call.rank, op.lane].append((number, index))
    return needs, lanes


def event_simulation(plan: Plan, durations: dict[Task, float]) -> dict[Task, tuple[float, float]]:
    """Start and end of every task: a task starts when it heads its lane, the lane is idle and its needs are
    done."""
    needs, lanes = waits(plan)
    queues = {lane: deque(tasks) for lane, tasks in lanes.items()}
    loose = [task for task in needs if plan.pieces[plan.calls[task[0]].piece].ops[task[1]].lane == NO_LANE]
    running: dict[tuple[int, int], Task] = {}
    spans: dict[Task, tuple[float, float]] = {}
    done: set[Task] = set()
    clock, heap = 0.0, []  # type: float, list[tuple[float, Task, tuple[int, int] | None]]
    while True:
        started = True
        while started:
            started = False
            for lane, queue in queues.items():
                if queue and lane not in running and needs[queue[0]] <= done:
                    task = queue.popleft()
                    running[lane] = task
                    spans[task] = clock, clock + durations[task]
                    heapq.heappush(heap, (spans[task][1], task, lane))
                    started = True
            for task in [task for task in loose if needs[task] <= done]:
                loose.remove(task)
                spans[task] = clock, clock + durations[task]
                heapq.heappush(heap, (spans[task][1], task, None))
                started = True
        if not heap:
            break
        clock, task, owner = heapq.heappop(heap)
        done.add(task)
        if owner is not None:
            del running[owner]
    assert len(done) == len(needs), "the reference simulator ran into a deadlock"
    return spans


def random_plan(rng: random.Random) -> Plan:
    """A program with everything in it: several lanes, waits across ranks, ops without a lane, zero
    durations."""
    lanes, ranks = rng.randint(1, 3), rng.randint(1, 4)
    pieces = tuple(_random_piece(rng, lanes) for _ in range(rng.randint(1, 4)))
    calls: list[Call] = []
    for _ in range(rng.randint(1, 14)):
        piece = rng.randrange(len(pieces))
        sources = tuple(_random_source(rng, pieces, calls) for _ in range(pieces[piece].inputs))
        calls.append(Call(rng.randrange(ranks), piece, sources))
    return Plan(lanes, ranks, pieces, tuple(calls))


def _random_source(rng: random.Random, pieces: tuple[Piece, ...], calls: list[Call]) -> tuple[int, int] | None:
    able = [number for number, call in enumerate(calls) if pieces[call.piece].outputs]
    if not able or rng.random() < 0.2:
        return None
    call = rng.choice(able)
    return call, rng.randrange(len(pieces[calls[call].piece].outputs))


def _random_piece(rng: random.Random, lanes: int) -> Piece:
    count, inputs = rng.randint(0, 6), rng.randint(0, 2)
    ops, loose = [], []
    for index in range(count):
        after = tuple(sorted(rng.sample(range(index), rng.randint(0, min(index, 2)))))
        ports = tuple(port for port in range(inputs) if rng.random() < 0.4)
        awaited = tuple(lane for lane in range(lanes) if rng.random() < 0.2)
        lane = rng.randrange(lanes)
        if (after or ports or awaited) and rng.random() < 0.2:
            lane = NO_LANE
            loose.append(index)
        duration_s = rng.choice((0.0, 1.0, rng.random(), 10 * rng.random()))
        ops.append(TimedOp(f"op {index}", duration_s, lane, after, ports, awaited))
    outputs = [rng.randrange(count) for _ in range(rng.randint(0, 2))] if count else []
    return Piece(tuple(ops), inputs, (*outputs, *loose))
