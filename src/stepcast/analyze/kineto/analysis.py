"""A PyTorch profiler (Kineto) trace of one rank or many: kernels by class, matched collectives, stragglers.

A collective moves data only once its last member has arrived. That member waits for nobody, so the shortest of the
members' times is the transfer, and the rest of a member's time is its wait. This compares durations, not starts: it
holds whatever the clocks of the hosts say.
"""

import re
from functools import cache

import msgspec
import numpy as np

from stepcast.analyze.kineto.rank import GroupTime, RankLanes, RankTime, class_times, marked_steps, rank_time
from stepcast.analyze.recorded import RecordedResult
from stepcast.analyze.result import AnalysisResult, bus_factor, find_slow, list_ranks
from stepcast.ir.arrays import BoolArray, FloatArray, Int32Array, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, Transfer
from stepcast.units import format_seconds

LAUNCH_BOUND = 0.1  # share of the window from which CPU launch overhead is reported
TOP_KERNELS = 15

MATMUL, ATTENTION, NORM, LOSS = "matmul", "attention", "norm", "softmax and loss"
OPTIMIZER, EMBEDDING, ELEMENTWISE, OTHER = "optimizer", "embedding and sort", "element-wise", "other"

SCAN = "state-space scan"
COPY, COMMUNICATION = "copy", "communication"

# Libraries whose names contain the word of a class: FBGEMM's tables and quantisation are no matmuls (its matmuls
# contain gemm once more), and FlashInfer's norms are not attention.
LIBRARIES = re.compile(r"fbgemm(?:_gpu)?|flashinfer", re.IGNORECASE)
# Inductor names a kernel after the operators it came from, but its prefix states the kind: only a template ("tem")
# is a matmul; others are pointwise ("poi"), for each tensor ("for") or reductions ("red", "per").
INDUCTOR = re.compile(r"triton_(poi|for|red|per|split_scan)_")
POINTWISE = ("poi", "for")
PRODUCTS = (MATMUL, ATTENTION)

# The first match counts: attention kernels are matmuls too, optimizers element-wise. Names of cuBLAS (nvjet, gemm,
# xmma), CUTLASS, cuDNN, FlashAttention, FlashInfer, PyTorch, FBGEMM, Apex, Transformer Engine, Mamba, Triton and
# AMD's Tensile (Cijk) and CK.
CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (EMBEDDING, r"(?:split|dense|ssd)_embedding|embedding_(?:bag|codegen)|bounds_check_indices"),
        (ATTENTION, r"flash|fmha|sdpa|attention|attn|(?:Paged|Ragged)KVCache|compute_dot_do_o|convert_dq"),
        (OPTIMIZER, r"multi_tensor_apply|FusedOptimizer|adam|adagrad|lamb_|fused_sgd|optimizer"),
        (SCAN, r"selective_scan|chunk_(?:scan|state|cumsum)|bmm_chunk|state_passing|causal_conv1d"),
        (
            MATMUL,
            r"gemm|gemv|nvjet|xmma|cutlass|cublas|wgmma|(?:_|add|_b|baddb)mm(?![a-z])|matmul|fused_moe|Cijk|"
            r"splitKreduce|dot_kernel",
        ),
        (NORM, r"layer_?norm|rms_?norm|rmsnorm|GammaBeta|batch_?norm|group_?norm|cuComputeGrad|ln_(?:fwd|bwd)"),
        (LOSS, r"softmax|nll_loss|cross_entropy|logsumexp"),
        (
            EMBEDDING,
            r"(?<!rotary_)(?<!rotary_pos_)embedding|gather_kernel|index|sort|top_?k|scan|scatter|"
            r"compute_grad_weight|segment|unique|permut",
        ),
        (
            ELEMENTWISE,
            r"elementwise|vectorized|unrolled|CatArray|copy_kernel|fill|reduce_kernel|triton|dropout|"
            r"activation|act_and_mul|gelu|silu|swiglu|rotary|rope(?![a-z])|transpose|arange|cast|"
            r"quanti[sz]e|_to_(?:float|half|bf16|fp8|bfloat16)",
        ),
    )
)


@cache
def kernel_class(name: str) -> str:
    """Return the class of work of a GPU kernel by its name."""
    inductor = INDUCTOR.match(name)
    if inductor is not None and inductor[1] in POINTWISE:
        return ELEMENTWISE
    words = LIBRARIES.sub("", name)
    classes = (label for label, pattern in CLASSES if pattern.search(words))
    return next((label for label in classes if inductor is None or label not in PRODUCTS), OTHER)


