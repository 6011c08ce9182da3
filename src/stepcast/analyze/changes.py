"""What-ifs on a Recording that leave its layout as it is: each returns a changed copy."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median

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

# Work that follows the tokens that a router sends: experts of two ranks do not do the same work.


def seconds_per_token(records: Iterable[RankRecord]) -> dict[str, float]:
    """Role -> what one token more takes, for roles whose work follows their tokens.

    Theil's incomplete method (1950): of the pieces in the order of their tokens, each of the lower half makes
    a slope with its partner in the upper half, and the median slope stands. A slow rank does not move it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for piece in record.pieces():
            if isinstance(piece, Local) and piece.tokens is not None:
                points.setdefault(piece.role, []).append((piece.tokens, piece.duration_s))
    return {role: _slope(listed) for role, listed in points.items()}


def _slope(points: list[tuple[int, float]]) -> float:
    points.sort()
    half = len(points) // 2
    slopes = [
        (upper_s - lower_s) / (upper - lower)
        for (lower, lower_s), (upper, upper_s) in zip(points[:half], points[-half:], strict=True)
        if upper > lower
    ]
    # No tokens cannot take less than no time, so it is never steeper than in proportion.
    steepest = median([seconds / tokens for tokens, seconds in points if tokens] or [0.0])
    return min(max(0.0, median(slopes)), steepest) if slopes else 0.0


def at_tokens_s(duration_s: float, tokens: float, wanted: float, slope_s: float) -> float:
    """What took *duration_s* for *tokens*, for *wanted* tokens."""
    return max(0.0, duration_s + slope_s * (wanted - tokens))


def like_s(piece: Local, other: Local, slopes_s: Mapping[str, float]) -> float:
    """How long *piece* would take at the pace of *other*, which has its role."""
    if piece.tokens is None or other.tokens is None:
        return other.duration_s
    return at_tokens_s(other.duration_s, other.tokens, piece.tokens, slopes_s.get(piece.role, 0.0))


PieceChange = Callable[[RankRecord, RecordedBlock, Piece], Piece]


def map_pieces(recording: Recording, change: PieceChange) -> Recording:
    """Every piece replaced by what *change* makes of it."""
    records = []
    for record in recording.ranks:
        blocks = tuple(
            replace(block, pieces=tuple(change(record, block, piece) for piece in block.pieces))
            for block in record.blocks
        )
        records.append(replace(record, blocks=blocks))
    return replace(recording, ranks=tuple(records))


def assuming(recording: Recording, *texts: str) -> Recording:
    return replace(recording, assumptions=(*recording.assumptions, *texts))


def scale_transfers(recording: Recording, group: str, factor: float) -> Recording:
    """*group*'s links *factor* times as fast."""
    return assuming(
        _map_meetings(recording, group, lambda meeting: meeting.transfer_s / factor),
        f"transfers over {group} take 1/{factor:g} of the time; launch delays stay as they are",
    )


def set_bandwidth(recording: Recording, group: str, bytes_per_s: float) -> Recording:
    """Collectives of *group* at this bus bandwidth, messages at this rate; those of unknown size stay."""

    def transfer_s(meeting: Meeting) -> float:
        if meeting.size_bytes is None:
            return meeting.transfer_s
        return meeting.size_bytes * bus_factor(meeting.kind, len(meeting.members)) / bytes_per_s

    return assuming(
        _map_meetings(recording, group, transfer_s),
        f"transfers over {group} run at {bytes_per_s / 1e9:g} GB/s (bus bandwidth), without latency",
    )


def bus_factor(kind: str, ranks: int) -> float:
    """Share of the buffer that each link carries. Source: nccl-tests doc/PERFORMANCE.md."""
    if kind == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all-gather", "reduce-scatter", "all-to-all") else 1.0


def _map_meetings(recording: Recording, group: str, transfer_s: Callable[[Meeting], float]) -> Recording:
    groups = {meeting.group for meeting in recording.meetings}
    if group not in groups:
        raise ValueError(
            f"no matched communication over {group} in this run; it has {', '.join(sorted(groups)) or 'none'}"
        )
    meetings = tuple(
        replace(meeting, transfer_s=transfer_s(meeting)) if meeting.group == group else meeting
        for meeting in recording.meetings
    )
    return replace(recording, meetings=meetings)


def scale_rank(recording: Recording, rank: int, factor: float) -> Recording:
    """All work of *rank* takes *factor* times as long."""
    recording.record_of(rank)
    return map_pieces(recording, lambda record, _, piece: _scaled(piece, factor) if record.rank == rank else piece)


def scale_compute(recording: Recording, compute: float, memory: float) -> Recording:
    """Computation takes *compute* times as long, and what is bound by memory *memory* times."""

    def change(_: RankRecord, __: RecordedBlock, piece: Piece) -> Piece:
        if isinstance(piece, Join):
            return replace(piece, own_s=piece.own_s * compute) if piece.waits else piece
        if piece.part is TimePart.COMPUTE:
            return _scaled(piece, compute)
        return _scaled(piece, memory) if piece.part in (TimePart.OPTIMIZER, TimePart.DP) else piece

    return map_pieces(recording, change)


def _scaled(piece: Piece, factor: float) -> Piece:
    if isinstance(piece, Local):
        return replace(piece, duration_s=piece.duration_s * factor)
    return replace(piece, own_s=piece.own_s * factor, tail_s=piece.tail_s * factor)


