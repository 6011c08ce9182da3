"""A profiler trace replayed under changed conditions: other kernels, faster links, CUDA graphs, compiled regions.

The host issues work in the order of the trace, with its own time between two calls; where it synchronises it waits for
the GPU. A kernel starts once it was issued, its stream is free, and the kernel of another stream has ended that it
waited for in the trace. Ranks wait for one another in collectives that are matched; others take as long as in the
trace, waits included.

docs/kineto-changes.md compares the predictions of steps with measured ones.
"""

import re
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from stepcast.analyze.kineto import kernels
from stepcast.analyze.kineto.analysis import LAUNCH_BOUND, MatchedCollectives
from stepcast.analyze.kineto.kernels import MEASURED
from stepcast.analyze.kineto.rank import QUEUE_GAP_S, RankLanes, marked_lanes, rank_time
from stepcast.analyze.replay import WhatIfError, parse_factor, split_change
from stepcast.analyze.result import AnalysisResult
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.types import dataclass, require
from stepcast.views.declared import phrase, phrases

RESOLUTION_S = 1e-9  # of the times of a trace
HOST, LOADING = "host", "data loading"  # keys next to the names of kernels
OPTIMIZER, GRADIENT = "Optimizer.", "torch::autograd::AccumulateGrad"  # PyTorch's marks; the optimizer stays eager
SYNCHRONISES = re.compile(r"(?:cuda|hip)(?:Device|Stream|Event)Synchronize|(?:cuda|hip)Memcpy$")
KNOWN = phrase("changes-of-traces", {})
ASSUMED = ("compile", "graphs", "collective", "rank")  # kinds of changes that assume something


class KinetoReplay(AnalysisResult, frozen=True, kw_only=True):
    """A trace as measured, replayed, and changed; seconds per step of the slowest rank."""

    view, title = "measured.kineto_replay_view", "replay"
    kind: str
    source: str
    changes: list[str]
    measured_step_s: float
    replayed_step_s: float
    unprofiled_step_s: float  # replayed without the time that the profiler added to the host
    error: float  # of the replay
    step_s: float
    low_s: float  # with compile: a lower bound of step_s
    speedup: float
    change_s: float
    ranks: list[dict[str, float]]
    assumptions: list[str]
    warnings: list[str]


@dataclass(frozen=True, eq=False)
class RankScript:
    """The device's rows of one rank in the order of their launches, and the calls of its host."""

    rank: int
    steps: int
    start_s: float  # of the window, on the clock of the first rank
    host_start_s: float  # before the window where the host runs ahead
    measured_s: float  # of the window
    duration_s: FloatArray
    stream: IntArray
    call: IntArray  # the call that launched each row
    waits_for: IntArray  # the row of another stream; NONE
    gap_s: FloatArray  # between what it waited for and its start
    meeting: IntArray  # the number of a collective that is matched with other ranks; NONE
    names: tuple[str, ...]  # of rows
    can_fuse: BoolArray
    groups: tuple[str, ...]  # of communication; empty for other rows
    work_s: FloatArray  # of the host before each call
    loading_s: FloatArray  # the part of work_s in which the host waited for the next batch
    call_s: FloatArray
    waits: BoolArray  # calls that wait for the device
    events: IntArray  # the number of events that the profiler recorded from the call before to this one
    stays_eager: BoolArray  # calls that torch.compile leaves as they are
    optimizer_s: FloatArray  # from the beginning of the optimizer to the call; 0 for calls of others
    usual_call_s: float
    gradients: int  # of parameters, in all steps
    mask: str  # the mask that compiled or captured attention has, a key of kernels.MASKED; empty for none
    lag_s: float  # from a call to the earliest start of its work
    has_launches: bool  # False if the trace does not tie kernels to the calls that launched them

    def without_profiler(self) -> "RankScript":
        """Return the script with the host as fast as it is without a profiler that records its events."""
        work_s = self.work_s - MEASURED["event_calls"] * self.usual_call_s * self.events
        return replace(self, work_s=np.maximum(work_s, 0.0))

    def without_launches(self) -> "RankScript":
        """Return the script with a host that takes time only to wait for batches and for the GPU."""
        return replace(self, work_s=self.loading_s, call_s=np.zeros_like(self.call_s), lag_s=0.0)

    def issued_at_once(self) -> "RankScript":
        """Return the script with a host that issues everything at once and waits only for batches."""
        return replace(self.without_launches(), waits=np.zeros_like(self.waits))

    def play(self) -> Generator[tuple[int, float], float, float]:
        """Return the end of the last row in seconds from the start of the window.

        Yield the meeting of each collective and when this rank arrives; the caller sends back when the last one does.
        """
        free_s = [0.0] * (int(self.stream.max(initial=0)) + 1)
        ends_s = [0.0] * len(self.duration_s)
        columns = (self.duration_s, self.stream, self.call, self.waits_for, self.gap_s, self.meeting)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        host_s, last_s = self.host_start_s, 0.0
        place = 0
        for number, (work_s, call_s, waits) in enumerate(
            zip(self.work_s.tolist(), self.call_s.tolist(), self.waits.tolist(), strict=True)
        ):
            host_s += work_s
            while place < len(rows) and rows[place][2] <= number:
                duration_s, stream, _, waits_for, gap_s, meeting = rows[place]
                begin_s = max(free_s[stream], host_s + self.lag_s)
                if waits_for != NONE:
                    begin_s = max(begin_s, ends_s[waits_for])
                begin_s += gap_s
                if meeting != NONE:
                    begin_s = (yield meeting, self.start_s + begin_s) - self.start_s
                ends_s[place] = free_s[stream] = begin_s + duration_s
                last_s = max(last_s, free_s[stream])
                place += 1
            host_s += call_s
            if waits:
                host_s = max(host_s, last_s)
        return last_s


