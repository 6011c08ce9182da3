"""Schedules written by hand as text, and checks of any schedule.

    # four lines of head, then the slots of each stage in order
    stages 2
    micro-batches 4
    chunks 1            (optional, 1)
    placement loop      (optional; loop, v or two-way)

    0: F0 F1 B0 F2 B1 F3 B2 B3
    1: F0 B0 F1 B1 F2 B2 F3 B3

A slot is a letter (F forward, B backward, or I and W for its two halves), the micro-batch and, unless it is 0, a point
and the chunk: ``F3.1``. ``F3+B1`` are two slots that run interleaved. A stage may take several lines.
"""

import re

from stepcast.ir.limits import CHUNKS, MICRO_BATCHES
from stepcast.ir.schedules import PiecePlacement
from stepcast.simulation.messages import Send
from stepcast.simulation.pipeline import build_template
from stepcast.simulation.program import DeadlockError
from stepcast.simulation.schedule import Schedule, ScheduleError, Slot, SlotAction

F, B, I, W = SlotAction  # noqa: E741 (the letters of the papers)
LOCAL_BEFORE = {B: F, I: F, W: I}
"""The slot of the same micro-batch and chunk that must have run on the stage before."""


def check_schedule(schedule: Schedule) -> None:
    """Raise a ScheduleError unless *schedule* is complete, ordered inside each stage and free of deadlock."""
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
    _check_deadlock(schedule)


def _check_complete(schedule: Schedule, stage: int) -> None:
    seen: set[tuple[SlotAction, int, int]] = set()
    for slot in schedule.orders[stage]:
        known_chunk = 0 <= slot.chunk < schedule.chunks
        if not known_chunk or slot.micro_batch not in schedule.micro_batches_of(slot.chunk):
            raise ScheduleError(f"stage {stage}: {slot} is no micro-batch and chunk of this schedule")
        if slot[:3] in seen:
            raise ScheduleError(f"stage {stage}: {slot} runs twice")
        seen.add(slot[:3])
    for chunk in range(schedule.chunks):
        for batch in schedule.micro_batches_of(chunk):
            letters = "".join(action.letter for action in SlotAction if (action, batch, chunk) in seen)
            if letters not in ("FB", "FIW"):
                raise ScheduleError(
                    f"stage {stage}: micro-batch {batch} of chunk {chunk} has {letters or 'nothing'}, "
                    "expected FB or FIW"
                )


def _check_order(schedule: Schedule, stage: int) -> None:
    done: set[tuple[SlotAction, int, int]] = set()
    overlapped: Slot | None = None
    for slot in schedule.orders[stage]:
        before = LOCAL_BEFORE.get(slot.kind)
        if before is not None and (before, slot.micro_batch, slot.chunk) not in done:
            missing = Slot(before, slot.micro_batch, slot.chunk)
            raise ScheduleError(f"stage {stage}: {slot} comes before {missing}")
        if overlapped and (slot.with_next or slot[1:3] == overlapped[1:3]):
            raise ScheduleError(f"stage {stage}: {overlapped} cannot be interleaved with {slot}")
        overlapped = slot if slot.with_next else None
        done.add(slot[:3])
    if overlapped:
        raise ScheduleError(f"stage {stage}: {overlapped} is interleaved with nothing")


def _check_deadlock(schedule: Schedule) -> None:
    """Run the slots as soon as what they need has run; interleaved slots start only together."""
    calls = build_template(schedule, Send.EAGER, (), (), ())

    def name_slot(call: int) -> Slot:
        slots, batches = calls.slots.codes[calls.slots.near[0, calls.segment[call]]], calls.micro_batches
        assert batches is not None
        return Slot(slots[0].kind, int(batches[call, 0]), slots[0].chunk)

    try:
        _ = calls.levels
    except DeadlockError as error:
        stage, other = calls.rank[[error.call, error.blocker]]
        raise ScheduleError(
            f"deadlock: stage {stage} waits at {name_slot(error.call)} for {name_slot(error.blocker)} of stage {other}"
        ) from None


_SLOT = re.compile(r"([FBIW])(\d{1,9})(?:\.(\d{1,9}))?")  # no schedule has more
_ACTIONS = {action.letter: action for action in SlotAction}
_HEAD = ("stages", "micro-batches", "chunks", "placement")


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """Return the schedule that *text* describes, checked. A ScheduleError names the line that is wrong."""
    head: dict[str, str] = {"chunks": "1", "placement": PiecePlacement.LOOP.value}
    slots: dict[int, list[Slot]] = {}
    given: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        stage, colon, rest = content.partition(":")
        if colon:
            index = _parse_count(stage, "a stage", number, at_least=0)
            slots.setdefault(index, []).extend(_parse_slots(rest, number))
            continue
        word, _, value = content.partition(" ")
        if word not in _HEAD:
            raise ScheduleError(f"line {number}: {word!r} is none of {', '.join(_HEAD)} and no 'STAGE: SLOTS'")
        if word in given:
            raise ScheduleError(f"line {number}: {word} is given twice")
        given.add(word)
        head[word] = value.strip()
        placements = [placement.value for placement in PiecePlacement]
        if word != "placement":
            _parse_count(head[word], word, number, at_least=1)
        elif head[word] not in placements:
            raise ScheduleError(f"line {number}: unknown placement {head[word]!r}; known: {', '.join(placements)}")
    return _build_schedule(head, slots, name)


def _build_schedule(head: dict[str, str], slots: dict[int, list[Slot]], name: str) -> Schedule:
    for word in ("stages", "micro-batches"):
        if word not in head:
            raise ScheduleError(f"the line '{word} N' is missing")
    stages, micro_batches, chunks = (int(head[word]) for word in ("stages", "micro-batches", "chunks"))
    CHUNKS.check(stages * chunks)
    MICRO_BATCHES.check(micro_batches)
    if len(slots) != stages or max(slots) >= stages:
        present = f"{len(slots)} stages, {min(slots)} to {max(slots)}" if slots else "none"
        raise ScheduleError(f"expected the slots of stages 0 to {stages - 1}, found those of {present}")
    orders = tuple(tuple(slots[stage]) for stage in range(stages))
    schedule = Schedule.of(name, stages, micro_batches, chunks, PiecePlacement(head["placement"]), orders)
    check_schedule(schedule)
    return schedule


def _parse_count(word: str, what: str, number: int, at_least: int) -> int:
    if not word.strip().isdecimal() or int(word) < at_least:
        raise ScheduleError(
            f"line {number}: {what} must be a whole number of at least {at_least}, not {word.strip()!r}"
        )
    return int(word)


def _parse_slots(text: str, number: int) -> list[Slot]:
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
            slots.append(Slot(_ACTIONS[letter], int(batch), int(chunk or 0), index + 1 < len(parts)))
    return slots
