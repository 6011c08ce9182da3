"""Named constants from Megatron-LM traces: how fast stages compute, and what links between ranks reach."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from stepcast.analyze.megatron.analysis import MeetingTraffic, MegatronAnalysis
from stepcast.analyze.recording import BlockKind
from stepcast.analyze.result import bus_factor
from stepcast.calibrate.megatron_points import ComputePoint, FactorFit, RunPoints, compute_points, fit_factor
from stepcast.cost.calibration import Correction
from stepcast.cost.collectives.sweep import reached_busbw
from stepcast.hardware import Gpu, load_cluster
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

# What links reach, from measured collectives and messages: time = latency + bytes over bandwidth.

# Of other kinds the host's part is not known.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "message")
# Sizes further apart than this tell latency from bandwidth.
WIDE = 10.0
# Traces tell hundredths of a millisecond.
RESOLUTION_S = 1e-5
SHORTEST_S = 1.5 * RESOLUTION_S
# A bandwidth is read off transfers that take at least so long: below, latency is most of it.
LONG_S = 2e-4


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """One measured transfer: bytes that cross each rank's link, and the time from the last arrival on."""

    group: str
    kind: str
    ranks: int
    size_bytes: int
    seconds: float

    @property
    def crossing_bytes(self) -> float:
        return self.size_bytes * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """*latency_s* is None where the points cannot split it from the bandwidth, which then contains it."""

    group: str
    points: int
    bandwidth_bytes_per_s: float | None
    latency_s: float | None
    error: float


def link_points(traffic: Sequence[MeetingTraffic]) -> list[LinkPoint]:
    """What of *traffic* passed a link with nothing beside it; each kind and size once."""
    found: dict[tuple[str, str, int], LinkPoint] = {}
    for row in traffic:
        seconds = row.transfer_s
        if seconds is None and row.count > 1 and row.kind != "message":
            # Without peers: the shortest of several waited least.
            seconds = row.shortest_s
        if row.kind not in COLLECTIVES or row.overlapped or row.ranks < 2 or not row.size_bytes:
            continue
        if seconds is not None and seconds >= SHORTEST_S:
            point = LinkPoint(row.group, row.kind, row.ranks, row.size_bytes, seconds)
            found.setdefault((row.group, row.name, row.size_bytes), point)
    return list(found.values())