def play_together(scripts: Sequence[RankScript]) -> list[float]:
    """Return the end of each rank in seconds; no rank starts a matched collective before all have arrived."""
    members = Counter(number for script in scripts for number in script.meeting.tolist())
    players = [script.play() for script in scripts]
    ends_s = [0.0] * len(scripts)
    arrived: dict[int, dict[int, float]] = {}  # by meeting and player
    turns: list[tuple[int, float | None]] = [(player, None) for player in range(len(players))]
    while turns or arrived:
        if turns:
            player, arrival_s = turns.pop()
            try:
                number, begin_s = players[player].send(arrival_s)  # type: ignore[arg-type]  # the first turn needs None
            except StopIteration as end:
                ends_s[player] = end.value
                continue
            arrived.setdefault(number, {})[player] = begin_s
        else:  # ranks launched two collectives in different orders: the earliest goes on without the others
            number = min(arrived, key=lambda number: max(arrived[number].values()))
            members[number] = 0
        if len(arrived[number]) >= members[number]:
            arrivals = arrived.pop(number)
            turns += [(player, max(arrivals.values())) for player in arrivals]
    return ends_s


def build_script(lanes: RankLanes, rank: int, matching: MatchedCollectives) -> RankScript | None:
    """Return the script of a rank; None without work of a GPU."""
    timeline, streams = lanes.timeline, lanes.streams(rank)
    time, steps = rank_time(lanes, rank), lanes.steps.get(rank)
    rows = lanes.rows_on(streams)
    if time is None or not len(rows):
        return None
    launched_by = lanes.calls[rows]
    has_launches = bool((launched_by != NONE).any())
    if has_launches:
        rows, launched_by = rows[launched_by != NONE], launched_by[launched_by != NONE]
    else:  # as if everything were launched when the first row starts
        launched_by = np.full(len(rows), rows[timeline.start_s[rows].argmin()])
    start_s = float(steps.start_s[0]) if steps else float(timeline.start_s[rows].min())
    starts_s, ends_s = timeline.start_s - start_s, timeline.end_s - start_s
    host = np.flatnonzero((timeline.rank_of == rank) & (timeline.kind_of == SpanKind.HOST))
    host = host[np.argsort(timeline.start_s[host], kind="stable")]
    names = np.array([bool(SYNCHRONISES.match(name)) for name in timeline.names])
    waiting = host[names[timeline.name_of[host]]]
    calls = np.unique(np.concatenate([launched_by, waiting]))
    calls = calls[np.argsort(timeline.start_s[calls], kind="stable")]
    order_of = np.full(len(timeline), NONE, np.int64)
    order_of[calls] = np.arange(len(calls))
    order = np.lexsort((timeline.start_s[rows], order_of[launched_by]))
    rows, call = rows[order], order_of[launched_by[order]]
    call_start_s, call_s = starts_s[calls], timeline.duration_s[calls]
    waits = names[timeline.name_of[calls]]
    usual_s = float(np.median(call_s[~waits])) if (~waits).any() else 0.0
    marks = host[np.array([name.startswith(OPTIMIZER) for name in timeline.names])[timeline.name_of[host]]]
    mark = np.searchsorted(starts_s[marks], call_start_s, side="right") - 1
    # The last entry is for calls before any mark.
    mark_start_s, mark_end_s = (np.append(times_s[marks], -np.inf) for times_s in (starts_s, ends_s))
    in_optimizer = call_start_s < mark_end_s[mark]
    before_s = np.concatenate([[min(0.0, float(call_start_s[0]))], (call_start_s + call_s)[:-1]])
    work_s = np.maximum(call_start_s - before_s, 0.0)
    begin_s, end_s = starts_s[rows], ends_s[rows]
    issued_s = call_start_s[call]
    lags_s = begin_s - issued_s
    lag_s = float(lags_s[lags_s >= 0].min()) if has_launches and (lags_s >= 0).any() else 0.0
    loading = lanes.loading(rank)
    loaded_s = np.append(0.0, np.cumsum(loading.durations_s)).repeat(2)[1:-1] if len(loading) else np.zeros(1)
    edges_s = np.stack([loading.start_s, loading.end_s], axis=1).reshape(-1) - start_s if len(loading) else np.zeros(1)
    loading_s = np.interp(call_start_s, edges_s, loaded_s) - np.interp(before_s, edges_s, loaded_s)
    stream = np.searchsorted(np.array(sorted(streams)), timeline.lane_of[rows])
    waits_for, gap_s = _find_dependencies(begin_s, end_s, stream, issued_s + lag_s)
    row_names = tuple(timeline.names[name] for name in timeline.name_of[rows].tolist())
    stays_eager = in_optimizer | kernels.rows_of_unfused(timeline, calls)
    groups = np.array([*lanes.groups, ""])[lanes.group_of_work[timeline.work_of[rows]]]
    is_unknown = (groups == "") & (timeline.kind_of[rows] == SpanKind.COMMUNICATION)
    return RankScript(
        rank=rank,
        steps=max(time[0].steps, 1),
        start_s=start_s - matching.clock_offset_s[rank] if rank in matching.clock_offset_s else 0.0,
        host_start_s=float(before_s[0]),
        measured_s=time[0].window_s,
        duration_s=matching.transfers_s[rows],
        meeting=matching.meeting_of[rows],
        stream=stream.astype(np.int64),
        call=call,
        waits_for=waits_for,
        gap_s=gap_s,
        names=row_names,
        can_fuse=np.array([kernels.is_fusible(name) for name in row_names], dtype=bool) & ~stays_eager[call],
        groups=tuple(np.where(is_unknown, "unknown", groups).tolist()),
        work_s=work_s,
        loading_s=np.minimum(loading_s, work_s),
        # A launch that is much longer than usual waited for room in the queue.
        call_s=np.where(waits, 0.0, np.minimum(call_s, 4 * usual_s)),
        waits=waits,
        events=np.diff(np.searchsorted(starts_s[host], call_start_s, side="right"), prepend=0),
        stays_eager=stays_eager,
        optimizer_s=np.where(in_optimizer, call_start_s - mark_start_s[mark], 0.0),
        usual_call_s=usual_s,
        mask=kernels.find_mask_check(timeline.names, timeline.name_of[host]),
        gradients=sum(timeline.names[name] == GRADIENT for name in timeline.name_of[host].tolist()),
        lag_s=lag_s,
        has_launches=has_launches,
    )


