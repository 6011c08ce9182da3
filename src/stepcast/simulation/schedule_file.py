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
from stepcast.ir.schedules import PiecePlacement
from stepcast.simulation.schedule import ChunkPlace, Schedule, ScheduleError, Slot, SlotAction

# Checks of a schedule: every slot there once, in an order that can run, and what it holds in memory.

_LOCAL_BEFORE = {
    SlotAction.BACKWARD: SlotAction.FORWARD,
    SlotAction.INPUT: SlotAction.FORWARD,
    SlotAction.WEIGHT: SlotAction.INPUT,
}


def check_schedule(schedule: Schedule) -> None:
    """A ScheduleError unless *schedule* is complete, ordered inside each stage and free of deadlock."""
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
    _check_runs(schedule)


def peak_in_flight(schedule: Schedule, until: SlotAction = SlotAction.WEIGHT) -> tuple[int, ...]:
    """For each stage the most chunk activations held at once, from their forward to the end of their
    backward.

    A split backward releases them at its weight gradient, or at its input gradient with ``until=Kind.INPUT``.
    """
    if until not in (SlotAction.INPUT, SlotAction.WEIGHT):
        raise ValueError(f"a split backward releases at its input or weight gradient, not at {until.letter}")
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for slot in order:
            if slot.kind is SlotAction.FORWARD:
                held += 1
                peak = max(peak, held)
            elif slot.kind in (SlotAction.BACKWARD, until):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


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
            kinds = {kind for kind in SlotAction if (kind, batch, chunk) in seen}
            if kinds not in (
                {SlotAction.FORWARD, SlotAction.BACKWARD},
                {SlotAction.FORWARD, SlotAction.INPUT, SlotAction.WEIGHT},
            ):
                found = "".join(kind.letter for kind in sorted(kinds)) or "nothing"
                raise ScheduleError(
                    f"stage {stage}: micro-batch {batch} of chunk {chunk} has {found}, expected FB or FIW"
                )


def _check_order(schedule: Schedule, stage: int) -> None:
    done: set[tuple[SlotAction, int, int]] = set()
    overlapped: Slot | None = None
    for slot in schedule.orders[stage]:
        before = _LOCAL_BEFORE.get(slot.kind)
        if before is not None and (before, slot.micro_batch, slot.chunk) not in done:
            missing = Slot(before, slot.micro_batch, slot.chunk)
            raise ScheduleError(f"stage {stage}: {slot} comes before {missing}")
        if overlapped and (slot.with_next or slot[1:3] == overlapped[1:3]):
            raise ScheduleError(f"stage {stage}: {overlapped} cannot be interleaved with {slot}")
        overlapped = slot if slot.with_next else None
        done.add(slot[:3])
    if overlapped:
        raise ScheduleError(f"stage {stage}: {overlapped} is interleaved with nothing")


def _needs(schedule: Schedule, stage: int, slot: Slot) -> tuple[int, Slot] | None:
    """The slot of another place that must have run before *slot*, and its stage."""
    place = ChunkPlace(stage, slot.chunk)
    if slot.kind is SlotAction.FORWARD:
        source = schedule.previous(place)
        kind = SlotAction.FORWARD
    elif slot.kind is SlotAction.WEIGHT:
        return None
    else:
        source = schedule.following(place)
        kind = SlotAction.BACKWARD
    return source and (source.stage, Slot(kind, slot.micro_batch, source.chunk))


def _check_runs(schedule: Schedule) -> None:
    """Run the slots as soon as what they need has run; interleaved slots start only together."""
    done: set[tuple[int, SlotAction, int, int]] = set()
    position = [0] * schedule.stages

    def missing(stage: int) -> tuple[int, Slot] | None:
        order, at = schedule.orders[stage], position[stage]
        for slot in order[at : at + 1 + order[at].with_next]:
            needed = _needs(schedule, stage, slot)
            if needed and (needed[0], *needed[1][:3]) not in done:
                return needed
        return None

    waiting: dict[tuple[int, SlotAction, int, int], list[int]] = {}
    ready = list(range(schedule.stages))
    while ready:
        stage = ready.pop()
        order = schedule.orders[stage]
        while position[stage] < len(order):
            if needed := missing(stage):
                waiting.setdefault((needed[0], *needed[1][:3]), []).append(stage)
                break
            for slot in order[position[stage] : position[stage] + 1 + order[position[stage]].with_next]:
                kind = SlotAction.BACKWARD if slot.kind is SlotAction.INPUT else slot.kind
                what = (stage, kind, slot.micro_batch, slot.chunk)
                done.add(what)
                ready += waiting.pop(what, ())
                position[stage] += 1
    stuck = [stage for stage, order in enumerate(schedule.orders) if position[stage] < len(order)]
    if stuck:
        stage = stuck[0]
        waits = missing(stage)
        assert waits is not None
        slot = schedule.orders[stage][position[stage]]
        raise ScheduleError(f"deadlock: stage {stage} waits at {slot} for {waits[1]} of stage {waits[0]}")


_SLOT = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")
_KINDS = {kind.letter: kind for kind in SlotAction}
_HEAD = ("stages", "micro-batches", "chunks", "placement")


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """The schedule that *text* describes, checked. A ScheduleError names the line that is wrong."""
    head: dict[str, str] = {"chunks": "1", "placement": PiecePlacement.LOOP.value}
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
            raise ScheduleError(f"line {number}: {word!r} is none of {', '.join(_HEAD)} and no 'STAGE: SLOTS'")
        if word in given:
            raise ScheduleError(f"line {number}: {word} is given twice")
        given.add(word)
        head[word] = value.strip()
        if word == "placement":
            _placement(head[word], number)
        else:
            _count(head[word], word, number, at_least=1)
    return _schedule(head, slots, name)


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
        PiecePlacement(head["placement"]),
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
    if word not in {placement.value for placement in PiecePlacement}:
        known = ", ".join(placement.value for placement in PiecePlacement)
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
