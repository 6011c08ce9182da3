"""A PyTorch profiler (Kineto) trace of one rank or many: kernels by class, matched collectives, stragglers.

A collective moves data only once its last member has arrived. That member waits for nobody, so the shortest of the
members' times is the transfer, and the rest of a member's time is its wait. This compares durations, not starts: it
holds whatever the clocks of the hosts say.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stepcast.analyze.kineto import kernels
from stepcast.analyze.kineto.rank import GroupTimes, RankLanes, RankTime, marked_lanes, rank_time
from stepcast.analyze.result import AnalysisResult, find_slow, list_ranks, longest_names, median_of_known
from stepcast.ir.arrays import BoolArray, FloatArray, Int32Array, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.types import pick, require, sum_by_key
from stepcast.ir.work import Collective, Transfer, bus_factor
from stepcast.units import format_percent, format_seconds
from stepcast.views.declared import phrase, phrases

TOP_WAITS = 20
CommunicationKinds = dict[tuple[str, str, str], int]  # the members of each collective, group and list of ranks


class CollectiveRow(msgspec.Struct, frozen=True):
    """All runs of one collective of one size over one group; times are sums over ranks and runs."""

    kind: str
    group: str
    ranks: int
    size_bytes: int | None
    count: int
    total_s: float
    matched: int  # runs whose members are all in the trace
    transfer_s: float | None  # median of the matched runs
    wait_s: float  # in matched runs
    busbw_bytes_per_s: float | None


class RankWait(msgspec.Struct, frozen=True):
    """The time that a rank waited for another that came last to their collectives."""

    rank: int
    waits_for: int
    collectives: int
    wait_s: float


class MatchedCollectives:
    """The communication of several ranks, each run of a collective matched with those of its other members."""

    def __init__(self, timeline: Timeline) -> None:
        rows = np.flatnonzero(timeline.kind_of == SpanKind.COMMUNICATION).astype(np.int64)
        self.timeline = timeline
        self.spans = rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
        self.kinds, key_of, sequence_of = _find_kinds(timeline)
        detail = timeline.detail_of[rows]
        self.key = np.where(detail == NONE, len(self.kinds), key_of[detail])
        self.rank, self.duration_s = timeline.rank_of[rows], timeline.duration_s[rows]
        # Buffers of another size are another collective: streams may run two at once, in either order.
        sized = (self.key * (len(timeline.works) + 1) + timeline.work_of[rows] + 1).astype(np.int64)
        ordinal = _ordinals(self.rank, sized, sequence_of[detail])
        _, first, self.run_of, counts = np.unique(
            np.stack([sized, ordinal]), axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        self.run_of = self.run_of.reshape(-1).astype(np.int64)
        self.shortest_s = np.full(len(counts), np.inf)
        np.minimum.at(self.shortest_s, self.run_of, self.duration_s)
        # Gloo names no group: then it is assumed to be all ranks, if all are in the trace.
        everyone = 0 if timeline.facts.get("missing_ranks") else len(timeline.ranks)
        members = np.array([*self.kinds.values(), 0], dtype=np.int64)[self.key]
        unnamed = np.array([*(not any(names[1:]) for names in self.kinds), True])[self.key]
        self.members = np.where((members == 0) & unnamed, everyone, members)
        message = np.array([isinstance(work, Transfer) for work in timeline.works] + [False])[timeline.work_of[rows]]
        self.complete: BoolArray = (self.members > 1) & (counts[self.run_of] == self.members) & ~message
        self.waited_s = np.where(self.complete, self.duration_s - self.shortest_s[self.run_of], 0.0)
        self.matched = int(self.complete[first].sum())
        self.unmatched = len(counts) - self.matched
        waits_of_run_s = np.bincount(self.run_of, weights=self.waited_s, minlength=len(counts))
        is_last = self.complete & (self.waited_s == 0.0) & (waits_of_run_s > 0.0)[self.run_of]
        self.last = Counter[int](self.rank[is_last].tolist())  # how often a rank came last
        last_of = np.full(len(counts), NONE, np.int64)
        last_of[self.run_of[is_last]] = self.rank[is_last]
        # By row of the timeline: the matched run of a collective, and its transfer in place of its time.
        self.meeting_of = np.full(len(timeline), NONE, np.int64)
        self.meeting_of[rows[self.complete]] = self.run_of[self.complete]
        self.transfers_s = timeline.duration_s.copy()
        self.transfers_s[rows] -= self.waited_s
        rank, run_of, waited_s = (column[self.complete] for column in (self.rank, self.run_of, self.waited_s))
        self.wait_s = _sum_by_rank(rank, waited_s)  # in matched collectives, as the three below
        self.transfer_s = _sum_by_rank(rank, self.shortest_s[run_of])
        self.waits = _rank_waits(rank, last_of[run_of], waited_s)
        # Of each rank's clock against that of the first.
        self.clock_offset_s = _clock_offsets(rank, run_of, timeline.end_s[rows][self.complete])
        self.rows = self._rows()

    def delay_s(self, ranks: Sequence[int]) -> float:
        """Return how much earlier matched collectives would have begun in total without waiting for *ranks*."""
        others_s = np.full(len(self.shortest_s), np.inf)
        others = self.complete & ~np.isin(self.rank, ranks)
        np.minimum.at(others_s, self.run_of[others], self.duration_s[others])
        return float((others_s - self.shortest_s)[np.isfinite(others_s)].sum())

    def _rows(self) -> list[CollectiveRow]:
        groups, inverse = np.unique(
            np.stack([self.key, self.timeline.work_of[self.spans]]), axis=1, return_inverse=True
        )
        inverse = inverse.reshape(-1)
        table, names = [], [*self.kinds, ("unknown", "", "")]
        for number, (kind, work_index) in enumerate(groups.T.tolist()):
            mine = inverse == number
            work = self.timeline.works[work_index] if work_index != NONE else None
            matched = np.unique(self.run_of[mine & self.complete])
            transfer_s = float(np.median(self.shortest_s[matched])) if len(matched) else None
            members, seconds = int(self.members[mine][0]), self.duration_s[mine]
            table.append(
                CollectiveRow(
                    kind=str(work.kind) if isinstance(work, Collective) else names[kind][0],
                    group=names[kind][1],
                    ranks=members,
                    size_bytes=work.size_bytes if isinstance(work, Collective | Transfer) else None,
                    count=int(mine.sum()),
                    total_s=float(seconds.sum()),
                    matched=len(matched),
                    transfer_s=transfer_s,
                    wait_s=float(self.waited_s[mine].sum()),
                    # On one rank alone, the shortest run waited least.
                    busbw_bytes_per_s=_busbw(work, members, transfer_s or float(seconds.min())),
                )
            )
        return sorted(table, key=lambda row: -row.total_s)


def _rank_waits(rank: Int32Array, last: IntArray, wait_s: FloatArray) -> list[RankWait]:
    """Return who waits for whom in matched collectives, the longest first."""
    pairs, inverse, counts = np.unique(np.stack([rank, last]), axis=1, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse.reshape(-1), weights=wait_s, minlength=pairs.shape[1])
    rows = [
        RankWait(waiter, late, int(number), float(seconds))
        for (waiter, late), number, seconds in zip(pairs.T.tolist(), counts, sums, strict=True)
        if seconds > 0
    ]
    return sorted(rows, key=lambda row: -row.wait_s)[:TOP_WAITS]


def _clock_offsets(rank: Int32Array, instance: IntArray, end_s: FloatArray) -> dict[int, float]:
    """Return how much later each rank's clock shows the end of a collective, which all members reach together."""
    ranks = np.unique(rank)
    if len(ranks) < 2:
        return {}
    offset_s, fresh = {int(ranks[0]): 0.0}, [int(ranks[0])]
    reference = np.full(int(instance.max()) + 1, np.nan)
    while fresh:  # those that share a collective with the ones before
        for placed in fresh:
            own = rank == placed
            reference[instance[own]] = end_s[own] - offset_s[placed]
        later_s = end_s - reference[instance]
        known = ~np.isnan(later_s)
        fresh = [other for other in np.unique(rank[known]).tolist() if other not in offset_s]
        offset_s |= {other: float(np.median(later_s[known & (rank == other)])) for other in fresh}
    return offset_s