def _find_dependencies(
    begin_s: FloatArray, end_s: FloatArray, stream: IntArray, ready_s: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Return the row of another stream that each row waited for, and the seconds between its end and the start.

    A row that starts later than its launch and its stream allow waits for the last one that ended before it elsewhere.
    """
    count = len(begin_s)
    waits_for: IntArray = np.full(count, NONE, np.int64)
    free_s = np.zeros(count)
    for number in np.unique(stream).tolist():
        mine = np.flatnonzero(stream == number)
        free_s[mine[1:]] = np.maximum.accumulate(end_s[mine])[:-1]
    gap_s = np.maximum(begin_s - np.maximum(free_s, ready_s), 0.0)
    by_end = np.argsort(end_s, kind="stable")
    for row in np.flatnonzero(gap_s > QUEUE_GAP_S).tolist():
        place = int(np.searchsorted(end_s[by_end], begin_s[row] + RESOLUTION_S, side="right")) - 1
        for index in by_end[max(0, place - 7) : place + 1][::-1].tolist():
            if stream[index] != stream[row] and index < row and end_s[index] > max(free_s[row], ready_s[row]):
                waits_for[row] = index
                gap_s[row] = max(begin_s[row] - end_s[index], 0.0)
                break
    return waits_for, gap_s


def _compile(script: RankScript, share: float) -> RankScript:
    """Fuse kernels, which then take *share* of their predicted time and one launch.

    The host of a compiled step launches what is left from generated code; the optimizer stays as it is.
    """
    duration_s, gap_s = script.duration_s.copy(), script.gap_s.copy()
    counts = np.bincount(script.call, minlength=len(script.work_s))
    launches = (script.optimizer_s == 0) & ~script.waits
    generated = np.zeros(len(script.work_s), dtype=bool)
    table, name_of = np.unique(script.names, return_inverse=True)
    names: list[str] = table.tolist()
    is_set = np.char.startswith(table, "Memset")[name_of]
    is_product = np.array([kernels.kernel_class(name) in kernels.PRODUCTS for name in names])[name_of]
    matches = [kernels.PATTERNS["unaligned"].search(name) for name in names]
    padded_share = np.array([MEASURED["padded_share"] * int(match[1]) if match else 1.0 for match in matches])[name_of]
    for number in np.unique(script.stream).tolist():
        rows = np.flatnonzero((script.stream == number) & ~is_set)
        if not len(rows):
            continue
        starts, seconds = kernels.fuse(names, name_of[rows], script.duration_s[rows], script.can_fuse[rows])
        fused = script.can_fuse[rows[starts]]
        duration_s[rows[starts[fused]]] = share * seconds[fused]
        generated[script.call[rows[starts[fused]]]] = True
        rest = np.delete(rows, starts)
        duration_s[rest] = gap_s[rest] = 0.0
        launches[script.call[rest][counts[script.call[rest]] == 1]] = False
    duration_s *= np.where(script.duration_s > MEASURED["padded_from_s"], padded_share, 1.0)
    before, after = (
        float(seconds[is_product].sum() / max(seconds.sum(), 1e-12)) for seconds in (script.duration_s, duration_s)
    )
    duration_s[is_product] *= 1 + MEASURED["power_slope"] * max(0.0, after - max(before, MEASURED["power_free"]))
    script = script.without_profiler()
    usual_s = MEASURED["launch_calls"] * script.usual_call_s
    own_s = np.where(generated, usual_s, np.minimum(script.work_s + script.call_s, usual_s))
    # Kernels that generated code launches for sums, beyond those that they are fused into.
    split_sums = [sum(count for pattern, count in MEASURED["split_sums"] if re.search(pattern, name)) for name in names]
    splits = float((np.array(split_sums)[name_of] * script.can_fuse).sum())
    more_s = MEASURED["launch_calls"] * splits + MEASURED["parameter_calls"] * script.gradients
    more_s *= script.usual_call_s / max(int(launches.sum()), 1)
    eager, begins = script.stays_eager, script.optimizer_s > 0
    work_s = np.where(eager, script.work_s, own_s) + more_s
    work_s = np.where(begins, np.minimum(script.work_s, script.optimizer_s), np.where(launches, work_s, 0.0))
    work_s = np.maximum(work_s, script.loading_s)
    call_s = np.where(eager, script.call_s, 0.0)
    return replace(script, duration_s=duration_s, gap_s=gap_s, work_s=work_s, call_s=call_s)


def replay_kineto(timeline: Timeline, changes: Sequence[str]) -> KinetoReplay:
    """Return the traced ranks as replayed, and under *changes*."""
    lanes = marked_lanes(timeline)
    timeline, matching = lanes.timeline, MatchedCollectives(lanes.timeline)
    scripts = [script for rank in timeline.ranks if (script := build_script(lanes, rank, matching))]
    require(bool(scripts), f"{timeline.source}: holds no work of a GPU to replay")
    pairs = [split_change(text, KNOWN) for text in changes]
    assumptions = _list_assumptions(pairs, scripts)
    keys = {key for key, _ in pairs}
    if keys & {"compile", "host"} and not all(script.has_launches for script in scripts):
        raise WhatIfError(
            f"{timeline.source}: the trace does not tie kernels to the calls that launched them (correlation), so the "
            "time of the host is not known; replay takes kernel:NAME=, class.NAME= and collective= of such traces"
        )
    base = scripts
    for key, value in pairs:
        base = _change_rank(base, key, value) if key.startswith("rank.") else base
    pairs = [pair for pair in pairs if not pair[0].startswith("rank.")]
    changed = [_apply(script, pairs) for script in base]
    plays = {
        "replayed_s": play_together(scripts),
        "changed_s": play_together(changed),
        "unprofiled_s": play_together([script.without_profiler() for script in scripts]),
    }
    plays["low_s"] = plays["changed_s"]
    if "compile" in keys:
        plays["low_s"] = play_together([_apply(script, pairs, 0.5).issued_at_once() for script in base])
    ranks = [
        {"rank": script.rank, "measured_s": script.measured_s / script.steps}
        | {name: ends_s[index] / script.steps for name, ends_s in plays.items()}
        for index, script in enumerate(scripts)
    ]
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    measured_s, replayed_s, changed_s = (slowest[name] for name in ("measured_s", "replayed_s", "changed_s"))
    # A changed host runs without a profiler, so it is compared with the trace without one.
    before_s = slowest["unprofiled_s"] if {"compile", "host"} & keys else replayed_s
    free_s = play_together([script.without_launches() for script in scripts])
    bound_s = max((end_s - least_s) for end_s, least_s in zip(plays["replayed_s"], free_s, strict=True))
    is_bound = changes and bound_s > LAUNCH_BOUND * max(plays["replayed_s"])
    stays_bound = "compile" in keys and max(plays["changed_s"]) > 1.1 * max(
        play_together([script.issued_at_once() for script in changed])
    )
    warnings = phrases(
        "replay-is-off replay-launch-bound compiled-launch-bound",
        {"compiled": stays_bound},
        off_s=replayed_s if abs(replayed_s / measured_s - 1) > 0.05 else None,
        unprofiled_s=slowest["unprofiled_s"] if is_bound else None,
    )
    return KinetoReplay(
        kind="kineto replay",
        source=timeline.source,
        changes=list(changes),
        measured_step_s=measured_s,
        replayed_step_s=replayed_s,
        unprofiled_step_s=slowest["unprofiled_s"],
        error=replayed_s / measured_s - 1,
        step_s=changed_s,
        low_s=slowest["low_s"],
        speedup=before_s / changed_s if changed_s else 1.0,
        change_s=changed_s - before_s,
        ranks=ranks,
        assumptions=assumptions,
        warnings=[*timeline.warnings, *warnings],
    )


def _apply(script: RankScript, pairs: Sequence[tuple[str, str]], share: float = 1.0) -> RankScript:
    """Return *script* under changes; *share* scales the predicted time of fused kernels."""
    if _needs_mask(pairs):
        factors = {name: kernels.mask_factor(name, script.mask) for name in set(script.names)}
        script = replace(script, duration_s=script.duration_s * np.array([factors[name] for name in script.names]))
    for key, value in pairs:
        if key == "compile":
            script = _compile(script, share)
        elif key == "host" and value == "unprofiled":
            script = script.without_profiler()
        elif key == "host" and value != "graphs":
            factor = parse_factor(key, value)
            script = replace(script, work_s=script.work_s * factor, call_s=script.call_s * factor)
        elif key != "host":
            script = replace(script, duration_s=script.duration_s * _factors_of_rows(script, key, value))
    if ("host", "graphs") in pairs:
        script = replace(script.issued_at_once(), gap_s=np.minimum(script.gap_s, MEASURED["graph_gap_s"]))
    return script


def _change_rank(scripts: Sequence[RankScript], key: str, value: str) -> list[RankScript]:
    """Return *scripts* with all work of a rank longer by a factor, or as long as that of the others if it is healthy.

    Kernels are compared with those of the same name of ranks that run them equally often: they do the same work.
    """
    own = next((script for script in scripts if key == f"rank.{script.rank}"), None)
    others = [_sum_work(script) for script in scripts if script is not own]
    if own is None or (value == "healthy" and not others):
        ranks = ", ".join(str(script.rank) for script in scripts)
        raise WhatIfError(f"{key}={value} needs the traces of that rank and of others; given: rank {ranks}")
    work = _sum_work(own)
    factors = dict.fromkeys(work, 1.0 if value == "healthy" else parse_factor(key, value, ", or healthy"))
    for name, (runs, seconds) in work.items() if value == "healthy" else ():
        same_s = [other[name][1] for other in others if name in other and other[name][0] == runs]
        factors[name] = median(same_s) / seconds if same_s and seconds else 1.0
    alone = own.meeting == NONE
    loading_s = own.loading_s * factors[LOADING]
    changed = replace(
        own,
        duration_s=np.where(alone, own.duration_s * np.array([factors[name] for name in own.names]), own.duration_s),
        work_s=(own.work_s - own.loading_s) * factors[HOST] + loading_s,
        loading_s=loading_s,
        call_s=own.call_s * factors[HOST],
    )
    return [changed if script is own else script for script in scripts]


def _sum_work(script: RankScript) -> dict[str, tuple[int, float]]:
    """Return runs and seconds of each kernel but matched collectives, of the host and of its waits for batches."""
    table, name_of = np.unique(script.names, return_inverse=True)
    alone = script.meeting == NONE
    runs = np.bincount(name_of, weights=alone, minlength=len(table)).astype(int).tolist()
    seconds = np.bincount(name_of, weights=script.duration_s * alone, minlength=len(table)).tolist()
    work = dict(zip(table.tolist(), zip(runs, seconds, strict=True), strict=True))
    work[HOST] = script.steps, float((script.work_s - script.loading_s + script.call_s).sum())
    work[LOADING] = script.steps, float(script.loading_s.sum())
    return work


def _needs_mask(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return True if code is compiled or captured: it cannot read a mask to see whether attention may skip it."""
    return any(key == "compile" or value == "graphs" for key, value in pairs)


def _list_assumptions(pairs: Sequence[tuple[str, str]], scripts: Sequence[RankScript]) -> list[str]:
    """Return what the changes assume, without repetition; raise a WhatIfError for one that is not known."""
    texts = []
    for key, value in pairs:
        kind = re.match(r"(compile|host|collective)$|(collective|rank|class)\.|kernel:", key)
        if kind is None:
            raise WhatIfError(f"unknown change {key!r}; known: {KNOWN}")
        if key == "compile" and value != "elementwise":
            raise WhatIfError(f"compile must be elementwise, not {value!r}")
        name = "graphs" if value == "graphs" else kind[1] or kind[2]
        texts += phrases(f"assume-{name}" if name in ASSUMED else "", MEASURED)
    for script in scripts if _needs_mask(pairs) else ():
        if script.mask:
            forward, backward = kernels.MASKED[script.mask]
            texts.append(phrase("assume-masked", {"mask": script.mask, "forward": forward, "backward": backward}))
        elif any(kernels.kernel_class(name) == kernels.ATTENTION for name in set(script.names)):
            texts.append(phrase("assume-unmasked", {}))
    return list(dict.fromkeys(texts))


def _factors_of_rows(script: RankScript, key: str, value: str) -> FloatArray:
    """Return the factor on each row's duration."""
    factor = parse_factor(key, value)
    if key.startswith("kernel:"):
        word = key.removeprefix("kernel:")
        chosen = [word in name for name in script.names]
    elif key.startswith("class."):
        label = key.removeprefix("class.")
        pairs = zip(script.names, script.groups, strict=True)
        chosen = [not group and kernels.kernel_class(name).replace(" ", "-") == label for name, group in pairs]
    else:
        group = key.partition(".")[2]
        chosen = [bool(other) and group in ("", other) for other in script.groups]
        factor = 1 / factor
    if not any(chosen):
        raise WhatIfError(f"{key} matches no work of rank {script.rank}; known changes: {KNOWN}")
    return np.where(np.array(chosen), factor, 1.0)