def heal_rank(recording: Recording, rank: int, slow: frozenset[int] = frozenset()) -> Recording:
    """*rank* works as its peers do: ranks of its stage piece by piece, or else ranks with the same role."""
    record = recording.record_of(rank)
    pieces = list(record.pieces())
    peers = [
        list(other.pieces())
        for other in recording.ranks
        if other.stage == record.stage and other.rank != rank and other.rank not in slow
    ]
    slopes_s = seconds_per_token(recording.ranks)
    peers = [peer for peer in peers if [one.role for one in peer] == [one.role for one in pieces]]
    if peers:
        healed = [_like(piece, [peer[at] for peer in peers], slopes_s) for at, piece in enumerate(pieces)]
        text = f"rank {rank} works at the pace of the other ranks of stage {record.stage}"
    else:
        by_role = _by_role(recording, {rank, *slow})
        healed = [_like(piece, by_role.get(piece.role, []), slopes_s) for piece in pieces]
        text = f"rank {rank} works at the pace of ranks of other stages that do the same"
        if not any(piece.role in by_role for piece in pieces):
            raise ValueError(f"no healthy rank does the work of rank {rank}, so its healthy pace is not known")
    iterator = iter(healed)
    blocks = tuple(replace(block, pieces=tuple(next(iterator) for _ in block.pieces)) for block in record.blocks)
    ranks = tuple(replace(one, blocks=blocks) if one.rank == rank else one for one in recording.ranks)
    return assuming(replace(recording, ranks=ranks), text)


def _by_role(recording: Recording, without: set[int]) -> dict[str, list[Piece]]:
    table: dict[str, list[Piece]] = {}
    for record in recording.ranks:
        if record.rank not in without:
            for piece in record.pieces():
                table.setdefault(piece.role, []).append(piece)
    return table


def _like(piece: Piece, others: list[Piece], slopes_s: Mapping[str, float]) -> Piece:
    """*piece* with the median times of *others*, which are of its role."""
    if isinstance(piece, Local):
        times_s = [like_s(piece, other, slopes_s) for other in others if isinstance(other, Local)]
        return replace(piece, duration_s=median(times_s)) if times_s else piece
    joins = [other for other in others if isinstance(other, Join)]
    if not joins:
        return piece
    return replace(piece, own_s=median(other.own_s for other in joins), tail_s=median(other.tail_s for other in joins))


def change_layers(recording: Recording, stage: int, layers: int) -> Recording:
    """*layers* more (or fewer) layers on *stage*.

    A layer takes what it takes on the stage that needs least per layer: what other stages need beyond it is
    their embedding or loss.
    """
    held = _layers_on(recording)
    if stage not in held:
        raise ValueError(f"stage {stage} is not in this run; it has {', '.join(map(str, sorted(held)))}")
    if held[stage] + layers < 1:
        raise ValueError(f"stage {stage} has {held[stage]} layers; {layers:+d} leaves none")
    share = (held[stage] + layers) / held[stage]
    factors = {
        kind: _layer_factor(recording, stage, kind, held, layers) for kind in (BlockKind.FORWARD, BlockKind.BACKWARD)
    }

    def change(record: RankRecord, block: RecordedBlock, piece: Piece) -> Piece:
        if record.stage != stage:
            return piece
        if block.kind in factors:
            computes = isinstance(piece, Join) or piece.part is TimePart.COMPUTE
            return _scaled(piece, factors[block.kind]) if computes else piece
        if isinstance(piece, Local) and piece.part in (TimePart.OPTIMIZER, TimePart.DP):
            return _scaled(piece, share)
        return piece

    changed = map_pieces(recording, change)
    ranks = {record.rank for record in recording.ranks if record.stage == stage}
    meetings = tuple(
        replace(meeting, transfer_s=meeting.transfer_s * share)
        if meeting.group in ("tp", "cp", "ep", "dp") and ranks.issuperset(meeting.members)
        else meeting
        for meeting in changed.meetings
    )
    facts = {**recording.facts, "layers_on": {**held, stage: held[stage] + layers}}
    if isinstance(whole := recording.facts.get("layers"), int):
        facts["layers"] = whole + layers
    return assuming(
        replace(changed, meetings=meetings, facts=facts),
        f"a layer takes {_layer_time_s(recording, BlockKind.FORWARD, held) * 1e3:.2f} ms forward and "
        f"{_layer_time_s(recording, BlockKind.BACKWARD, held) * 1e3:.2f} ms backward, as on the stage that "
        f"needs least; collectives, gradients and optimizer of stage {stage} follow its layers",
    )


def _layers_on(recording: Recording) -> dict[int, int]:
    stages = sorted({record.stage for record in recording.ranks})
    known = recording.facts.get("layers_on")
    if isinstance(known, dict) and all(stage in known for stage in stages):
        return {stage: int(known[stage]) for stage in stages}
    layers = recording.facts.get("layers")
    if not isinstance(layers, int):
        raise ValueError("the number of layers of this run is not known")
    return dict.fromkeys(stages, layers // recording.layout.pp)


def _stage_compute_s(recording: Recording, stage: int, kind: BlockKind) -> float:
    """Computation of one micro-batch on *stage*, the mean of its ranks."""
    mine = [record for record in recording.ranks if record.stage == stage]
    total_s = sum(recording.compute_s(record, kind) for record in mine)
    return total_s / len(mine) / max(1, recording.micro_batches)


def _layer_time_s(recording: Recording, kind: BlockKind, held: dict[int, int]) -> float:
    return min(_stage_compute_s(recording, stage, kind) / count for stage, count in held.items())


def _layer_factor(recording: Recording, stage: int, kind: BlockKind, held: dict[int, int], layers: int) -> float:
    before_s = _stage_compute_s(recording, stage, kind)
    if not before_s:
        return 1.0
    return max(0.0, 1 + layers * _layer_time_s(recording, kind, held) / before_s)
