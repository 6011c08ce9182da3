"""Recorded runs: wall clock and logged collectives next to traces; measured ops next to predicted ones."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepcast.analyze.result import AnalysisResult, median_of_known
from stepcast.ir.measured import CollectiveLog
from stepcast.ir.step import PART_OF_GROUP, PARTS
from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.ir.types import FactDict, Facts, group_by_key
from stepcast.ir.work import Attention, Collective, Elementwise, GroupedMatmul, Matmul, Recorded, Work


class JoinedCollective(msgspec.Struct, frozen=True):
    """Calls of one kind and size, as logged and as traced."""

    kind: str
    size_bytes: int
    logged: int
    logged_s: float | None
    busbw_bytes_per_s: float | None
    traced: int
    traced_s: float | None


class JoinedLog(msgspec.Struct, frozen=True):
    program: str
    calls: int
    collectives: list[JoinedCollective]
    warnings: list[str]


class RecordedResult(AnalysisResult, frozen=True, kw_only=True):
    """The wall-clock steps of a recorded job, and its logs of collectives."""

    ranks: list[FactDict]
    wall_step_s: float | None
    plain_step_s: float | None
    clock_spread_s: float
    logs: list[JoinedLog]


def join_recorded(
    ranks: Sequence[Facts], logs: Sequence[CollectiveLog], collectives: Sequence[Facts]
) -> RecordedResult:
    """Join the recorded *ranks* and *logs* with the *collectives* that the profiler traced."""
    ahead_s = [rank["ahead_s"] for rank in ranks] or [0.0]
    return RecordedResult(
        ranks=[dict(rank) for rank in ranks],
        wall_step_s=max((rank["window_step_s"] for rank in ranks if rank["window_step_s"]), default=None),
        plain_step_s=max((rank["step_s"] for rank in ranks), default=None),
        clock_spread_s=max(ahead_s) - min(ahead_s),
        logs=[JoinedLog(log.program, len(log.calls), _join_log(log, collectives), list(log.warnings)) for log in logs],
    )


def _join_log(log: CollectiveLog, collectives: Sequence[Facts]) -> list[JoinedCollective]:
    logged = group_by_key(((_plain_kind(call.kind), call.size_bytes), call) for call in log.calls)
    traced = group_by_key(((_plain_kind(str(row["kind"])), int(row["size_bytes"] or 0)), row) for row in collectives)
    joined = []
    for key in sorted({*logged, *traced}, key=lambda key: (-key[1], key[0])):
        calls, rows = logged.get(key, []), traced.get(key, [])
        kind = str(rows[0]["kind"]) if rows else calls[0].kind.replace("_", "-")
        logged_s = median_of_known(call.seconds for call in calls)
        rate = median_of_known(call.bus_bytes_per_s for call in calls)
        count = sum(int(row["count"]) for row in rows)
        traced_s = sum(float(row["total_s"]) for row in rows) / count if count else None
        joined.append(JoinedCollective(kind, key[1], len(calls), logged_s, rate, count, traced_s))
    return joined


def _plain_kind(kind: str) -> str:
    """Return one word for ``all-reduce``, ``all_reduce`` and ``allreduce_coalesced``."""
    return kind.lower().replace("_", "").replace("-", "").removesuffix("coalesced").removesuffix("tensor")


def kind_of(work: Work | None) -> str:
    """Return the name under which an op is counted."""
    match work:
        case Matmul() | GroupedMatmul() | Recorded():
            return type(work).__name__.lower().replace("grouped", "grouped ")
        case Attention():
            return "attention backward" if work.backward else "attention"
        case Elementwise():
            return str(work.kind)
        case Collective():
            return f"{work.group} {work.kind}"
    return "transfer" if work is None else type(work).__name__.lower()


class KindRow(msgspec.Struct, frozen=True):
    """All ops of a kind, measured and predicted."""

    kind: str
    ops: int
    measured_s: float
    predicted_s: float
    error: float | None


def by_kind(ran: Iterable[tuple[Work | None, float]], seconds: Callable[[Work], float]) -> list[KindRow]:
    """Return the measured and predicted seconds of each kind of op, the longest first."""
    seconds_of = group_by_key((kind_of(work), (took_s, seconds(work))) for work, took_s in ran if work is not None)
    rows = []
    for kind, pairs in seconds_of.items():
        measured_s, predicted_s = map(sum, zip(*pairs, strict=True))
        rows.append(
            KindRow(kind, len(pairs), measured_s, predicted_s, predicted_s / measured_s - 1 if measured_s else None)
        )
    return sorted(rows, key=lambda row: -row.measured_s)


def mean_abs_error(rows: Sequence[KindRow], least_share: float = 0.0) -> float | None:
    """Return the mean over kinds that take at least *least_share* of the time."""
    total_s = sum(row.measured_s for row in rows)
    errors = [abs(row.error) for row in rows if row.error is not None and row.measured_s >= least_share * total_s]
    return sum(errors) / len(errors) if errors else None


def step_parts(timeline: Timeline) -> tuple[float, dict[str, float]]:
    """Return the step time and its parts on the mean rank; time without an op is bubble."""
    step_s = timeline.span_s
    parts, ranks = dict.fromkeys(PARTS, 0.0), max(1, len(timeline.ranks))
    for span in timeline.spans():
        part = PART_OF_GROUP.get(span.lane.name, "other")
        if span.kind is SpanKind.COMPUTE:
            part = "optimizer" if span.micro_batch is None else "compute"
        parts[part] += span.duration_s / ranks
    parts["bubble"] = max(0.0, step_s - sum(parts.values()))
    excess = max(0.0, sum(parts.values()) - step_s)  # communication that overlaps computation
    for part in ("dp", "ep", "tp", "pp", "cp"):
        less = min(parts[part], excess)
        parts[part], excess = parts[part] - less, excess - less
    parts["compute"] -= excess
    return step_s, parts