def _find_kinds(timeline: Timeline) -> tuple[CommunicationKinds, IntArray, IntArray]:
    """Return the distinct kinds of communication; for each detail its kind and sequence number (-1: none)."""
    kinds: CommunicationKinds = {}
    key_of, sequence_of = [], []
    for detail in timeline.details:
        ranks, name = detail.get("ranks", ""), detail.get("group", "")
        # Long lists of ranks are truncated in the trace; then the group's name identifies it.
        key = detail.get("collective", ""), detail.get("description") or name, ranks or name
        size, sequence = detail.get("group_size", ""), detail.get("sequence", "")
        members = int(size) if size.isdecimal() and len(size) < 9 else len(ranks.split(",")) if ranks else 0
        kinds.setdefault(key, members)
        key_of.append(key)
        sequence_of.append(int(sequence) if sequence.isdecimal() and len(sequence) < 18 else -1)
    numbers = {key: number for number, key in enumerate(kinds)}
    # One more, for rows without details: index -1.
    number_of = np.array([*(numbers[key] for key in key_of), len(kinds)], np.int64)
    return kinds, number_of, np.array([*sequence_of, -1], np.int64)


def _ordinals(rank: Int32Array, key: IntArray, sequence: IntArray) -> IntArray:
    """Return the sequence number, or without one the ordinal of a row among its kind on its rank."""
    order = np.lexsort((np.arange(len(key)), key, rank))
    fresh = np.ones(len(key), dtype=bool)
    fresh[1:] = (rank[order][1:] != rank[order][:-1]) | (key[order][1:] != key[order][:-1])
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = np.arange(len(key)) - np.maximum.accumulate(np.where(fresh, np.arange(len(key)), 0))
    # Negative, to differ from real sequence numbers.
    return np.where(sequence >= 0, sequence, -1 - ordinal)


