"""Split backwards wait for what they name, and for nothing else: against a simulator of every single task."""

import pytest

from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind, Recorded, Work
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import simulate
from stepcast.simulation.schedule import ChunkPlace, Schedule, Slot, SlotAction
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.segments import TimedOp
from stepcast.simulation.step import build_step
from tests.simulation.reference import Call, Piece, Plan, event_simulation, seconds_of

STAGES, BATCHES = 4, 8
COMPUTE, TP, DP = 0, 1, 2
# Forward, gather of the backward, input gradient, weight gradient, reduction of the last weight gradient.
SECONDS = {"forward": 1.0, "gather": 0.4, "input": 1.1, "weight": 0.9, "reduce": 25.0}
LENGTHS = {Group.TP: SECONDS["gather"], Group.DP: SECONDS["reduce"]}


def layer(last: bool) -> Layer:
    gather = Op("gather", Collective(CollectiveKind.ALL_GATHER, 1, Group.TP), blocking=False)
    reduce = Op("reduce", Collective(CollectiveKind.REDUCE_SCATTER, 1, Group.DP), blocking=False)
    weight = Op("weight", Recorded(SECONDS["weight"]), after=("gather",))
    return Layer(
        "layer",
        (Op("forward", Recorded(SECONDS["forward"])),),
        (gather, Op("input", Recorded(SECONDS["input"]))),
        (weight, reduce) if last else (weight,),
    )


def seconds(work: Work) -> float:
    return work.duration_s if isinstance(work, Recorded) else LENGTHS[work.group]  # type: ignore[union-attr,index]


def built_s(schedule: Schedule) -> float:
    stage = Stage((Block((layer(False),)),), varied=((BATCHES - 1, (Block((layer(True),)),)),))
    layout = Layout(tp=2, dp=2, pp=STAGES, vpp=schedule.chunks)
    workload = Workload((stage,) * STAGES * schedule.chunks, layout, BATCHES)
    step = build_step(workload, schedule, Prices(seconds), 0.0)
    return simulate(step.program, step.seconds).makespan_s


def pieces() -> dict[tuple[SlotAction, bool], Piece]:
    """The ops of each kind of slot; the gather is output 0 of an input half and input 0 of a weight half."""

    def op(name: str, lane: int, after: tuple[int, ...] = (), inputs: tuple[int, ...] = ()) -> TimedOp:
        return TimedOp(name, SECONDS[name], lane, after, inputs)

    weight = op("weight", COMPUTE, inputs=(0,))
    return {
        (SlotAction.FORWARD, False): Piece((op("forward", COMPUTE, inputs=(0,)),), 1, (0,)),
        (SlotAction.INPUT, False): Piece((op("gather", TP), op("input", COMPUTE, inputs=(0,))), 1, (0, 1)),
        (SlotAction.WEIGHT, False): Piece((weight,), 1, ()),
        (SlotAction.WEIGHT, True): Piece((weight, op("reduce", DP, after=(0,))), 1, ()),
    }


def reference_s(schedule: Schedule) -> float:
    """Slots as they become possible; a weight half is bound to the gather of its own input half."""
    known = pieces()
    numbers = {key: number for number, key in enumerate(known)}
    queues = [list(order) for order in schedule.orders]
    done: dict[tuple[SlotAction, int, ChunkPlace], int] = {}
    calls: list[Call] = []

    def source(slot: Slot, place: ChunkPlace) -> tuple[tuple[SlotAction, int, ChunkPlace], int] | None:
        """The slot that this one waits for, and which of its outputs."""
        if slot.kind is SlotAction.WEIGHT:
            return (SlotAction.INPUT, slot.micro_batch, place), 0
        if slot.kind is SlotAction.FORWARD:
            before = schedule.previous(place)
            return ((SlotAction.FORWARD, slot.micro_batch, before), 0) if before else None
        after = schedule.following(place)
        if after:
            return (SlotAction.INPUT, slot.micro_batch, after), 1
        return (SlotAction.FORWARD, slot.micro_batch, place), 0

    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                slot = queue[0]
                place = ChunkPlace(stage, slot.chunk)
                needed = source(slot, place)
                if needed and needed[0] not in done:
                    break
                queue.pop(0)
                last = slot.kind is SlotAction.WEIGHT and slot.micro_batch == BATCHES - 1
                bound = (done[needed[0]], needed[1]) if needed else None
                done[slot.kind, slot.micro_batch, place] = len(calls)
                calls.append(Call(stage, numbers[slot.kind, last], (bound,)))
    plan = Plan(3, STAGES, tuple(known.values()), tuple(calls))
    durations = {
        (number, index): seconds_of(op)
        for number, call in enumerate(calls)
        for index, op in enumerate(plan.pieces[call.piece].ops)
    }
    return max(end for _, end in event_simulation(plan, durations).values())


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_a_split_backward_takes_as_long_as_its_single_tasks(name: str) -> None:
    schedule = make_schedule(name, STAGES, BATCHES, 2 if name == "zb-v" else 1)
    assert built_s(schedule) == pytest.approx(reference_s(schedule), rel=1e-12)
