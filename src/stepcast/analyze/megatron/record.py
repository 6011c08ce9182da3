"""A Megatron-LM timeline as a Recording: without waits, meetings with their transfer times."""

from collections.abc import Iterator, Mapping, Sequence

from stepcast.analyze.megatron import meetings as traced
from stepcast.analyze.recording import (
    BlockKind,
    Join,
    Local,
    Meeting,
    Piece,
    RankRecord,
    RecordedBlock,
    Recording,
    TimePart,
)
from stepcast.analyze.result import list_ranks
from stepcast.ir.layout import MODEL
from stepcast.ir.timeline import Timeline

BLOCK_OF = {
    **dict.fromkeys(("get_batch", "forward_step", "loss_func"), BlockKind.FORWARD),
    "backward_step": BlockKind.BACKWARD,
    **dict.fromkeys((*traced.SENDS, *traced.RECEIVES), BlockKind.MESSAGE),
}
PART_OF = {
    "get_batch": TimePart.HOST,
    **dict.fromkeys(("forward_step", "loss_func", "backward_step"), TimePart.COMPUTE),
    # A reduction of gradients within one rank scales and copies them, which prepares the update.
    **dict.fromkeys((traced.OPTIMIZER, *traced.REDUCTIONS), TimePart.OPTIMIZER),
}
GROUP_PARTS = {str(part): part for part in TimePart}


def record_megatron(timeline: Timeline) -> Recording:
    """Return *timeline* as a Recording with all ranks on one clock."""
    if timeline.layout is None:
        raise ValueError(f"{timeline.source}: no layout is known, so ranks cannot be matched")
    layout = timeline.layout
    operations = traced.operations_of(timeline, layout)
    matched, ranks = traced.match_events(operations), sorted(operations)
    tied = [events for events in matched.values() if events[0].kind != "sync"]
    alignment = traced.align_clocks(tied, ranks)
    _shift_clocks(operations, alignment)
    _remove_overlaps(operations)
    origin_s = min(listed[0].start_s for listed in operations.values())
    end_s = max(operation.end_s for listed in operations.values() for operation in listed)
    meetings, impossible = traced.hold_meetings(matched)
    records = []
    for rank in ranks:
        blocks = _blocks(operations[rank], origin_s, meetings)
        records.append(RankRecord(rank, timeline.stage_of_rank.get(rank, 0), blocks))
    facts = {**timeline.facts, "gradient_bytes": _gradient_bytes(operations, timeline)}
    measured = tuple(records), tuple(meetings), end_s - origin_s, int(timeline.facts.get("micro_batches", 1))
    return Recording(layout, *measured, facts, warnings=tuple(_warnings(timeline, alignment, impossible)))


def _gradient_bytes(operations: Mapping[int, list[traced.TraceOperation]], timeline: Timeline) -> dict[int, int]:
    """Return the bytes that the ranks of each stage reduce between replicas."""
    sizes: dict[int, int] = {}
    for rank, listed in operations.items():
        for operation in listed:
            for event in operation.events:
                if event.name == "dp_allreduce" and event.size_bytes is not None:
                    sizes[timeline.stage_of_rank.get(rank, 0)] = event.size_bytes
    return sizes


def _warnings(timeline: Timeline, alignment: traced.ClockAlignment, impossible: int) -> Iterator[str]:
    # The reader's warning about clocks is resolved by aligning them.
    yield from (text for text in timeline.warnings if "clocks are not one" not in text)
    moved = [clock for clock in alignment.clocks[1:] if clock[0] in alignment.offset_s]
    if moved:
        yield (
            f"{len(moved) + 1} clocks: ranks {list_ranks(alignment.clocks[0])} keep theirs; "
            + "; ".join(f"ranks {list_ranks(clock)} moved by {alignment.offset_s[clock[0]]:.6f} s" for clock in moved)
            + f", known to {alignment.uncertainty_s * 1e3:.2f} ms by matched communication"
        )
    if alignment.unplaced:
        yield (
            f"ranks {list_ranks(alignment.unplaced)} share no communication with the others that are given: "
            "their clocks cannot be aligned; assumed to start together with the others"
        )
    if impossible:
        yield (
            f"{impossible} collectives or messages seem to end on one rank before another came to them: "
            "left unmatched, their waits stay in their times"
        )


def _shift_clocks(operations: Mapping[int, list[traced.TraceOperation]], alignment: traced.ClockAlignment) -> None:
    """Move every time to the clock of the first rank."""
    placed = [rank for rank in operations if rank in alignment.offset_s]
    start_s = min(operations[rank][0].start_s + alignment.offset_s[rank] for rank in placed)
    for rank, listed in operations.items():
        offset_s = alignment.offset_s.get(rank, start_s - listed[0].start_s)
        if offset_s == 0:
            continue
        for operation in listed:
            operation.start_s += offset_s
            operation.end_s += offset_s
            for event in operation.all_events:
                event.start_s += offset_s
                event.end_s += offset_s


def _remove_overlaps(operations: Mapping[int, list[traced.TraceOperation]]) -> None:
    """Move starts to the end of the previous operation: a rank does one thing after the other."""
    for listed in operations.values():
        cursor_s = float("-inf")
        for operation in listed:
            operation.start_s = min(max(operation.start_s, cursor_s), operation.end_s)
            inner_s = operation.start_s
            for event in operation.parts:
                event.end_s = min(max(event.end_s, inner_s), operation.end_s)
                event.start_s = min(max(event.start_s, inner_s), event.end_s)
                inner_s = event.end_s
            for event in operation.events:
                event.start_s, event.end_s = operation.start_s, operation.end_s
            cursor_s = operation.end_s


