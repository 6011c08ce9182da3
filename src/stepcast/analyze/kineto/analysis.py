"""A PyTorch profiler trace, of one rank or many, taken apart."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.analyze.kineto.rank import RankLanes, RankTime, class_times, marked_steps, rank_time
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, CollectiveKind, Transfer
from stepcast.units import format_seconds

MATMUL, ATTENTION, NORM, LOSS = "matmul", "attention", "norm", "softmax and loss"
OPTIMIZER, EMBEDDING, ELEMENTWISE, OTHER = "optimizer", "embedding and sort", "element-wise", "other"

# Which class of work a GPU kernel is, by its name.

SCAN = "state-space scan"
COPY, COMMUNICATION = "copy", "communication"

# Libraries whose own names hold the word of a class: FBGEMM's tables and quantisation are no products (its
# products say gemm once more), nor are FlashInfer's norms attention.
LIBRARIES = re.compile(r"fbgemm(?:_gpu)?|flashinfer", re.IGNORECASE)
# Inductor names a kernel after the operators it came from, products too, but says first what it is: only a
# template ("tem") multiplies; pointwise ("poi"), for each tensor ("for"), reductions ("red", "per").
INDUCTOR = re.compile(r"triton_(poi|for|red|per|split_scan)_")
POINTWISE = ("poi", "for")
PRODUCTS = (MATMUL, ATTENTION)

# The first that fits: attention kernels are matmuls too, optimizers element-wise. Names of cuBLAS (nvjet,
# gemm, xmma), CUTLASS, cuDNN, FlashAttention, FlashInfer, PyTorch's own, FBGEMM, Apex, Transformer Engine,
# Mamba, Triton and AMD's Tensile (Cijk) and CK.
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
    inductor = INDUCTOR.match(name)
    if inductor is not None and inductor[1] in POINTWISE:
        return ELEMENTWISE
    words = LIBRARIES.sub("", name)
    classes = (label for label, pattern in CLASSES if pattern.search(words))
    return next((label for label in classes if inductor is None or label not in PRODUCTS), OTHER)


def class_of_names(timeline: Timeline) -> tuple[str, ...]:
    """The class of every name of *timeline*, as far as it names computation."""
    return tuple(map(kernel_class, timeline.names))


def label(name_class: str, kind: int) -> str:
    """The class of a row: communication and copies are told by their kind, not by their name."""
    if kind == SpanKind.COMMUNICATION:
        return COMMUNICATION
    return COPY if kind == SpanKind.COPY else name_class


# Collectives of several ranks matched with each other: who came last, and what the others waited.
#
# A collective moves data only once its last member has come. The member that came last waits for nobody,
# so the shortest of the members' times is the transfer, and what a member took longer is its wait. That
# compares durations, not starts: it holds whatever the clocks of the hosts say.

# Bus bytes over buffer bytes, as nccl-tests defines bus bandwidth (doc/PERFORMANCE.md).
RING = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class CollectiveRow:
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

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Matching:
    rows: tuple[CollectiveRow, ...]
    wait_s: dict[int, float]  # by rank, in matched collectives
    transfer_s: dict[int, float]
    last: dict[int, int]  # how often a rank came last
    matched: int
    unmatched: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a detail of the timeline says of its rows."""

    key: tuple[str, str, str]  # collective, group, members
    members: int