def _sum_by_rank(rank: Int32Array, seconds: FloatArray) -> dict[int, float]:
    ranks, inverse = np.unique(rank, return_inverse=True)
    sums = np.bincount(inverse, weights=seconds, minlength=len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def _busbw(work: object, ranks: int, seconds: float) -> float | None:
    if seconds <= 0 or not isinstance(work, Collective | Transfer) or not work.size_bytes:
        return None
    if isinstance(work, Transfer):
        return work.size_bytes / seconds
    return None if ranks < 2 else bus_factor(work.kind, ranks) * work.size_bytes / seconds


LAUNCH_BOUND = 0.1  # share of the window from which CPU launch overhead is reported
TOP_KERNELS = 5_000  # by name; traces with Python stacks have far more names of the host

LEAST_ADVICE = 0.01  # of the step
SLOW_STEP = 1.5  # times the median step


class KernelRow(msgspec.Struct, frozen=True):
    """All runs of one kernel, over all ranks."""

    name: str
    label: str = msgspec.field(name="class")
    count: int
    total_s: float
    share: float  # of all kernels' time


class HostOperator(msgspec.Struct, frozen=True):
    """All runs of one operator of the host, over all ranks; nested operators count in each."""

    name: str
    count: int
    total_s: float


class TraceAdvice(msgspec.Struct, frozen=True):
    """A change that would make the step shorter: the seconds it saves, and why."""

    text: str
    saves_s: float
    share: float  # of the step
    evidence: str
    what_if: str | None = None  # the change that 'stepcast replay' takes


class TraceStraggler(msgspec.Struct, frozen=True):
    """A rank that computes longer than the others, or whose host is late and lets them wait."""

    rank: int
    cause: str  # compute or host
    factor: float  # against the median of the others: its computation, with idle time for its host if that is the cause
    extra_s: float  # per step, beyond the median of the others
    compute_s: float
    last: int  # how often it was the last to arrive at a collective
    meetings: int
    waits_s: float  # mean over the other ranks in the collectives they took part in


class PathPart(msgspec.Struct, frozen=True):
    rank: int
    part: str
    seconds: float


class KinetoAnalysis(AnalysisResult, frozen=True, kw_only=True):
    """A profiler trace; times are per step, mean over ranks."""

    view = "measured.kineto_view"
    kind: str
    source: str
    gpus: int | None  # of the whole job, if its traces say
    step_s: float
    operations_s: dict[str, float]
    bubble_s: float
    compute_s: float
    communication_s: float
    exposed_comm_s: float
    overlapped_comm_s: float
    copy_s: float
    communication_by_group_s: dict[str, dict[str, float]]
    ranks: list[RankTime]
    kernels: list[KernelRow]
    operators: list[HostOperator]
    collectives: list[CollectiveRow]
    waits: list[RankWait]
    clock_offset_s: dict[int, float]
    matched_collectives: int
    unmatched_collectives: int
    stragglers: list[TraceStraggler]
    critical_path: list[PathPart]
    advice: list[TraceAdvice]
    warnings: list[str]
    recorded: AnalysisResult | msgspec.UnsetType = msgspec.UNSET  # a RecordedResult, where it was recorded


def analyze_kineto(timeline: Timeline) -> KinetoAnalysis:
    """Return where the time of the traced ranks went."""
    lanes = marked_lanes(timeline)
    timeline, matching = lanes.timeline, MatchedCollectives(lanes.timeline)
    times = [
        time
        for rank in timeline.ranks
        if (time := rank_time(lanes, rank, matching.wait_s.get(rank), matching.transfer_s.get(rank)))
    ]
    require(bool(times), f"{timeline.source}: holds no work of a GPU or a CPU thread to analyse")
    ranks = [rank for rank, _ in times]

    def mean(name: str) -> float:
        return sum(rank.per_step(getattr(rank, name)) for rank in ranks) / len(ranks)

    # The rank that waits least for others sets the pace of the step.
    slowest = max(ranks, key=lambda rank: rank.own_s)
    path = sorted(slowest.breakdown_s.items(), key=lambda part: -part[1])
    step_s = max(rank.step_s for rank in ranks)
    stragglers = _find_stragglers(ranks, matching)
    classes_s, groups_s = _class_seconds(lanes, ranks, matching), _mean_groups(times)
    return KinetoAnalysis(
        kind="kineto run",
        source=timeline.source,
        gpus=timeline.facts.get("world_size"),
        step_s=step_s,
        operations_s=classes_s,
        bubble_s=mean("idle_s"),
        compute_s=mean("compute_s"),
        communication_s=mean("communication_s"),
        copy_s=mean("copy_s"),
        exposed_comm_s=mean("exposed_communication_s"),
        overlapped_comm_s=mean("overlapped_communication_s"),
        communication_by_group_s=groups_s,
        ranks=ranks,
        kernels=_top_kernels(timeline),
        operators=[
            HostOperator(*row) for row in longest_names(timeline, timeline.kind_of == SpanKind.HOST, TOP_KERNELS)
        ],
        **pick(matching, "collectives=rows waits clock_offset_s"),
        **pick(matching, "matched_collectives=matched unmatched_collectives=unmatched"),
        stragglers=stragglers,
        critical_path=[
            PathPart(slowest.rank, name, slowest.per_step(seconds)) for name, seconds in path if seconds > 0
        ],
        advice=_advise(lanes, matching, slowest, step_s, classes_s, times, stragglers),
        warnings=[*timeline.warnings, *_doubts(lanes, ranks, matching)],
    )


def _mean_groups(times: list[tuple[RankTime, GroupTimes]]) -> dict[str, dict[str, float]]:
    """Return total and exposed communication by group, per step, mean over the ranks that take part."""
    means = {}
    for name in sorted({name for _, groups in times for name in groups}):
        parts = [(rank, groups[name]) for rank, groups in times if name in groups]
        means[name] = {
            word: sum(rank.per_step(part[place]) for rank, part in parts) / len(parts)
            for place, word in enumerate(("total", "exposed"))
        }
    return means


def _class_seconds(lanes: RankLanes, ranks: list[RankTime], matching: MatchedCollectives) -> dict[str, float]:
    """Return the time by class of kernel, per rank and step."""
    timeline = lanes.timeline
    numbers: dict[str, int] = {}
    class_of = np.array([numbers.setdefault(kernels.kernel_class(name), len(numbers)) for name in timeline.names])
    per_step = np.zeros(len(numbers))
    for rank in ranks:
        rows = lanes.rows_on(lanes.streams(rank.rank))
        rows = rows[timeline.kind_of[rows] == SpanKind.COMPUTE]
        seconds, classes = timeline.duration_s[rows], class_of[timeline.name_of[rows]]
        total_s = np.bincount(classes, weights=seconds, minlength=len(numbers))
        per_step += total_s / max(rank.steps, 1) / len(ranks)
    classes_s = {name: float(seconds) for name, seconds in zip(numbers, per_step, strict=True) if seconds > 0}
    count = sum(max(rank.steps, 1) for rank in ranks)
    classes_s |= sum_by_key((f"{kernels.COMMUNICATION}: {row.kind}", row.total_s / count) for row in matching.rows)
    copies_s = float(timeline.duration_s[timeline.kind_of == SpanKind.COPY].sum())
    if copies_s:
        classes_s[kernels.COPY] = copies_s / count
    return dict(sorted(classes_s.items(), key=lambda item: (item[0] == kernels.OTHER, -item[1])))


def _top_kernels(timeline: Timeline) -> list[KernelRow]:
    device = timeline.kind_of <= SpanKind.COPY
    kind_of = np.zeros(len(timeline.names), dtype=np.int32)
    kind_of[timeline.name_of[device]] = timeline.kind_of[device]
    kinds = dict(zip(timeline.names, kind_of.tolist(), strict=True))
    total_s = float(np.bincount(timeline.name_of[device], weights=timeline.duration_s[device]).sum()) or 1.0
    # Communication and copies are recognised by their kind, not by their name.
    labels: dict[int, str] = {SpanKind.COMMUNICATION: kernels.COMMUNICATION, SpanKind.COPY: kernels.COPY}
    return [
        KernelRow(name, labels.get(kinds[name]) or kernels.kernel_class(name), count, seconds, seconds / total_s)
        for name, count, seconds in longest_names(timeline, device, TOP_KERNELS)
    ]


def _advise(
    lanes: RankLanes,
    matching: MatchedCollectives,
    slowest: RankTime,
    step_s: float,
    classes_s: Mapping[str, float],
    times: list[tuple[RankTime, GroupTimes]],
    stragglers: Sequence[TraceStraggler],
) -> list[TraceAdvice]:
    """Return what would make the step shorter, the most first; of the rank that sets the pace."""
    fused_s = slowest.per_step(_fusion_savings_s(lanes, slowest.rank))
    kernels_s = sum(classes_s.get(name, 0.0) for name in kernels.FUSIBLE)
    loading_s = slowest.per_step(slowest.loading_s)
    # Without launches, operators of the CPU are what was measured: there is nothing to capture.
    host_s = slowest.per_step(slowest.host_idle_s) if slowest.launches_per_step else 0.0
    known = {"kernels_s": kernels_s, "step_s": step_s, "host_s": host_s, "loading_s": loading_s}
    known["launches"] = slowest.launches_per_step
    entries: list[tuple[str, float, str, str | None]] = [
        ("compile the element-wise kernels (torch.compile)", fused_s, phrase("fusible", known), "compile=elementwise"),
        ("issue the step as CUDA graphs", host_s, phrase("starved", known), "host=graphs"),
        ("load data ahead of the step (DataLoader workers, prefetching)", loading_s, phrase("loading", known), None),
    ]
    for name, group in _mean_groups(times).items():
        # The rank that comes last waits least: what the others wait for it beyond that cannot be hidden.
        least_s = min(rank.per_step(groups[name][1]) for rank, groups in times if name in groups)
        text = f"hide the {name} communication behind computation"
        entries.append((text, least_s, phrase("exposed", group), None))
    for cause, text, words in (
        ("compute", "repair or replace", "computing {:.2f} times as long as the median of the others"),
        ("host", "find out what delays the CPU of", "computing or idle for the CPU {:.2f} times as long as the others"),
    ):
        rows = [row for row in stragglers if row.cause == cause]
        if rows:
            slow = [row.rank for row in rows]
            saves_s = max(row.extra_s for row in rows)
            if matching.matched:  # not more than what the others wait for them
                saves_s = min(saves_s, slowest.per_step(matching.delay_s(slow)))
            what_if = f"rank.{slow[0]}=healthy" if len(slow) == 1 else None
            entries.append((f"{text} {_named_ranks(slow)}", saves_s, words.format(rows[0].factor), what_if))
    advice = []
    for text, saves_s, evidence, what_if in entries:
        share = saves_s / step_s if step_s else 0.0
        if share >= LEAST_ADVICE:
            words = f"{text}: saves about {format_seconds(saves_s)}, {format_percent(share)}"
            advice.append(TraceAdvice(words, saves_s, share, evidence, what_if))
    return sorted(advice, key=lambda row: -row.saves_s)


def _fusion_savings_s(lanes: RankLanes, rank: int) -> float:
    """Return the time of kernels that torch.compile saves."""
    timeline, saved_s = lanes.timeline, 0.0
    fusible = np.array([kernels.is_fusible(name) for name in timeline.names], dtype=bool)
    is_set = np.array([name.startswith("Memset") for name in timeline.names], dtype=bool)
    for lane in lanes.streams(rank):
        rows = lanes.rows[lane]
        rows = rows[(timeline.kind_of[rows] <= SpanKind.COPY) & ~is_set[timeline.name_of[rows]]]
        rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
        if len(rows):
            name_of, seconds = timeline.name_of[rows], timeline.duration_s[rows]
            can_fuse = fusible[name_of] & ~kernels.rows_of_unfused(timeline, lanes.calls[rows])
            saved_s += float(seconds.sum() - kernels.fuse(timeline.names, name_of, seconds, can_fuse)[1].sum())
    return max(saved_s, 0.0)


def _find_stragglers(ranks: list[RankTime], matching: MatchedCollectives) -> list[TraceStraggler]:
    compute_s = {rank.rank: rank.per_step(rank.compute_s) for rank in ranks}
    own_s = {rank.rank: rank.per_step(rank.own_s) for rank in ranks}
    slow = {rank: ("compute", factor, extra_s) for rank, factor, extra_s in find_slow(compute_s)}
    late = [row for row in find_slow(own_s) if row[0] not in slow]
    if matching.delay_s([row[0] for row in late]) > LEAST_ADVICE * max(rank.window_s for rank in ranks):
        slow |= {rank: ("host", factor, extra_s) for rank, factor, extra_s in late}
    stragglers = []
    for rank, reasons in slow.items():
        waits = [wait for other, wait in matching.wait_s.items() if other != rank]
        mean_wait_s = sum(waits) / len(waits) if waits else 0.0
        meetings = matching.last[rank], matching.matched
        stragglers.append(TraceStraggler(rank, *reasons, compute_s[rank], *meetings, mean_wait_s))
    return stragglers


def _doubts(lanes: RankLanes, ranks: list[RankTime], matching: MatchedCollectives) -> list[str]:
    steps = lanes.steps.get(ranks[0].rank)
    times_s = steps.durations_s.tolist() if steps else [0.0]
    longest_s, usual_s = max(times_s), median_of_known(times_s) or 0.0
    on_host = [rank.rank for rank in ranks if not lanes.streams(rank.rank)]
    bound = [rank for rank in ranks if rank.rank not in on_host and rank.launch_bound_share > LAUNCH_BOUND]
    is_alone, missing = len(ranks) == 1, lanes.timeline.facts.get("missing_ranks")
    return phrases(
        "uneven-steps unmarked one-rank missing-ranks unmatched on-host launch-bound",
        {"longest_s": longest_s, "usual_s": usual_s, "steps": times_s},
        slow_step=times_s.index(longest_s) + 1 if longest_s > SLOW_STEP * usual_s else None,
        unmarked=not any(rank.steps for rank in ranks),
        alone=is_alone,
        missing=missing if missing and not is_alone else None,
        unmatched=matching.unmatched if matching.unmatched and not is_alone else None,
        on_host=_named_ranks(on_host) if on_host else None,
        bound=_named_ranks([rank.rank for rank in bound]) if bound else None,
        most_share=max((rank.launch_bound_share for rank in bound), default=None),
    )


def _named_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"
