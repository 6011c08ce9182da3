"""SimAI files whose micro-batches differ, against a pipeline that is worked out slot by slot."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepcast
from stepcast.cost.pricing import Pricer, recorded_price
from stepcast.inputs.simai import read
from stepcast.inputs.source import Source
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.outputs.simai import write
from stepcast.simulation.chunks import Body
from stepcast.simulation.schedule import ChunkPlace, SlotAction
from stepcast.simulation.schedules import make_schedule

CLUSTER = stepcast.load_cluster("dgx-h100")
MS_IN_NS = 1_000_000

Row = tuple[int, int, int, int]
"""Milliseconds forward, input and weight gradient, and the bytes that the forward reduces over tp."""
USUAL: tuple[Row, ...] = ((2, 3, 1, 0), (4, 4, 2, 1 << 20), (1, 2, 1, 1 << 22))


def text_of(bodies: Sequence[Sequence[Row]], pp: int, marked: bool) -> str:
    lines = []
    for body in bodies:
        for number, (forward, gradient, weight, size) in enumerate(body):
            name = "embedding_layer" if marked and not number else f"layer_{number}"
            word = "ALLREDUCE" if size else "NONE"
            cells = (forward * MS_IN_NS, word, size, gradient * MS_IN_NS, "NONE", 0, weight * MS_IN_NS)
            lines.append("\t".join([name, "-1", *map(str, cells), "NONE", "0", "0"]))
    header = (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 1 "
        f"pp: {pp} vpp: 1 ga: {len(bodies)} all_gpus: {2 * pp} pp_comm: 1048576 "
        "checkpoints: 0 checkpoint_initiates: 0"
    )
    return "\n".join([header, str(len(lines)), *lines, ""])


def worked_out_s(bodies: Sequence[Sequence[Row]], pp: int, name: str, message_s: float) -> float:
    """The end of the last slot: every micro-batch with its own times, no fold and no engine."""
    layout = stepcast.Layout(tp=2, pp=pp)
    pricer = Pricer(CLUSTER, layout, recorded_price)

    def reduce_s(size: int) -> float:
        return pricer.seconds(Collective(CollectiveKind.ALL_REDUCE, size, Group.TP)) if size else 0.0

    forward_s = [sum(row[0] * 1e-3 + reduce_s(row[3]) for row in body) for body in bodies]
    backward_s = [sum(row[1] + row[2] for row in body) * 1e-3 for body in bodies]
    schedule = make_schedule(name, pp, len(bodies), 2 if name == "dualpipe" else 1)
    arrived: dict[tuple[bool, ChunkPlace, int], float] = {}
    clock = [0.0] * pp
    wire: dict[tuple[bool, int], float] = {}
    queues = [list(order) for order in schedule.orders]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                slot, place = queue[0], ChunkPlace(stage, queue[0].chunk)
                assert slot.kind in (SlotAction.FORWARD, SlotAction.BACKWARD)
                back = slot.kind is SlotAction.BACKWARD
                source = schedule.following(place) if back else schedule.previous(place)
                if source is not None and (back, place, slot.micro_batch) not in arrived:
                    break
                begin = max(clock[stage], arrived.get((back, place, slot.micro_batch), 0.0))
                clock[stage] = begin + (backward_s if back else forward_s)[slot.micro_batch]
                goal = schedule.previous(place) if back else schedule.following(place)
                if goal is not None:
                    sent = max(clock[stage], wire.get((back, stage), 0.0)) + message_s
                    wire[back, stage] = arrived[back, goal, slot.micro_batch] = sent
                queue.pop(0)
    return max(clock)


def check(bodies: Sequence[Sequence[Row]], pp: int = 1, name: str = "1f1b", marked: bool = True) -> float:
    text = text_of(bodies, pp, marked)
    workload = read(Source("w.txt", text.encode()))
    assert write(workload).decode() == text
    assert workload.micro_batches == len(bodies)
    found = stepcast.simulate(workload, CLUSTER, stepcast.Options(schedule=name))
    expected_s = worked_out_s(bodies, pp, name, found.step.message_s if pp > 1 else 0.0)
    assert found.report.step_s == pytest.approx(expected_s, rel=1e-9)
    return expected_s


def varied(count: int, changes: Mapping[tuple[int, int], Row]) -> list[list[Row]]:
    return [[changes.get((batch, at), row) for at, row in enumerate(USUAL)] for batch in range(count)]


SLOW: Row = (3000, 4, 2, 1 << 20)
CHATTY: Row = (4, 4, 2, 1 << 32)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("changed", [SLOW, CHATTY])
@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("batch", [0, 5, 15])
def test_one_micro_batch_differs(batch: int, pp: int, changed: Row, marked: bool) -> None:
    same_s = check(varied(16, {}), pp, marked=marked)
    assert check(varied(16, {(batch, 1): changed}), pp, marked=marked) > same_s + 0.01


def test_whole_micro_batches_may_differ() -> None:
    bodies = varied(4, {(batch, at): (10 * batch + 7, 3, at, 0) for batch in (1, 2) for at in range(3)})
    for marked in (True, False):
        check(bodies, 2, marked=marked)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_set_of_micro_batches_may_differ(data: st.DataObject) -> None:
    pp = data.draw(st.sampled_from([1, 2, 4]), "pp")
    count = data.draw(st.integers(1, 9), "micro-batches")
    rows = st.tuples(*[st.integers(0, 50)] * 3, st.sampled_from([0, 1 << 20, 1 << 26]))
    places = st.tuples(st.integers(0, count - 1), st.integers(0, len(USUAL) - 1))
    bodies = varied(count, data.draw(st.dictionaries(places, rows, max_size=12), "changes"))
    name = data.draw(st.sampled_from(["1f1b", "gpipe"]), "schedule")
    check(bodies, pp, name, data.draw(st.booleans(), "marked"))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "dualpipe"])
def test_every_schedule_computes_what_is_written(name: str) -> None:
    """DualPipe sends each half of the micro-batches from its own end; every stage computes all of them."""
    bodies = varied(8, {(0, 0): (20, 3, 1, 0), (3, 1): (90, 4, 2, 0), (7, 2): (1, 2, 60, 0)})
    text = text_of(bodies, 2, True)
    found = stepcast.simulate(
        read(Source("w.txt", text.encode())), CLUSTER, stepcast.Options(schedule=name, body=Body.MODEL)
    )
    computed_s = sum(stage.busy_s for stage in found.report.stages)
    assert computed_s == pytest.approx(sum(sum(row[:3]) for body in bodies for row in body) * 1e-3)