def match_collectives(timeline: Timeline) -> Matching:
    rows = np.flatnonzero(timeline.kind_of == SpanKind.COMMUNICATION).astype(np.int64)
    rows = rows[np.argsort(timeline.start_s[rows], kind="stable")]
    kinds, key_of, sequence_of = _keys(timeline)
    if not len(rows):
        return Matching((), {}, {}, {}, 0, 0)
    detail = timeline.detail_of[rows]
    key = np.where(detail == NONE, len(kinds), key_of[detail])
    rank = timeline.rank_of[rows]
    # Buffers of another size are another collective: streams may run two at once, in either order.
    sized = (key * (len(timeline.works) + 1) + timeline.work_of[rows] + 1).astype(np.int64)
    instance, duration_s = (_instances(sized, _ordinals(rank, sized, sequence_of[detail])), timeline.duration_s[rows])
    count = np.bincount(instance)
    shortest = np.full(len(count), np.inf)
    np.minimum.at(shortest, instance, duration_s)
    # Gloo names no group: then it is taken to be all ranks, where all are in the trace.
    everyone = 0 if timeline.facts.get("missing_ranks") else len(timeline.ranks)
    members = np.array([*(kind.members for kind in kinds), 0], dtype=np.int64)[key]
    unnamed = np.array([*(not any(kind.key[1:]) for kind in kinds), True])[key]
    members = np.where((members == 0) & unnamed, everyone, members)
    message = np.array([isinstance(work, Transfer) for work in timeline.works] + [False])[timeline.work_of[rows]]
    whole = (members > 1) & (count[instance] == members) & ~message
    wait_s = np.where(whole, duration_s - shortest[instance], 0.0)
    first_of = np.zeros(len(count), dtype=np.int64)
    first_of[instance[::-1]] = np.arange(len(rows))[::-1]
    last = whole & (duration_s == shortest[instance])
    return Matching(
        rows=_table(timeline, rows, kinds, key, members, whole, instance, shortest, wait_s),
        wait_s=_by_rank(rank[whole], wait_s[whole]),
        transfer_s=_by_rank(rank[whole], shortest[instance][whole]),
        last={int(one): int(times) for one, times in zip(*np.unique(rank[last], return_counts=True), strict=True)},
        matched=int(whole[first_of].sum()),
        unmatched=int((~whole)[first_of].sum()),
    )


def _keys(timeline: Timeline) -> tuple[list[_Kind], IntArray, IntArray]:
    """Distinct kinds of communication; for each detail its kind and its sequence number (-1: none)."""
    numbers: dict[tuple[str, str, str], int] = {}
    kinds: list[_Kind] = []
    key_of, sequence_of = [], []
    for detail in timeline.details:
        ranks, name = detail.get("ranks", ""), detail.get("group", "")
        # Long lists of ranks are cut short in the trace; the group's own name tells it apart then.
        key = detail.get("collective", ""), detail.get("description") or name, ranks or name
        number = numbers.setdefault(key, len(kinds))
        if number == len(kinds):
            size = detail.get("group_size", "")
            members = int(size) if size.isdecimal() and len(size) < 9 else len(ranks.split(",")) if ranks else 0
            kinds.append(_Kind(key, members))
        key_of.append(number)
        sequence = detail.get("sequence", "")
        sequence_of.append(int(sequence) if sequence.isdecimal() and len(sequence) < 18 else -1)
    # One more, for rows without details: index -1.
    return kinds, np.array([*key_of, len(kinds)], np.int64), np.array([*sequence_of, -1], np.int64)


def _ordinals(rank: npt.NDArray[np.int32], key: IntArray, sequence: IntArray) -> IntArray:
    """The sequence number, or where there is none, which of its kind a row is on its rank."""
    order = np.lexsort((np.arange(len(key)), key, rank))
    fresh = np.ones(len(key), dtype=bool)
    fresh[1:] = (rank[order][1:] != rank[order][:-1]) | (key[order][1:] != key[order][:-1])
    place = np.arange(len(key)) - np.maximum.accumulate(np.where(fresh, np.arange(len(key)), 0))
    ordinal = np.empty(len(key), np.int64)
    ordinal[order] = place
    # Apart from real sequence numbers, which are never negative.
    return np.where(sequence >= 0, sequence, -1 - ordinal)


def _instances(key: IntArray, order: IntArray) -> IntArray:
    _, instance = np.unique(np.stack([key, order]), axis=1, return_inverse=True)
    return instance.reshape(-1).astype(np.int64)


def _by_rank(rank: npt.NDArray[np.int32], seconds: FloatArray) -> dict[int, float]:
    ranks, inverse = np.unique(rank, return_inverse=True)
    sums = np.bincount(inverse, weights=seconds, minlength=len(ranks))
    return {int(one): float(total) for one, total in zip(ranks, sums, strict=True)}


