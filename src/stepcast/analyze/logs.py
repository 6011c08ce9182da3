"""Job logs, kernel databases and recorded runs: printed steps, collectives that NCCL logged, kernels, measured ops."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec
import numpy as np

from stepcast.analyze.intervals import Intervals, union_of
from stepcast.analyze.result import AnalysisResult, find_slow, longest_names, median_of_known, percentile_of
from stepcast.ir.measured import CollectiveLog, LoggedCollective, StepLog
from stepcast.ir.step import PART_OF_GROUP, PARTS
from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.ir.types import FactDict, Facts, group_by_key, pick
from stepcast.ir.work import Attention, Collective, Elementwise, GroupedMatmul, Matmul, Recorded, Work
from stepcast.units import format_seconds

WARM_UP_STEPS = 2  # at the start of a log: they compile and connect
SLOW_STEP = 1.5  # times the median step
TREND = 0.02  # share by which the quartiles of the first and last third differ where steps grow or shrink
MOST_ROWS = 20
COMPLETED = "completed"
NUMBERS = re.compile(r"\d+")
FEWEST_STEPS = 3  # ranges of one name that count as steps
DEVICE_KINDS = (SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY)
STEP_NAME = re.compile(r"step|iter|batch", re.IGNORECASE)


class AnalyzedLogs(AnalysisResult, frozen=True, kw_only=True):
    """Several logs of one format, each analyzed alone."""

    runs: list[dict[str, object]]  # the path of each as "file", and its result
    warnings: list[str]


class SlowStep(msgspec.Struct, frozen=True):
    step: int
    seconds: float
    factor: float


class StepLogResult(AnalysisResult, frozen=True, kw_only=True):
    """The steps of a log without its warm-up."""

    view = "measured.step_log_view"
    program: str
    steps: int
    step_s: float | None
    p10_s: float | None
    p90_s: float | None
    tflops_per_gpu: float | None
    tokens_per_s_per_gpu: float | None
    global_batch: float | None
    peak_memory_bytes: float | None
    last_loss: float | None
    slow_steps: list[SlowStep]
    lost_s: float  # beyond the median step, including steps between two lines of the log
    program_facts: dict[str, object]  # what else the program printed; keys of their own in the JSON
    warnings: list[str]

    def facts(self) -> FactDict:
        facts = AnalysisResult.facts(self)
        printed, warnings = facts.pop("program_facts"), facts.pop("warnings")
        return {**facts, **printed, "warnings": warnings}


def analyze_step_log(log: StepLog) -> StepLogResult:
    steps = log.steps
    warm = steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps
    timed = [step.seconds for step in warm if step.seconds is not None]
    usual_s = median(timed) if timed else None
    warnings = [*log.warnings]
    if not timed:
        warnings.append("no line states how long a step took")
    elif len(steps) <= 2 * WARM_UP_STEPS:
        warnings.append(f"{len(steps)} steps are too few to leave out the first ones")
    pairs = [(earlier.step, later.step) for earlier, later in pairwise(steps)]
    interval = median_of_known(later - earlier for earlier, later in pairs if later > earlier) or 1.0
    # Lines of several ranks repeat a step or fall back by one interval.
    if falls := [pair for pair in pairs if pair[1] < pair[0] - interval]:
        warnings.append(
            f"step {falls[0][0]} is followed by step {falls[0][1]}: the log holds {len(falls) + 1} runs or starts of "
            "one, which these figures mix"
        )
    warnings += _describe_trend(timed)
    slow_steps = [
        SlowStep(step.step, step.seconds, step.seconds / usual_s)
        for step in warm
        if usual_s and step.seconds is not None and step.seconds > SLOW_STEP * usual_s
    ]
    return StepLogResult(
        **pick(log, "program peak_memory_bytes=peak_bytes"),
        steps=len(steps),
        step_s=usual_s,
        p10_s=percentile_of(timed, 0.1) if timed else None,
        p90_s=percentile_of(timed, 0.9) if timed else None,
        tflops_per_gpu=median_of_known(step.tflops_per_gpu for step in warm),
        tokens_per_s_per_gpu=median_of_known(step.tokens_per_s_per_gpu for step in warm),
        global_batch=next((step.samples for step in reversed(warm) if step.samples), None),
        last_loss=next((step.loss for step in reversed(steps) if step.loss is not None), None),
        slow_steps=slow_steps[:MOST_ROWS],
        lost_s=interval * sum(max(0.0, seconds - usual_s) for seconds in timed) if usual_s else 0.0,
        program_facts=dict(log.facts),
        warnings=warnings,
    )


def _describe_trend(times_s: Sequence[float]) -> Iterator[str]:
    """Yield a sentence if the first and the last third of the steps hardly overlap."""
    third = len(times_s) // 3
    if third >= FEWEST_STEPS:
        parts = times_s[:third], times_s[-third:]
        first_s, last_s = ([percentile_of(part, share) for share in (0.25, 0.5, 0.75)] for part in parts)
        if max(last_s[0] / first_s[2], first_s[0] / last_s[2]) > 1 + TREND:
            first, last = format_seconds(first_s[1]), format_seconds(last_s[1])
            yield f"the median step changes from {first} in the first third of the log to {last} in the last"


class LoggedKind(msgspec.Struct, frozen=True):
    """All calls of one collective of one size over one group."""

    kind: str
    group: str
    size_bytes: int
    calls: int
    median_s: float | None
    total_s: float
    busbw_bytes_per_s: float | None


class UnfinishedCall(msgspec.Struct, frozen=True):
    """A call that some ranks have not finished, and the ranks that never called it."""

    group: str
    turn: int
    kind: str
    size_bytes: int
    waiting: list[int]
    absent: list[int]


class MismatchedCall(msgspec.Struct, frozen=True):
    """A turn at which ranks called different collectives, or different sizes."""

    group: str
    turn: int
    called: list[list[str | int]]


class LateRank(msgspec.Struct, frozen=True):
    """The number of times a rank arrived last, and how long the others waited for it."""

    rank: int
    last: int
    waited_s: float
    factor: None = None


class CollectiveLogResult(AnalysisResult, frozen=True, kw_only=True):
    """Collectives by kind and size, and calls on which ranks disagree."""

    view = "measured.collective_log_view"
    program: str
    ranks: list[int]
    calls: int
    groups: dict[str, list[int]]
    collectives: list[LoggedKind]
    unfinished: list[UnfinishedCall]
    mismatched: list[MismatchedCall]
    stragglers: list[LateRank]
    warnings: list[str]


def analyze_collective_log(log: CollectiveLog) -> CollectiveLogResult:
    by_turn = group_by_key(((call.group, call.turn), call) for call in log.calls)
    turns = sorted(by_turn.items())
    called = [
        (turn, {(call.kind, call.size_bytes) for call in calls if call.kind not in ("send", "recv")})
        for turn, calls in turns
    ]
    mismatched = [MismatchedCall(*turn, sorted(map(list, kinds), key=str)) for turn, kinds in called if len(kinds) > 1]
    collectives = []
    for kind, calls in group_by_key(((call.kind, call.group, call.size_bytes), call) for call in log.calls).items():
        times_s = [call.seconds for call in calls if call.seconds is not None]
        rate = median_of_known(call.bus_bytes_per_s for call in calls)
        collectives.append(LoggedKind(*kind, len(calls), median_of_known(times_s), sum(times_s), rate))
    return CollectiveLogResult(
        program=log.program,
        ranks=list(log.ranks),
        calls=len(log.calls),
        groups={name: list(ranks) for name, ranks in log.members.items()},
        collectives=sorted(collectives, key=lambda row: (-row.total_s, -row.calls)),
        unfinished=_find_unfinished(log, turns)[:MOST_ROWS],
        mismatched=mismatched[:MOST_ROWS],
        stragglers=_late_ranks(by_turn.values()),
        warnings=list(log.warnings),
    )


def _find_unfinished(
    log: CollectiveLog, turns: Sequence[tuple[tuple[str, int], list[LoggedCollective]]]
) -> list[UnfinishedCall]:
    turns_of = group_by_key(((call.group, call.rank), call.turn) for call in log.calls)
    last = {caller: max(turns) for caller, turns in turns_of.items()}
    rows = []
    for (group, turn), calls in turns:
        waiting = sorted({call.rank for call in calls if call.state != COMPLETED})
        if waiting:
            known = set(log.members.get(group, log.ranks)) & set(log.ranks)
            absent = sorted(rank for rank in known if last.get((group, rank), -1) < turn)
            rows.append(UnfinishedCall(group, turn, calls[0].kind, calls[0].size_bytes, waiting, absent))
    return rows


def _late_ranks(turns: Iterable[list[LoggedCollective]]) -> list[LateRank]:
    """Return the ranks that others waited for: who came last stayed shortest, whatever the clocks of hosts say.

    Where durations are not recorded, the times of the calls are compared.
    """
    late: dict[int, list[float]] = defaultdict(list)
    for calls in turns:
        stays = [(call.seconds, call.rank) for call in calls if call.seconds is not None]
        if len(stays) < len(calls):
            stays = [(-call.issued_s, call.rank) for call in calls if call.issued_s is not None]
        if len(stays) > 1:
            (last_s, rank), (next_s, _) = sorted(stays)[:2]
            if next_s > last_s:
                late[rank].append(next_s - last_s)
    rows = [LateRank(rank, len(waits), sum(waits)) for rank, waits in late.items()]
    return sorted(rows, key=lambda row: -row.waited_s)


class DeviceTime(msgspec.Struct, frozen=True):
    """The time of one GPU; computation, exposed communication, copies and idle time sum to the elapsed time."""

    device: int
    elapsed_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    copy_s: float
    idle_s: float


class SlowDevice(msgspec.Struct, frozen=True):
    rank: int
    factor: float
    extra_s: float


class NamedRuns(msgspec.Struct, frozen=True):
    """All runs of one kernel or range."""

    name: str
    runs: int
    total_s: float


class MarkedRanges(msgspec.Struct, frozen=True):
    """Ranges named like steps, from the start of one to the start of the next of the same rank or thread."""

    name: str
    count: int
    median_s: float


class StreamsResult(AnalysisResult, frozen=True, kw_only=True):
    """The kernels on the streams of GPUs; operations, exposed communication and bubble are those of a step, if steps
    are marked, else of the whole trace.
    """

    view = "measured.streams_view"
    devices: list[DeviceTime]
    elapsed_s: float
    step_s: float | None
    steps: MarkedRanges | None
    operations_s: dict[str, float]
    exposed_comm_s: float
    bubble_s: float
    kernels: list[NamedRuns]
    ranges: list[NamedRuns]
    stragglers: list[SlowDevice]
    critical_path: list[str]
    warnings: list[str]


def analyze_streams(timeline: Timeline) -> StreamsResult:
    on_gpu = np.isin(timeline.kind_of, DEVICE_KINDS)
    devices = [_device_time(timeline, device) for device in sorted({int(rank) for rank in timeline.rank_of[on_gpu]})]
    rows = np.flatnonzero(timeline.kind_of == SpanKind.HOST).tolist()
    # Rows by name, numbers within names replaced.
    ranges = group_by_key((NUMBERS.sub("*", timeline.names[timeline.name_of[row]]), row) for row in rows)
    steps = _marked_ranges(timeline, ranges)
    parts = ("compute", "exposed", "copy", "idle")
    step_s = steps.median_s if steps else None
    elapsed_s = sum(device.elapsed_s for device in devices)
    scale = step_s / elapsed_s if step_s and elapsed_s else 1 / max(1, len(devices))
    operations_s = {part: sum(getattr(device, f"{part}_s") for device in devices) * scale for part in parts}
    named = [NamedRuns(name, len(rows), float(timeline.duration_s[rows].sum())) for name, rows in ranges.items()]
    return StreamsResult(
        devices=devices,
        elapsed_s=timeline.span_s,
        step_s=step_s,
        steps=steps,
        operations_s=operations_s,
        exposed_comm_s=operations_s["exposed"],
        bubble_s=operations_s["idle"],
        kernels=[NamedRuns(*row) for row in longest_names(timeline, on_gpu, MOST_ROWS)],
        ranges=sorted(named, key=lambda row: -row.total_s)[:MOST_ROWS],
        stragglers=[SlowDevice(*row) for row in find_slow({device.device: device.compute_s for device in devices})],
        critical_path=[],
        warnings=list(timeline.warnings),
    )


def _device_time(timeline: Timeline, device: int) -> DeviceTime:
    own = timeline.rank_of == device

    def spans_of(*kinds: SpanKind) -> Intervals:
        rows = own & np.isin(timeline.kind_of, kinds)
        return union_of(timeline.start_s[rows], timeline.end_s[rows])

    every = spans_of(*DEVICE_KINDS)
    elapsed_s = float(every.end_s.max() - every.start_s.min()) if len(every) else 0.0
    compute_s, communication_s = spans_of(SpanKind.COMPUTE).length_s, spans_of(SpanKind.COMMUNICATION).length_s
    both_s, busy_s = spans_of(SpanKind.COMPUTE, SpanKind.COMMUNICATION).length_s, every.length_s
    others_s = both_s - compute_s, busy_s - both_s, elapsed_s - busy_s
    return DeviceTime(device, elapsed_s, compute_s, communication_s, *others_s)


def _marked_ranges(timeline: Timeline, ranges: dict[str, list[int]]) -> MarkedRanges | None:
    named = ((name, rows) for name, rows in ranges.items() if STEP_NAME.search(name))
    name, rows = max(named, key=lambda pair: len(pair[1]), default=("", []))
    if len(rows) < FEWEST_STEPS:
        return None
    by_lane = group_by_key((int(timeline.lane_of[row]), float(timeline.start_s[row])) for row in rows)
    steps_s = np.concatenate([np.diff(sorted(starts_s)) for starts_s in by_lane.values()])
    return MarkedRanges(name, len(rows), float(np.median(steps_s))) if len(steps_s) else None


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
        error = predicted_s / measured_s - 1 if measured_s else None
        rows.append(KindRow(kind, len(pairs), measured_s, predicted_s, error))
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