def _blocks(
    operations: Sequence[traced.TraceOperation], origin_s: float, meetings: Sequence[Meeting]
) -> tuple[RecordedBlock, ...]:
    """Return the blocks of one rank."""
    first = operations[0]
    late = Local(TimePart.HOST, "start", "start", -1, origin_s, max(0.0, first.start_s - origin_s))
    blocks = [RecordedBlock(BlockKind.START, -1, (late,))]
    cursor_s = first.start_s
    for operation in operations:
        gap_s = max(0.0, operation.start_s - cursor_s)
        gap = Local(TimePart.HOST, "gap", f"before {operation.name}", operation.micro_batch, cursor_s, gap_s)
        pieces = (gap, *_pieces(operation, meetings))
        kind = BLOCK_OF.get(operation.name, BlockKind.FINISH)
        if blocks[-1].kind is kind and blocks[-1].micro_batch == operation.micro_batch:
            # get_batch, forward and loss are one forward.
            blocks[-1] = RecordedBlock(kind, operation.micro_batch, (*blocks[-1].pieces, *pieces))
        else:
            blocks.append(RecordedBlock(kind, operation.micro_batch, pieces))
        cursor_s = operation.end_s
    return tuple(blocks)


def _pieces(operation: traced.TraceOperation, meetings: Sequence[Meeting]) -> list[Piece]:
    present = [event for event in operation.events if event.meeting is not None]
    if present and operation.name == traced.OPTIMIZER:
        return _optimizer_pieces(operation, meetings)
    if present:
        return [_join(operation, operation.name, present, meetings)]
    if operation.events and operation.name != traced.OPTIMIZER:
        part = _part_of(operation.events[0], operation)
        return [_local(operation, part, operation.name, operation.start_s, operation.end_s)]
    return _inner_pieces(operation, meetings)


def _inner_pieces(operation: traced.TraceOperation, meetings: Sequence[Meeting]) -> list[Piece]:
    """Return the collectives within an operation and the computation between them."""
    part = PART_OF.get(operation.name, TimePart.OTHER)
    pieces: list[Piece] = []
    cursor_s, before = operation.start_s, "start"
    turns: dict[tuple[str, str], int] = {}
    tokens: int | None = None
    tokens_after = {id(out): back.rows for out, back in traced.exchanges(operation)}
    tokens_after |= {id(back): None for _, back in traced.exchanges(operation)}
    for event in [*operation.parts, None]:
        after, until_s = ("end", operation.end_s) if event is None else (event.name, event.start_s)
        turn = turns.get((before, after), 0)
        turns[before, after] = turn + 1
        role = f"{operation.name}: {before} to {after}, {'even' if turn % 2 else 'odd'}"
        if tokens is not None:
            role += ", experts"
        pieces.append(_local(operation, part, role, cursor_s, until_s, tokens))
        if event is None:
            break
        if event.meeting is not None:
            pieces.append(_join(operation, event.name, [event], meetings))
        else:
            role = f"{operation.name}: {event.name}"
            pieces.append(_local(operation, _part_of(event, operation), role, event.start_s, event.end_s))
        cursor_s, before = event.end_s, event.name
        tokens = tokens_after.get(id(event), tokens)
    return pieces


def _part_of(event: traced.RankEvent, operation: traced.TraceOperation) -> TimePart:
    """Return the part of communication that met nobody: that of its operation where its group is one rank."""
    if event.key[1] == (event.rank,):
        return PART_OF.get(operation.name, TimePart.OTHER)
    return GROUP_PARTS.get(event.group, TimePart.OTHER)


def _local(
    operation: traced.TraceOperation, part: TimePart, role: str, start_s: float, end_s: float, tokens: int | None = None
) -> Local:
    duration_s = max(0.0, end_s - start_s)
    return Local(part, operation.name, role, operation.micro_batch, start_s, duration_s, tokens)


def _join(
    operation: traced.TraceOperation, name: str, events: Sequence[traced.RankEvent], meetings: Sequence[Meeting]
) -> Join:
    own_s, start_s, end_s = max(event.own_s for event in events), events[0].start_s, events[0].end_s
    attended = [(event.meeting, event.waits) for event in events if event.meeting is not None]
    waits = tuple(number for number, is_awaited in attended if is_awaited)
    free_s = max([start_s + own_s, *(meetings[number].end_s for number in waits)])
    if not waits:
        own_s = end_s - start_s
    return Join(
        part=GROUP_PARTS.get(events[0].group, TimePart.OTHER),
        operation=operation.name,
        role=f"{operation.name}: in {name}" if name != operation.name else name,
        micro_batch=operation.micro_batch,
        start_s=start_s,
        end_s=end_s,
        meetings=tuple(number for number, _ in attended),
        waits=waits,
        own_s=own_s,
        tail_s=max(0.0, end_s - free_s) if waits else 0.0,
    )


def _optimizer_pieces(operation: traced.TraceOperation, meetings: Sequence[Meeting]) -> list[Piece]:
    """Return the synchronisation on the gradient norm, then the update of the weights."""
    number = operation.events[0].meeting
    assert number is not None
    name, together_s = traced.OPTIMIZER, meetings[number].start_s
    when = operation.micro_batch, operation.start_s, together_s
    join = Join(TimePart.OPTIMIZER, name, f"{name}: {MODEL}", *when, (number,), (number,))
    return [join, _local(operation, TimePart.OPTIMIZER, name, together_s, operation.end_s)]