def _table(
    timeline: Timeline,
    rows: IntArray,
    kinds: Sequence[_Kind],
    key: IntArray,
    members_of: IntArray,
    whole: npt.NDArray[np.bool_],
    instance: IntArray,
    shortest: FloatArray,
    wait_s: FloatArray,
) -> tuple[CollectiveRow, ...]:
    work = timeline.work_of[rows]
    groups, inverse = np.unique(np.stack([key, work]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    table = []
    for number, (kind, work_index) in enumerate(groups.T.tolist()):
        mine = inverse == number
        known = kinds[kind] if kind < len(kinds) else None
        done = timeline.works[work_index] if work_index != NONE else None
        matched = np.unique(instance[mine & whole])
        transfer_s = float(np.median(shortest[matched])) if len(matched) else None
        members = int(members_of[mine][0])
        size = done.size_bytes if isinstance(done, Collective | Transfer) else None
        table.append(
            CollectiveRow(
                kind=str(done.kind) if isinstance(done, Collective) else known.key[0] if known else "unknown",
                group=known.key[1] if known else "",
                ranks=members,
                size_bytes=size,
                count=int(mine.sum()),
                total_s=float(timeline.duration_s[rows[mine]].sum()),
                matched=len(matched),
                transfer_s=transfer_s,
                wait_s=float(wait_s[mine].sum()),
                busbw_bytes_per_s=_busbw(done, members, transfer_s or _fastest(timeline, rows[mine])),
            )
        )
    return tuple(sorted(table, key=lambda row: -row.total_s))


def _fastest(timeline: Timeline, rows: IntArray) -> float:
    """Of one rank alone the shortest run is the one that waited least."""
    return float(timeline.duration_s[rows].min())


def _busbw(work: object, ranks: int, seconds: float) -> float | None:
    if seconds <= 0 or not isinstance(work, Collective | Transfer) or not work.size_bytes:
        return None
    factor = 1.0
    if isinstance(work, Collective):
        if ranks < 2:
            return None
        if work.kind is CollectiveKind.ALL_REDUCE:
            factor = 2 * (ranks - 1) / ranks
        elif work.kind in RING:
            factor = (ranks - 1) / ranks
    return factor * work.size_bytes / seconds


# A rank whose computation takes this much longer than the usual rank's holds the others up.
SLOW_RANK = 1.1
# Share of the window above which launching is named as what limits the run.
LAUNCH_BOUND = 0.1
TOP_KERNELS = 15


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel, over all ranks."""

    name: str
    label: str
    count: int
    total_s: float
    share: float  # of all kernels' time

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": self.label,
            "count": self.count,
            "total_s": self.total_s,
            "share": self.share,
        }


@dataclass(frozen=True, slots=True)
class TraceStraggler:
    """*last* is how often it was the last to come to a collective, of *meetings*; *waits_s* what each other
    rank waited on average in those it took part in."""

    rank: int
    factor: float
    compute_s: float
    last: int
    meetings: int
    waits_s: float

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class KinetoAnalysis:
    source: str
    ranks: tuple[RankTime, ...]
    classes_s: dict[str, float]  # per rank and step
    kernels: tuple[Kernel, ...]
    collectives: Matching
    stragglers: tuple[TraceStraggler, ...]
    gpus: int | None  # of the whole job, where its traces say
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        step = format_seconds(max(rank.step_s for rank in self.ranks))
        return f"KinetoAnalysis({len(self.ranks)} ranks, {step} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.notebook import measured_html

        return measured_html(self.facts())

    @property
    def slowest(self) -> RankTime:
        """The rank that waits least for others: the one that the step waits for."""
        return max(self.ranks, key=lambda rank: rank.compute_s + rank.idle.host_s)

    def _mean(self, name: str) -> float:
        """Per step, mean over ranks."""
        per_step = [float(getattr(rank, name)) / max(rank.steps, 1) for rank in self.ranks]
        return sum(per_step) / len(per_step)

    def facts(self) -> dict[str, Any]:
        idle_s = sum(rank.idle.total_s / max(rank.steps, 1) for rank in self.ranks) / len(self.ranks)
        return {
            "kind": "kineto run",
            "source": self.source,
            "gpus": self.gpus,
            "step_s": max(rank.step_s for rank in self.ranks),
            "operations_s": self.classes_s,
            "bubble_s": idle_s,
            "compute_s": self._mean("compute_s"),
            "communication_s": self._mean("communication_s"),
            "exposed_comm_s": self._mean("exposed_communication_s"),
            "overlapped_comm_s": self._mean("overlapped_communication_s"),
            "copy_s": self._mean("copy_s"),
            "communication_by_group_s": self._groups(),
            "ranks": [_rank_facts(rank, self.collectives) for rank in self.ranks],
            "kernels": [kernel.facts() for kernel in self.kernels],
            "collectives": [row.facts() for row in self.collectives.rows],
            "matched_collectives": self.collectives.matched,
            "unmatched_collectives": self.collectives.unmatched,
            "stragglers": [one.facts() for one in self.stragglers],
            "critical_path": self._critical_path(),
            "warnings": list(self.warnings),
        }

    def _groups(self) -> dict[str, dict[str, float]]:
        """Per step, mean over the ranks that take part."""
        names = sorted({name for rank in self.ranks for name in rank.groups})
        found = {}
        for name in names:
            parts = [(rank.groups[name], max(rank.steps, 1)) for rank in self.ranks if name in rank.groups]
            found[name] = {
                "total": sum(part.total_s / steps for part, steps in parts) / len(parts),
                "exposed": sum(part.exposed_s / steps for part, steps in parts) / len(parts),
            }
        return found

    def _critical_path(self) -> list[dict[str, Any]]:
        slowest = self.slowest
        count = max(slowest.steps, 1)
        parts = [(part, seconds / count) for part, seconds in breakdown(slowest).items() if seconds > 0]
        ordered = sorted(parts, key=lambda item: -item[1])
        return [{"rank": slowest.rank, "part": part, "seconds": seconds} for part, seconds in ordered]


def breakdown(rank: RankTime) -> dict[str, float]:
    """Seconds of the window by part; they sum to it."""
    return {
        "compute": rank.compute_s,
        "exposed communication": rank.exposed_communication_s,
        "exposed copies": rank.exposed_copy_s,
        "idle: host": rank.idle.host_s,
        "idle: between kernels": rank.idle.queue_s,
        "idle: dependency": rank.idle.dependency_s,
    }


def analyze_kineto(timeline: Timeline) -> KinetoAnalysis:
    """Where the time of the traced ranks went."""
    timeline, steps = marked_steps(timeline)
    lanes = RankLanes(timeline)
    times = [time for rank in timeline.ranks if (time := rank_time(lanes, rank, steps.get(rank))) is not None]
    if not times:
        raise ValueError(f"{timeline.source}: holds no work of a GPU or a CPU thread to analyse")
    matching = match_collectives(timeline)
    classes_s, kernels = _kernels(timeline, lanes, times, matching)
    stragglers = _stragglers(times, matching)
    return KinetoAnalysis(
        source=timeline.source,
        ranks=tuple(times),
        classes_s=classes_s,
        kernels=kernels,
        collectives=matching,
        stragglers=stragglers,
        gpus=timeline.facts.get("world_size"),
        warnings=(*timeline.warnings, *_doubts(timeline, times, matching)),
    )


def _rank_facts(rank: RankTime, matching: Matching) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "step_s": rank.step_s,
        "steps": rank.steps,
        "window_s": rank.window_s,
        "busy_s": rank.busy_s,
        "idle_s": rank.idle.total_s,
        "breakdown_s": breakdown(rank),
        "communication_s": rank.communication_s,
        "overlapped_communication_s": rank.overlapped_communication_s,
        "copy_s": rank.copy_s,
        "wait_s": matching.wait_s.get(rank.rank),
        "transfer_s": matching.transfer_s.get(rank.rank),
        "launches_per_step": rank.launches,
        "launch_lag_s": rank.launch_lag_s,
        "launch_bound_share": rank.launch_bound_share,
        "streams": [{name: getattr(stream, name) for name in stream.__slots__} for stream in rank.streams],
    }


def _kernels(
    timeline: Timeline, lanes: RankLanes, times: list[RankTime], matching: Matching
) -> tuple[dict[str, float], tuple[Kernel, ...]]:
    """Time by class, per rank and step, and the kernels that take most."""
    by_name = class_of_names(timeline)
    labels = tuple(dict.fromkeys(by_name))
    numbers = {name: index for index, name in enumerate(labels)}
    class_of = [numbers[name] for name in by_name]
    per_step = np.zeros(len(labels))
    for time in times:
        per_step += class_times(lanes, time.rank, class_of, len(labels)) / max(time.steps, 1) / len(times)
    classes_s = {name: float(seconds) for name, seconds in zip(labels, per_step, strict=True) if seconds > 0}
    count = sum(max(time.steps, 1) for time in times)
    for row in matching.rows:
        name = f"{COMMUNICATION}: {row.kind}"
        classes_s[name] = classes_s.get(name, 0.0) + row.total_s / count
    copies_s = float(timeline.duration_s[timeline.kind_of == SpanKind.COPY].sum())
    if copies_s:
        classes_s[COPY] = copies_s / count
    ordered = dict(sorted(classes_s.items(), key=lambda item: -item[1]))
    if OTHER in ordered:
        ordered[OTHER] = ordered.pop(OTHER)
    return ordered, _top(timeline, by_name)


def _top(timeline: Timeline, by_name: tuple[str, ...]) -> tuple[Kernel, ...]:
    device = timeline.kind_of <= SpanKind.COPY
    names, kinds = timeline.name_of[device], timeline.kind_of[device]
    seconds = np.bincount(names, weights=timeline.duration_s[device], minlength=len(by_name))
    counts = np.bincount(names, minlength=len(by_name))
    kind_of = np.zeros(len(by_name), dtype=np.int32)
    kind_of[names] = kinds
    order = np.argsort(-seconds, kind="stable")[:TOP_KERNELS]
    whole = float(seconds.sum()) or 1.0
    return tuple(
        Kernel(
            name=timeline.names[at],
            label=label(by_name[at], int(kind_of[at])),
            count=int(counts[at]),
            total_s=float(seconds[at]),
            share=float(seconds[at]) / whole,
        )
        for at in order.tolist()
        if counts[at]
    )


def _stragglers(times: list[RankTime], matching: Matching) -> tuple[TraceStraggler, ...]:
    """Ranks that compute longer than the usual one, and that the others are seen to wait for."""
    if len(times) < 2:
        return ()
    per_step = {time.rank: time.compute_s / max(time.steps, 1) for time in times}
    meetings = sum(matching.last.values())
    found = []
    for rank, seconds in per_step.items():
        usual = median(other_s for other, other_s in per_step.items() if other != rank)
        if not usual or seconds < SLOW_RANK * usual:
            continue
        others = [wait for other, wait in matching.wait_s.items() if other != rank]
        found.append(
            TraceStraggler(
                rank=rank,
                factor=seconds / usual,
                compute_s=seconds,
                last=matching.last.get(rank, 0),
                meetings=meetings,
                waits_s=sum(others) / len(others) if others else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.factor))


def _doubts(timeline: Timeline, times: list[RankTime], matching: Matching) -> list[str]:
    doubts = []
    if not any(time.steps for time in times):
        doubts.append("no ProfilerStep is marked: the whole trace counts as one step")
    if len(times) == 1:
        doubts.append(
            "one rank cannot tell waiting for other ranks from transfer, nor a slow GPU from slow work; "
            "give the traces of all ranks"
        )
    elif timeline.facts.get("missing_ranks"):
        doubts.append(f"{timeline.facts['missing_ranks']} ranks are missing: their collectives are not matched")
    if matching.unmatched and len(times) > 1:
        doubts.append(f"{matching.unmatched} collectives lack a member, a group or a partner: waits not split")
    if on_host := [time.rank for time in times if time.on_host]:
        doubts.append(f"no GPU work on {_ranks(on_host)}: operators of CPU threads count as computation")
    bound = [time for time in times if not time.on_host and time.launch_bound_share > LAUNCH_BOUND]
    if bound:
        most = max(time.launch_bound_share for time in bound)
        doubts.append(
            f"launch-bound: the GPU had nothing queued for up to {most:.0%} of the time on "
            f"{_ranks([time.rank for time in bound])}"
        )
    return doubts


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