class CollectiveRow(msgspec.Struct, frozen=True):
    """All runs of one collective of one size over one group; times are sums over ranks and runs."""

    kind: str
    group: str
    ranks: int
    size_bytes: int | None
    count: int
    total_s: float
    matched: int  # runs of which every member is in the trace
    transfer_s: float | None  # median of the matched runs
    wait_s: float  # in matched runs
    busbw_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class MatchedCollectives:
    rows: list[CollectiveRow]
    wait_s: dict[int, float]  # by rank, in matched collectives
    transfer_s: dict[int, float]
    last: dict[int, int]  # how often a rank arrived last
    matched: int
    unmatched: int


@dataclass(frozen=True, slots=True)
class _CollectiveKind:
    """A kind of communication as the details of the timeline describe it."""

    key: tuple[str, str, str]  # collective, group, members
    members: int


def match_collectives(timeline: Timeline) -> MatchedCollectives:
    """Match the collectives of several ranks with each other."""
    rows = np.flatnonzero(timeline.kind_of == SpanKind.COMMUNICATION).astype(np.int64)
    rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
    kinds, key_of, sequence_of = _find_kinds(timeline)
    if not len(rows):
        return MatchedCollectives([], {}, {}, {}, 0, 0)
    detail = timeline.detail_of[rows]
    key = np.where(detail == NONE, len(kinds), key_of[detail])
    rank, duration_s = timeline.rank_of[rows], timeline.duration_s[rows]
    # Buffers of another size are another collective: streams may run two at once, in either order.
    sized = (key * (len(timeline.works) + 1) + timeline.work_of[rows] + 1).astype(np.int64)
    ordinal = _ordinals(rank, sized, sequence_of[detail])
    instance = np.unique(np.stack([sized, ordinal]), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    count = np.bincount(instance)
    shortest = np.full(len(count), np.inf)
    np.minimum.at(shortest, instance, duration_s)
    # Gloo names no group: then it is assumed to be all ranks, if all are in the trace.
    everyone = 0 if timeline.facts.get("missing_ranks") else len(timeline.ranks)
    members = np.array([*(kind.members for kind in kinds), 0], dtype=np.int64)[key]
    unnamed = np.array([*(not any(kind.key[1:]) for kind in kinds), True])[key]
    members = np.where((members == 0) & unnamed, everyone, members)
    message = np.array([isinstance(work, Transfer) for work in timeline.works] + [False])[timeline.work_of[rows]]
    complete = (members > 1) & (count[instance] == members) & ~message
    wait_s = np.where(complete, duration_s - shortest[instance], 0.0)
    first_of = np.zeros(len(count), dtype=np.int64)
    first_of[instance[::-1]] = np.arange(len(rows))[::-1]
    last, times = np.unique(rank[complete & (duration_s == shortest[instance])], return_counts=True)
    return MatchedCollectives(
        rows=_collective_rows(timeline, rows, kinds, key, members, complete, instance, shortest, wait_s),
        wait_s=_sum_by_rank(rank[complete], wait_s[complete]),
        transfer_s=_sum_by_rank(rank[complete], shortest[instance][complete]),
        last=dict(zip(last.tolist(), times.tolist(), strict=True)),
        matched=int(complete[first_of].sum()),
        unmatched=int((~complete)[first_of].sum()),
    )


def _find_kinds(timeline: Timeline) -> tuple[list[_CollectiveKind], IntArray, IntArray]:
    """Return the distinct kinds of communication; for each detail its kind and sequence number (-1: none)."""
    numbers: dict[tuple[str, str, str], int] = {}
    kinds: list[_CollectiveKind] = []
    key_of, sequence_of = [], []
    for detail in timeline.details:
        ranks, name = detail.get("ranks", ""), detail.get("group", "")
        # Long lists of ranks are truncated in the trace; then the group's name identifies it.
        key = detail.get("collective", ""), detail.get("description") or name, ranks or name
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            size = detail.get("group_size", "")
            members = int(size) if size.isdecimal() and len(size) < 9 else len(ranks.split(",")) if ranks else 0
            kinds.append(_CollectiveKind(key, members))
        key_of.append(number)
        sequence = detail.get("sequence", "")
        sequence_of.append(int(sequence) if sequence.isdecimal() and len(sequence) < 18 else -1)
    # One more, for rows without details: index -1.
    return kinds, np.array([*key_of, len(kinds)], np.int64), np.array([*sequence_of, -1], np.int64)


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


def _collective_rows(
    timeline: Timeline,
    rows: IntArray,
    kinds: list[_CollectiveKind],
    key: IntArray,
    members_of: IntArray,
    complete: BoolArray,
    instance: IntArray,
    shortest: FloatArray,
    wait_s: FloatArray,
) -> list[CollectiveRow]:
    groups, inverse = np.unique(np.stack([key, timeline.work_of[rows]]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    table = []
    for number, (kind, work_index) in enumerate(groups.T.tolist()):
        mine = inverse == number
        known = kinds[kind] if kind < len(kinds) else None
        work = timeline.works[work_index] if work_index != NONE else None
        matched = np.unique(instance[mine & complete])
        transfer_s = float(np.median(shortest[matched])) if len(matched) else None
        members, seconds = int(members_of[mine][0]), timeline.duration_s[rows[mine]]
        table.append(
            CollectiveRow(
                kind=str(work.kind) if isinstance(work, Collective) else known.key[0] if known else "unknown",
                group=known.key[1] if known else "",
                ranks=members,
                size_bytes=work.size_bytes if isinstance(work, Collective | Transfer) else None,
                count=int(mine.sum()),
                total_s=float(seconds.sum()),
                matched=len(matched),
                transfer_s=transfer_s,
                wait_s=float(wait_s[mine].sum()),
                # On one rank alone, the shortest run waited least.
                busbw_bytes_per_s=_busbw(work, members, transfer_s or float(seconds.min())),
            )
        )
    return sorted(table, key=lambda row: -row.total_s)


def _busbw(work: object, ranks: int, seconds: float) -> float | None:
    if seconds <= 0 or not isinstance(work, Collective | Transfer) or not work.size_bytes:
        return None
    if isinstance(work, Transfer):
        return work.size_bytes / seconds
    return None if ranks < 2 else bus_factor(str(work.kind), ranks) * work.size_bytes / seconds


class KernelRow(msgspec.Struct, frozen=True):
    """All runs of one kernel, over all ranks."""

    name: str
    label: str = msgspec.field(name="class")
    count: int
    total_s: float
    share: float  # of all kernels' time


class TraceStraggler(msgspec.Struct, frozen=True):
    """A rank that computes longer than the others."""

    rank: int
    factor: float
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
    collectives: list[CollectiveRow]
    matched_collectives: int
    unmatched_collectives: int
    stragglers: list[TraceStraggler]
    critical_path: list[PathPart]
    warnings: list[str]
    recorded: RecordedResult | msgspec.UnsetType = msgspec.UNSET  # what ``stepcast record`` wrote next to the traces

    def __repr__(self) -> str:
        return f"KinetoAnalysis({len(self.ranks)} ranks, {format_seconds(self.step_s)} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.traces import kineto_view

        return render_notebook(kineto_view(self.facts()), "analysis")


def analyze_kineto(timeline: Timeline) -> KinetoAnalysis:
    """Return where the time of the traced ranks went."""
    timeline, steps = marked_steps(timeline)
    lanes, matching = RankLanes(timeline), match_collectives(timeline)
    times = [
        time
        for rank in timeline.ranks
        if (time := rank_time(lanes, rank, steps.get(rank), matching.wait_s.get(rank), matching.transfer_s.get(rank)))
    ]
    if not times:
        raise ValueError(f"{timeline.source}: holds no work of a GPU or a CPU thread to analyse")
    ranks = [rank for rank, _ in times]

    def mean(name: str) -> float:
        return sum(rank.per_step(getattr(rank, name)) for rank in ranks) / len(ranks)

    # The rank that waits least for others sets the pace of the step.
    slowest = max(ranks, key=lambda rank: rank.compute_s + rank.host_idle_s)
    path = [(part, slowest.per_step(seconds)) for part, seconds in slowest.breakdown_s.items() if seconds > 0]
    path.sort(key=lambda part: -part[1])
    return KinetoAnalysis(
        kind="kineto run",
        source=timeline.source,
        gpus=timeline.facts.get("world_size"),
        step_s=max(rank.step_s for rank in ranks),
        operations_s=_class_seconds(timeline, lanes, ranks, matching),
        bubble_s=mean("idle_s"),
        compute_s=mean("compute_s"),
        communication_s=mean("communication_s"),
        exposed_comm_s=mean("exposed_communication_s"),
        overlapped_comm_s=mean("overlapped_communication_s"),
        copy_s=mean("copy_s"),
        communication_by_group_s=_mean_groups(times),
        ranks=ranks,
        kernels=_top_kernels(timeline),
        collectives=matching.rows,
        matched_collectives=matching.matched,
        unmatched_collectives=matching.unmatched,
        stragglers=_find_stragglers(ranks, matching),
        critical_path=[
            PathPart(slowest.rank, name, slowest.per_step(seconds)) for name, seconds in path if seconds > 0
        ],
        warnings=[*timeline.warnings, *_doubts(timeline, lanes, ranks, matching)],
    )


def _mean_groups(times: list[tuple[RankTime, dict[str, GroupTime]]]) -> dict[str, dict[str, float]]:
    """Return total and exposed communication by group, per step, mean over the ranks that take part."""
    means = {}
    for name in sorted({name for _, groups in times for name in groups}):
        parts = [(rank, groups[name]) for rank, groups in times if name in groups]
        means[name] = {
            "total": sum(rank.per_step(part.total_s) for rank, part in parts) / len(parts),
            "exposed": sum(rank.per_step(part.exposed_s) for rank, part in parts) / len(parts),
        }
    return means


def _class_seconds(
    timeline: Timeline, lanes: RankLanes, ranks: list[RankTime], matching: MatchedCollectives
) -> dict[str, float]:
    """Return the time by class of kernel, per rank and step."""
    by_name = tuple(map(kernel_class, timeline.names))
    labels = tuple(dict.fromkeys(by_name))
    numbers = {name: index for index, name in enumerate(labels)}
    class_of = [numbers[name] for name in by_name]
    per_step = np.zeros(len(labels))
    for rank in ranks:
        per_step += class_times(lanes, rank.rank, class_of, len(labels)) / max(rank.steps, 1) / len(ranks)
    classes_s = {name: float(seconds) for name, seconds in zip(labels, per_step, strict=True) if seconds > 0}
    count = sum(max(rank.steps, 1) for rank in ranks)
    for row in matching.rows:
        name = f"{COMMUNICATION}: {row.kind}"
        classes_s[name] = classes_s.get(name, 0.0) + row.total_s / count
    copies_s = float(timeline.duration_s[timeline.kind_of == SpanKind.COPY].sum())
    if copies_s:
        classes_s[COPY] = copies_s / count
    ordered = dict(sorted(classes_s.items(), key=lambda item: -item[1]))
    if OTHER in ordered:
        ordered[OTHER] = ordered.pop(OTHER)
    return ordered


def _top_kernels(timeline: Timeline) -> list[KernelRow]:
    device, count = timeline.kind_of <= SpanKind.COPY, len(timeline.names)
    names = timeline.name_of[device]
    seconds = np.bincount(names, weights=timeline.duration_s[device], minlength=count)
    counts = np.bincount(names, minlength=count)
    kind_of = np.zeros(count, dtype=np.int32)
    kind_of[names] = timeline.kind_of[device]
    total_s = float(seconds.sum()) or 1.0
    # Communication and copies are recognised by their kind, not by their name.
    labels = {int(SpanKind.COMMUNICATION): COMMUNICATION, int(SpanKind.COPY): COPY}
    return [
        KernelRow(
            timeline.names[name],
            labels.get(int(kind_of[name])) or kernel_class(timeline.names[name]),
            int(counts[name]),
            float(seconds[name]),
            float(seconds[name]) / total_s,
        )
        for name in np.argsort(-seconds, kind="stable")[:TOP_KERNELS].tolist()
        if counts[name]
    ]


def _find_stragglers(ranks: list[RankTime], matching: MatchedCollectives) -> list[TraceStraggler]:
    compute_s = {rank.rank: rank.per_step(rank.compute_s) for rank in ranks}
    meetings = sum(matching.last.values())
    stragglers = []
    for rank, factor, _ in find_slow(compute_s):
        waits = [wait for other, wait in matching.wait_s.items() if other != rank]
        mean_wait_s = sum(waits) / len(waits) if waits else 0.0
        stragglers.append(
            TraceStraggler(rank, factor, compute_s[rank], matching.last.get(rank, 0), meetings, mean_wait_s)
        )
    return stragglers


def _doubts(timeline: Timeline, lanes: RankLanes, ranks: list[RankTime], matching: MatchedCollectives) -> list[str]:
    doubts = []
    if not any(rank.steps for rank in ranks):
        doubts.append("no ProfilerStep is marked: the whole trace counts as one step")
    if len(ranks) == 1:
        doubts.append(
            "one rank cannot tell waiting for other ranks from transfer, nor a slow GPU from slow work; "
            "give the traces of all ranks"
        )
    elif timeline.facts.get("missing_ranks"):
        doubts.append(f"{timeline.facts['missing_ranks']} ranks are missing: their collectives are not matched")
    if matching.unmatched and len(ranks) > 1:
        doubts.append(f"{matching.unmatched} collectives lack a member, a group or a partner: waits not split")
    if on_host := [rank.rank for rank in ranks if not lanes.streams(rank.rank)]:
        doubts.append(f"no GPU work on {_named_ranks(on_host)}: operators of CPU threads count as computation")
    bound = [rank for rank in ranks if rank.rank not in on_host and rank.launch_bound_share > LAUNCH_BOUND]
    if bound:
        most = max(rank.launch_bound_share for rank in bound)
        doubts.append(
            f"launch-bound: the GPU had nothing queued for up to {most:.0%} of the time on "
            f"{_named_ranks([rank.rank for rank in bound])}"
        )
    return doubts


def _named_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"
