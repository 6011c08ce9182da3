"""Schedules written by hand, as text.

    # four lines of head, then the slots of each stage in order
    stages 2
    micro-batches 4
    chunks 1            (optional, 1)
    placement loop      (optional; loop, v or two-way)

    0: F0 F1 B0 F2 B1 F3 B2 B3
    1: F0 B0 F1 B1 F2 B2 F3 B3

A slot is a letter (F forward, B backward, or I and W for its two halves), the micro-batch and, unless it is
0, a point and the chunk: ``F3.1``. ``F3+B1`` are two slots that run interleaved. A stage may take several
lines.
"""

import re

from stepcast.ir.limits import CHUNKS, MICRO_BATCHES
from stepcast.simulation.schedule import Kind, Placement, Schedule, ScheduleError, Slot
from stepcast.simulation.schedule_check import check_schedule

_SLOT = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")
_KINDS = {kind.letter: kind for kind in Kind}
_HEAD = ("stages", "micro-batches", "chunks", "placement")


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """The schedule that *text* describes, checked. A ScheduleError names the line that is wrong."""
    head: dict[str, str] = {"chunks": "1", "placement": Placement.LOOP.value}
    slots: dict[int, list[Slot]] = {}
    given: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        stage, colon, rest = content.partition(":")
        if colon:
            index = _count(stage, "a stage", number, at_least=0)
            slots.setdefault(index, []).extend(_slots(rest, number))
            continue
        word, _, value = content.partition(" ")
        if word not in _HEAD:
            raise ScheduleError(
                f"line {number}: {word!r} is none of {', '.join(_HEAD)} and no 'STAGE: SLOTS'"
            )
        if word in given:
            raise ScheduleError(f"line {number}: {word} is given twice")
        given.add(word)
        head[word] = value.strip()
        if word == "placement":
            _placement(head[word], number)
        else:
            _count(head[word], word, number, at_least=1)
    return _schedule(head, slots, name)


def format_schedule(schedule: Schedule) -> str:
    """The text of *schedule*; ``parse_schedule`` reads it back."""
    lines = [
        f"stages {schedule.stages}",
        f"micro-batches {schedule.micro_batches}",
        f"chunks {schedule.chunks}",
        f"placement {schedule.placement}",
        "",
    ]
    for stage, order in enumerate(schedule.orders):
        text = "".join(f"{slot}+" if slot.with_next else f"{slot} " for slot in order)
        lines.append(f"{stage}: {text.strip()}")
    return "\n".join(lines) + "\n"


def _schedule(head: dict[str, str], slots: dict[int, list[Slot]], name: str) -> Schedule:
    for word in ("stages", "micro-batches"):
        if word not in head:
            raise ScheduleError(f"the line '{word} N' is missing")
    stages = int(head["stages"])
    CHUNKS.check(stages * int(head["chunks"]))
    MICRO_BATCHES.check(int(head["micro-batches"]))
    if len(slots) != stages or max(slots) >= stages:
        found = f"{len(slots)} stages, {min(slots)} to {max(slots)}" if slots else "none"
        raise ScheduleError(f"expected the slots of stages 0 to {stages - 1}, found those of {found}")
    schedule = Schedule(
        name,
        stages,
        int(head["micro-batches"]),
        int(head["chunks"]),
        Placement(head["placement"]),
        tuple(tuple(slots[stage]) for stage in range(stages)),
    )
    check_schedule(schedule)
    return schedule


def _count(word: str, what: str, number: int, at_least: int) -> int:
    if not word.strip().isdecimal() or int(word) < at_least:
        raise ScheduleError(
            f"line {number}: {what} must be a whole number of at least {at_least}, not {word.strip()!r}"
        )
    return int(word)


def _placement(word: str, number: int) -> None:
    if word not in {placement.value for placement in Placement}:
        known = ", ".join(placement.value for placement in Placement)
        raise ScheduleError(f"line {number}: unknown placement {word!r}; known: {known}")


def _slots(text: str, number: int) -> list[Slot]:
    slots = []
    for word in text.split():
        parts = word.split("+")
        if len(parts) > 2:
            raise ScheduleError(f"line {number}: {word!r}: no more than two slots run interleaved")
        for index, part in enumerate(parts):
            match = _SLOT.fullmatch(part)
            if match is None:
                raise ScheduleError(f"line {number}: {part!r} is no slot; expected F0, B3 or W2.1")
            letter, batch, chunk = match.groups()
            slots.append(Slot(_KINDS[letter], int(batch), int(chunk or 0), index + 1 < len(parts)))
    return slots
