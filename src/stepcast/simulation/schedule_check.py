"""Checks of a schedule: every slot there once, in an order that can run, and what it holds in memory."""

from stepcast.simulation.schedule import Kind, Place, Schedule, ScheduleError, Slot

_LOCAL_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}


def check_schedule(schedule: Schedule) -> None:
    """A ScheduleError unless *schedule* is complete, ordered inside each stage and free of deadlock."""
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
    _check_runs(schedule)


def peak_in_flight(schedule: Schedule, until: Kind = Kind.WEIGHT) -> tuple[int, ...]:
    """For each stage the most chunk activations held at once, from their forward to the end of their
    backward.

    A split backward releases them at its weight gradient, or at its input gradient with ``until=Kind.INPUT``.
    """
    if until not in (Kind.INPUT, Kind.WEIGHT):
        raise ValueError(f"a split backward releases at its input or weight gradient, not at {until.letter}")
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for slot in order:
            if slot.kind is Kind.FORWARD:
                held += 1
                peak = max(peak, held)
            elif slot.kind in (Kind.BACKWARD, until):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def _check_complete(schedule: Schedule, stage: int) -> None:
    seen: set[tuple[Kind, int, int]] = set()
    for slot in schedule.orders[stage]:
        known_chunk = 0 <= slot.chunk < schedule.chunks
        if not known_chunk or slot.micro_batch not in schedule.micro_batches_of(slot.chunk):
            raise ScheduleError(f"stage {stage}: {slot} is no micro-batch and chunk of this schedule")
        if slot[:3] in seen:
            raise ScheduleError(f"stage {stage}: {slot} runs twice")
        seen.add(slot[:3])
    for chunk in range(schedule.chunks):
        for batch in schedule.micro_batches_of(chunk):
            kinds = {kind for kind in Kind if (kind, batch, chunk) in seen}
            if kinds not in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}):
                found = "".join(kind.letter for kind in sorted(kinds)) or "nothing"
                raise ScheduleError(
                    f"stage {stage}: micro-batch {batch} of chunk {chunk} has {found}, expected FB or FIW"
                )


def _check_order(schedule: Schedule, stage: int) -> None:
    done: set[tuple[Kind, int, int]] = set()
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
    place = Place(stage, slot.chunk)
    if slot.kind is Kind.FORWARD:
        source = schedule.previous(place)
        kind = Kind.FORWARD
    elif slot.kind is Kind.WEIGHT:
        return None
    else:
        source = schedule.following(place)
        kind = Kind.BACKWARD
    return source and (source.stage, Slot(kind, slot.micro_batch, source.chunk))


def _check_runs(schedule: Schedule) -> None:
    """Run the slots as soon as what they need has run; interleaved slots start only together."""
    done: set[tuple[int, Kind, int, int]] = set()
    position = [0] * schedule.stages

    def missing(stage: int) -> tuple[int, Slot] | None:
        order, at = schedule.orders[stage], position[stage]
        for slot in order[at : at + 1 + order[at].with_next]:
            needed = _needs(schedule, stage, slot)
            if needed and (needed[0], *needed[1][:3]) not in done:
                return needed
        return None

    waiting: dict[tuple[int, Kind, int, int], list[int]] = {}
    ready = list(range(schedule.stages))
    while ready:
        stage = ready.pop()
        order = schedule.orders[stage]
        while position[stage] < len(order):
            if needed := missing(stage):
                waiting.setdefault((needed[0], *needed[1][:3]), []).append(stage)
                break
            for slot in order[position[stage] : position[stage] + 1 + order[position[stage]].with_next]:
                kind = Kind.BACKWARD if slot.kind is Kind.INPUT else slot.kind
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