def fit_link(points: Sequence[LinkPoint]) -> LinkFit:
    """Latency and bandwidth of one group's transfers, by least squares of relative errors."""
    group = points[0].group
    sizes = [point.crossing_bytes for point in points]
    long = [point for point in points if point.seconds >= LONG_S]
    rates = sorted(point.crossing_bytes / point.seconds for point in long)
    if max(sizes) < WIDE * min(sizes) or not long:
        bandwidth = rates[len(rates) // 2] if rates else None
        return LinkFit(group, len(points), bandwidth, None, _error(points, 0.0, bandwidth))
    latency_s, per_byte_s = _line(points)
    bandwidth = 1 / per_byte_s if per_byte_s > 0 else None
    return LinkFit(group, len(points), bandwidth, latency_s, _error(points, latency_s, bandwidth))


def _line(points: Sequence[LinkPoint]) -> tuple[float, float]:
    """Latency and seconds per byte, neither below zero."""
    ones = [1 / point.seconds for point in points]
    rates = [point.crossing_bytes / point.seconds for point in points]
    aa, ab, bb = (
        sum(x * y for x, y in zip(left, right, strict=True))
        for left, right in ((ones, ones), (ones, rates), (rates, rates))
    )
    determinant = aa * bb - ab * ab
    latency_s = (bb * sum(ones) - ab * sum(rates)) / determinant
    per_byte_s = (aa * sum(rates) - ab * sum(ones)) / determinant
    if latency_s < 0:
        return 0.0, sum(rates) / bb
    if per_byte_s < 0:
        return sum(ones) / aa, 0.0
    return latency_s, per_byte_s


def _error(points: Sequence[LinkPoint], latency_s: float, bandwidth: float | None) -> float:
    errors = []
    for point in points:
        fitted_s = latency_s + (point.crossing_bytes / bandwidth if bandwidth else 0.0)
        errors.append(abs(fitted_s / point.seconds - 1))
    return sum(errors) / len(errors)


@dataclass(frozen=True, slots=True)
class LinkEfficiency:
    """A key of a cluster's description, and the value that gives the measured time."""

    key: str
    value: float
    beyond: bool  # the transfer is faster than the whole link of that description


def link_efficiency(cluster: str, points: Sequence[LinkPoint]) -> LinkEfficiency:
    """With which efficiency the largest transfer of *points* takes its measured time on *cluster*."""
    largest = max(points, key=lambda point: point.crossing_bytes)
    measured = largest.crossing_bytes / largest.seconds
    inside = largest.ranks <= load_cluster(cluster).domain_gpus
    key = "node.fabric.link.efficiency" if inside else "node.nic.efficiency"

    def reached(efficiency: float) -> float:
        own = load_cluster(cluster, [f"{key}={efficiency:.6f}"])
        return reached_busbw(largest.kind, largest.size_bytes, largest.ranks, own) or 0.0

    low, high = 0.01, 1.0
    if reached(high) <= measured:
        return LinkEfficiency(key, 1.0, True)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < measured else (low, middle)
    return LinkEfficiency(key, round(high, 4), False)


def by_group(points: Sequence[LinkPoint]) -> Mapping[str, list[LinkPoint]]:
    groups: dict[str, list[LinkPoint]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    return groups


Facts = dict[str, Any]
MATRIX = ("matmul", "bmm", "grouped")
# Factors further apart than this are no longer one.
UNLIKE = 1.1
# Transfers further off than this are not of one link.
SCATTERED = 0.15


def calibrate_megatron(
    runs: Mapping[str, MegatronAnalysis], gpu: Gpu, cluster: str | None = None, model: str | None = None
) -> tuple[Facts, str]:
    """Constants of all *runs* (by where each was read from) together, and the file that holds them."""
    found = [compute_points(one, source, gpu, model) for source, one in runs.items()]
    points = [point for run in found for point in run.points]
    factors = _factors(points)
    constants, warnings = _compute_constants(points, factors)
    links, link_warnings = _link_constants(runs.values(), cluster)
    constants |= links | _fixed(runs.values())
    classes = _classes(found, points, factors)
    facts = {
        "kind": "calibration",
        "source": "megatron",
        "gpu": gpu.name,
        "points": len(points),
        "constants": constants,
        "classes": {kind: asdict(one) for kind, one in classes.items()},
        **_overall(factors.values()),
        "stages": [asdict(point) for point in points],
        "assumptions": list(dict.fromkeys(text for run in found for text in run.assumptions)),
        "warnings": [*_warnings(runs, found), *warnings, *link_warnings],
    }
    return facts, _toml(facts, list(runs))


def _factors(points: Sequence[ComputePoint]) -> dict[str, FactorFit]:
    """One factor for each number format."""
    return {
        str(dtype): fit_factor([point for point in points if point.dtype is dtype])
        for dtype in dict.fromkeys(point.dtype for point in points)
    }


def _overall(fits: Iterable[FactorFit]) -> Facts:
    """Mean errors of all points, each by the factor of its format."""
    listed = list(fits)
    known = [one for one in listed if one.left_out is not None]
    return {
        "before": _weighted([(one.before, one.points) for one in listed]),
        "after": _weighted([(one.after, one.points) for one in listed]),
        "left_out": _weighted([(one.left_out or 0.0, one.points) for one in known]),
    }


def _weighted(errors: Sequence[tuple[float, int]]) -> float | None:
    count = sum(points for _, points in errors)
    return sum(error * points for error, points in errors) / count if count else None


def _compute_constants(
    points: Sequence[ComputePoint], factors: Mapping[str, FactorFit]
) -> tuple[dict[str, Facts], list[str]]:
    constants: dict[str, Facts] = {}
    warnings: list[str] = []
    for dtype, fitted in factors.items():
        own = [point for point in points if point.dtype == dtype]
        phases: dict[BlockKind, float] = {}
        constants[f"compute_factor_{dtype}"] = _constant(
            f"compute over predicted, {dtype}", fitted.factor, f"{fitted.factor:.3f}", len(own), _known(fitted)
        )
        for phase in (BlockKind.FORWARD, BlockKind.BACKWARD):
            each = fit_factor([point for point in own if point.phase is phase])
            phases[phase] = each.factor
            text = f"{each.factor:.3f}"
            constants[f"{phase}_compute_factor_{dtype}"] = _constant(
                f"  {phase}", each.factor, text, each.points, _known(each)
            )
        if max(phases.values()) > UNLIKE * min(phases.values()):
            warnings.append(
                f"{dtype}: forward takes {phases[BlockKind.FORWARD]:.2f} and backward "
                f"{phases[BlockKind.BACKWARD]:.2f} times what is predicted; one factor for both fits neither"
            )
        ratios = _ratios(own)
        value = median(ratios)
        known = f"{min(ratios):.2f} to {max(ratios):.2f}"
        constants[f"backward_factor_{dtype}"] = _constant(
            f"backward over forward, {dtype}", value, f"{value:.2f}", len(ratios), known
        )
    if points:
        warnings.append(
            "a trace times whole passes: one factor stands for matmuls, attention and memory-bound kernels, "
            "which it cannot tell apart"
        )
    warnings += [
        f"{dtype}: the factor is not used: points left out of it are {format_percent(one.left_out or 0.0)} "
        f"off with it and {format_percent(one.before)} without"
        for dtype, one in factors.items()
        if not one.helps
    ]
    return constants, warnings


def _ratios(points: Sequence[ComputePoint]) -> list[float]:
    """Measured backward over forward of every stage."""
    seconds = {(point.run, point.stage, point.phase): point.measured_s for point in points}
    return [
        seconds[run, stage, BlockKind.BACKWARD] / forward_s
        for (run, stage, phase), forward_s in seconds.items()
        if phase is BlockKind.FORWARD
    ]


def _known(fitted: FactorFit) -> str:
    if fitted.left_out is None:
        return "one point: cannot be checked"
    return f"{format_percent(fitted.left_out)} off where left out"


def _constant(title: str, value: float, text: str, points: int, known: str) -> Facts:
    return {"title": title, "value": value, "text": text, "points": points, "known": known}


def _link_constants(runs: Iterable[MegatronAnalysis], cluster: str | None) -> tuple[dict[str, Facts], list[str]]:
    constants: dict[str, Facts] = {}
    warnings: list[str] = []
    measured = by_group([point for one in runs for point in link_points(one.result.communication)])
    for group, points in measured.items():
        fitted = fit_link(points)
        constants |= _link(fitted)
        if fitted.latency_s is None:
            sizes = sorted({point.size_bytes for point in points})
            listed = format_bytes(sizes[0]) if len(sizes) == 1 else f"{len(sizes)} sizes close together"
            what = "message" if group == "pp" else f"{group} transfer"
            seconds = median(point.seconds for point in points)
            constants[f"{group}_message_s"] = _constant(
                f"{group}: time of a transfer", seconds, format_seconds(seconds), len(points), listed
            )
            warnings.append(
                f"{group}: one {what} size ({listed}) cannot split latency from bandwidth; the bandwidth "
                "contains the latency; add runs with another micro-batch, sequence or hidden size"
                if len(sizes) == 1
                else f"{group}: {listed} cannot split latency from bandwidth; add runs of other sizes"
            )
        elif fitted.error > SCATTERED:
            warnings.append(
                f"{group}: transfers lie {format_percent(fitted.error)} off one latency and one bandwidth: "
                "do all runs use the same links?"
            )
        if cluster and group == "tp":
            found = link_efficiency(cluster, points)
            known = f"--set {found.key}={found.value:g}"
            constants["tp_link_efficiency"] = _constant(
                f"tp: link efficiency of {cluster}", found.value, f"{found.value:.3f}", 1, known
            )
            if found.beyond:
                warnings.append(f"tp: faster than the link of {cluster}: is this the cluster it ran on?")
    return constants, warnings


def _link(fitted: LinkFit) -> dict[str, Facts]:
    constants = {}
    group, known = fitted.group, f"points {format_percent(fitted.error)} off"
    if fitted.bandwidth_bytes_per_s is not None:
        rate = fitted.bandwidth_bytes_per_s
        constants[f"{group}_bandwidth_bytes_per_s"] = _constant(
            f"{group}: bus bandwidth", rate, format_rate(rate), fitted.points, known
        )
    if fitted.latency_s is not None:
        seconds = fitted.latency_s
        constants[f"{group}_latency_s"] = _constant(
            f"{group}: latency of a transfer",
            seconds,
            format_seconds(seconds),
            fitted.points,
            f"within {format_seconds(RESOLUTION_S)} at best",
        )
    return constants


def _fixed(runs: Iterable[MegatronAnalysis]) -> dict[str, Facts]:
    """Time per step in which a rank neither computes nor communicates nor waits."""
    seconds = [mean(rank.breakdown_s["host"] for rank in one.result.rank_times) for one in runs]
    known = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
    value = median(seconds)
    return {"fixed_step_s": _constant("fixed step overhead (host)", value, format_seconds(value), len(seconds), known)}


def _classes(
    found: Sequence[RunPoints], points: Sequence[ComputePoint], factors: Mapping[str, FactorFit]
) -> dict[str, Correction]:
    """Matmuls by the factor of their format; classes that formats share by that of all points.

    A format whose factor does not help points left out of it is not corrected.
    """
    used = [point for point in points if factors[str(point.dtype)].helps]
    if not used:
        return {}
    shared = fit_factor(used)
    formats = {str(point.dtype) for point in used}
    corrections = {}
    for kind in dict.fromkeys(kind for run in found for kind in run.classes):
        family, _, dtype = kind.partition(".")
        if family not in MATRIX:
            corrections[kind] = Correction(shared.factor, spread=shared.spread)
        elif dtype in formats:
            corrections[kind] = Correction(factors[dtype].factor, spread=factors[dtype].spread)
    return corrections


def _warnings(runs: Mapping[str, MegatronAnalysis], found: Sequence[RunPoints]) -> list[str]:
    texts = [text for run in found for text in run.warnings]
    for source, one in runs.items():
        name = os.path.basename(source.rstrip("/"))
        for slow in one.result.stragglers:
            texts.append(f"{name}: rank {slow.rank} is {slow.factor:.2f} times as slow and left out")
    if all(one.recording.micro_batches <= 1 for one in runs.values()):
        texts.append("one micro-batch per step cannot split the fixed overhead of a step from that of a micro-batch")
    widths = {one.recording.facts.get("hidden") for one in runs.values()}
    if len(widths) == 1 and any(run.points for run in found):
        texts.append("one model width cannot show how the factor changes with size; slopes are left at 0")
    return texts


def _toml(found: Facts, sources: Sequence[str]) -> str:
    lines = [
        "# Written by 'stepcast calibrate'; give it to predict or op with --calibration.",
        f'gpu = "{found["gpu"]}"',
        f'source = "stepcast calibrate on {len(sources)} Megatron-LM runs"',
        "runs = [",
        *(f'    "{os.path.basename(source.rstrip("/"))}",' for source in sources),
        "]",
    ]
    for kind, correction in found["classes"].items():
        lines += ["", f'[class."{kind}"]', *(f"{key} = {value:.6g}" for key, value in correction.items())]
    lines += ["", "[constants]"]
    for name, constant in found["constants"].items():
        lines.append(f"{name} = {constant['value']:.6g}  # {constant['known']}")
    lines += ["", "[fit]  # mean errors of computation", f"points = {found['points']}"]
    for name in ("before", "after", "left_out"):
        if found[name] is not None:
            lines.append(f"{name} = {found[name]:.4g}")
    return "\n".join(lines) + "\n"
