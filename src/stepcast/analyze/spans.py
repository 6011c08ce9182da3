"""A played step as a Timeline: work, waits and transfers on one lane per rank."""

from collections.abc import Mapping

from stepcast.analyze.play import Played
from stepcast.analyze.recording import COMMUNICATION, Join, Local, Part
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder


def timeline_of(labelled: Mapping[str, Played]) -> Timeline:
    """One lane per rank and label, so that two runs lie beside each other."""
    builder = TimelineBuilder()
    for label, played in labelled.items():
        _add(builder, played, label)
    first = next(iter(labelled.values()))
    stages = {record.rank: record.stage for one in labelled.values() for record in one.recording.ranks}
    return builder.build(
        measured=False, layout=first.recording.layout, stage_of_rank=stages, facts={}, rebase=False
    )


def _add(builder: TimelineBuilder, played: Played, label: str) -> None:
    for number, record in enumerate(played.recording.ranks):
        lane = builder.lane(record.rank, label)
        starts, ends = played.start_s[number].tolist(), played.end_s[number].tolist()
        cursor_s = 0.0
        for piece, start_s, end_s in zip(record.pieces(), starts, ends, strict=True):
            start_s = max(start_s, cursor_s)
            if isinstance(piece, Local):
                _span(builder, lane, piece.role, piece.micro_batch, (start_s, end_s), _kind(piece.part))
            else:
                _add_join(builder, lane, played, piece, (start_s, end_s))
            cursor_s = max(cursor_s, end_s)


def _add_join(
    builder: TimelineBuilder, lane: int, played: Played, join: Join, span_s: tuple[float, float]
) -> None:
    start_s, end_s = span_s
    free_s = min(start_s + join.own_s, end_s)
    came_s = max((float(played.meeting_start_s[at]) for at in join.waits), default=free_s)
    came_s = min(max(came_s, free_s), end_s)
    _span(builder, lane, join.role, join.micro_batch, (start_s, free_s), SpanKind.COMPUTE)
    _span(builder, lane, f"wait: {join.role}", join.micro_batch, (free_s, came_s), SpanKind.OTHER)
    _span(builder, lane, join.role, join.micro_batch, (came_s, end_s), SpanKind.COMMUNICATION)


def _span(
    builder: TimelineBuilder,
    lane: int,
    name: str,
    micro_batch: int,
    span_s: tuple[float, float],
    kind: SpanKind,
) -> None:
    if span_s[1] > span_s[0]:
        builder.add(name, lane, span_s[0], span_s[1] - span_s[0], kind=kind, micro_batch=micro_batch)


def _kind(part: Part) -> SpanKind:
    if part in COMMUNICATION:
        return SpanKind.COMMUNICATION
    return SpanKind.HOST if part is Part.HOST else SpanKind.COMPUTE
