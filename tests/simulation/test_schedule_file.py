"""Schedules written by hand."""

import pytest

from stepcast.ir.schedules import SCHEDULES, PiecePlacement, ScheduleKind
from stepcast.simulation.schedule import ScheduleError, Slot, SlotAction
from stepcast.simulation.schedule_file import parse_schedule
from stepcast.simulation.schedules import make_schedule
from tests.schedule_text import format_schedule

TEXT = """\
# 1F1B of two stages
stages 2
micro-batches 3

0: F0 F1 B0 F2   # the warm-up
0: B1 B2
1: F0 B0 F1 I1 W1 F2 B2
"""


def test_a_schedule_is_read() -> None:
    schedule = parse_schedule(TEXT)
    assert (schedule.stages, schedule.micro_batches, schedule.chunks) == (2, 3, 1)
    assert schedule.placement is PiecePlacement.LOOP
    assert [str(slot) for slot in schedule.orders[0]] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert schedule.orders[1][3:5] == (Slot(SlotAction.INPUT, 1), Slot(SlotAction.WEIGHT, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_survives_the_round_trip(name: str) -> None:
    schedule = make_schedule(name, 4, 12, SCHEDULES[ScheduleKind(name)].pieces(2))
    assert parse_schedule(format_schedule(schedule), name) == schedule


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("stages 2", "stages two", "line 2: stages must be a whole number of at least 1, not 'two'"),
        ("stages 2", "stages 0", "line 2: stages must be"),
        ("stages 2", "stags 2", "line 2: 'stags' is none of stages"),
        ("stages 2", "stages 3", "expected the slots of stages 0 to 2"),
        ("micro-batches 3", "", "the line 'micro-batches N' is missing"),
        ("micro-batches 3", "stages 2", "line 3: stages is given twice"),
        ("micro-batches 3", "micro-batches 4", "micro-batch 3 of chunk 0 has nothing"),
        ("micro-batches 3", "micro-batches 3\nplacement w", "line 4: unknown placement 'w'"),
        ("micro-batches 3", "micro-batches 3\nplacement v", "needs 2 chunks"),
        ("B1 B2", "B1 X2", "line 6: 'X2' is no slot"),
        ("B1 B2", "B1+B2+W1", "line 6: 'B1.B2.W1': no more than two"),
        ("B1 B2", "B1", "micro-batch 2 of chunk 0 has F,"),
        ("B1 B2", "B1 B2 B2", "B2 runs twice"),
        ("1: F0 B0", "1: B0 F0", "stage 1: B0 comes before F0"),
        ("0: B1", "zero: B1", "line 6: a stage must be a whole number"),
    ],
)
def test_mistakes_name_their_line(old: str, new: str, words: str) -> None:
    text = TEXT.replace(old, new)
    assert text != TEXT
    with pytest.raises(ScheduleError, match=words):
        parse_schedule(text)


def test_a_deadlock_is_found() -> None:
    text = "stages 2\nmicro-batches 2\n0: F0 B0 F1 B1\n1: F0 F1 B0 B1\n"
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits at B0 for B0 of stage 1"):
        parse_schedule(text)
