"""Fit the constants of Mamba-2's scan, convolution and norm by groups; writes data/fits/mamba.toml.

Its measurements are those of tools/measure_mamba.py on an H200. Each constant is the one with the least mean
relative error over all cases, from a grid refined step by step. The spread is that of shapes of chunk, head
and state that are left out of the fit.

    python tools/fit_mamba.py
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from stepcast.cost.fits import ScanFit, StreamFit, default_fit
from stepcast.cost.memory_bound import stream_s
from stepcast.cost.price import matrix_rates, vector_rates
from stepcast.cost.scan_and_convolution import scan_s
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.recurrent import DeltaRule, Scan, SelectiveScan
from stepcast.ir.types import DType

SOURCE = (
    "tools/fit_mamba.py on src/stepcast/data/h200/mamba.csv "
    "(mamba_ssm 2.3.2, causal_conv1d 1.7.0, torch 2.11, triton 3.6)"
)
DATA = Path(__file__).parents[1] / "src" / "stepcast" / "data"
GPU = load_gpu("h200")
SCANNING = ("_bmm_", "_chunk_", "_state_", "torch")
KERNELS = {
    "convolution": ("forward", "causal_conv1d_channellast_fwd_kernel"),
    "convolution-backward": ("both", "causal_conv1d_channellast_bwd_kernel"),
    "group-norm": ("forward", "_layer_norm_fwd_1pass_kernel"),
    "group-norm-backward": ("both", "_layer_norm_bwd_kernel"),
}
Case = tuple[int, ...]
Times = dict[tuple[str, str], float]
"""(phase, kernel) -> seconds, or how many launches."""


def cases() -> tuple[dict[Case, Times], dict[Case, Times]]:
    """Sizes -> (phase, kernel) -> seconds, and launches."""
    found: dict[Case, Times] = defaultdict(dict)
    launches: dict[Case, Times] = defaultdict(dict)
    with (DATA / "h200" / "mamba.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            names = ("heads", "head_dim", "state", "groups", "chunk", "batch", "seq")
            sizes = tuple(int(row[name]) for name in names)
            key = row["phase"], row["kernel"]
            launches[sizes][key] = float(row["launches"])
            found[sizes][key] = float(row["us"]) * float(row["launches"]) * 1e-6
    return dict(found), dict(launches)


def scan_sum(times: Times, backward: bool) -> float:
    """Over all kernels of the scan in one pass; the backward is what both passes have beyond the forward."""
    sums = {"forward": 0.0, "both": 0.0}
    for (phase, kernel), value in times.items():
        if kernel.startswith(SCANNING):
            sums[phase] += value
    return sums["both"] - sums["forward"] if backward else sums["forward"]


def refined(error: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[float, ...]:
    """The best of a grid of factors around *start*, finer each round."""
    best, width = tuple(start), 4.0
    for _ in range(14):
        steps = (1 / width, width**-0.5, 1.0, width**0.5, width)
        best = min(
            (tuple(value * step for value, step in zip(best, grid, strict=True))
             for grid in product(steps, repeat=len(best))),
            key=error,
        )  # fmt: skip
        width = max(width**0.7, 1.005)
    return best


def report(name: str, predicted: Sequence[float], measured: Sequence[float]) -> float:
    off = np.abs(np.array(predicted) / np.array(measured) - 1)
    nine = float(np.quantile(off, 0.9))
    print(f"{name:22} {off.size} cases: mean {off.mean():.1%}, 9 in 10 {nine:.1%}, most {off.max():.1%}")
    return nine


def works_of(found: dict[Case, Times], backward: bool) -> tuple[list[Scan], list[float]]:
    works, measured = [], []
    for (heads, head_dim, state, groups, chunk, batch, seq), times in found.items():
        works.append(Scan(batch, seq, heads, head_dim, state, groups, chunk, backward))
        measured.append(scan_sum(times, backward))
    return works, measured


def scan_times(works: Sequence[DeltaRule | Scan | SelectiveScan], fit: ScanFit) -> list[float]:
    peak, rates = matrix_rates(GPU, DType.BF16).peak_flops, vector_rates(GPU)
    return [float(scan_s(work, peak, rates, fit)) for work in works]


def fit_clocks(
    works: Sequence[DeltaRule | Scan | SelectiveScan], measured: Sequence[float], kernels: float, start: Sequence[float]
) -> ScanFit:
    """The clocks of inputs and states and the fixed time, from *start*; bytes move as in kernels that only stream."""
    streaming = default_fit().stream("add").bandwidth_efficiency

    def error(constants: Sequence[float]) -> float:
        predicted = scan_times(works, ScanFit(round(kernels), streaming, *constants))
        return float(np.mean(np.abs(np.array(predicted) / np.array(measured) - 1)))

    return ScanFit(round(kernels), streaming, *refined(error, start))


def fit_scan(found: dict[Case, Times], launches: dict[Case, Times], backward: bool) -> ScanFit:
    kernels = float(np.median([scan_sum(times, backward) for times in launches.values()]))
    start = (9.0, 2.0, 5e-5) if backward else (1.0, 1.0, 1e-5)
    return fit_clocks(*works_of(found, backward), kernels, start)


def left_out(found: dict[Case, Times], launches: dict[Case, Times]) -> float:
    """What nine in ten cases stay within where each shape is predicted by the others alone."""
    spreads = []
    for backward in (False, True):
        predicted, measured = [], []
        for shape in {sizes[1:3] + sizes[4:5] for sizes in found}:
            own = {sizes: times for sizes, times in found.items() if sizes[1:3] + sizes[4:5] == shape}
            others = {sizes: times for sizes, times in found.items() if sizes not in own}
            works, seconds = works_of(own, backward)
            predicted += scan_times(works, fit_scan(others, launches, backward))
            measured += seconds
        spreads.append(report(f"left out, {'backward' if backward else 'forward'}", predicted, measured))
    return max(spreads)


def fit_stream(found: dict[Case, Times], name: str) -> StreamFit:
    sizes, measured = [], []
    for (heads, head_dim, state, groups, _, batch, seq), times in found.items():
        inner, tokens = heads * head_dim, batch * seq
        wide = inner + 2 * groups * state
        rows, columns = (tokens, wide) if name.startswith("conv") else (tokens * groups, inner // groups)
        moved = rows * columns * 2.0
        sizes.append((rows, columns, moved * (2 if name.endswith("backward") else 1), moved))
        measured.append(times[KERNELS[name]])
    rates, fit = vector_rates(GPU), default_fit()
    own = fit.stream("add" if name.startswith("conv") else "rms-norm")
    base = replace(own, row_clocks=0.0, column_clocks=0.0, passes=0.0)

    def predicted(made: StreamFit) -> list[float]:
        return [float(stream_s(*size, rates, made)) for size in sizes]

    def made(constants: Sequence[float]) -> StreamFit:
        if name.startswith("conv"):
            return replace(base, elements_per_clock=constants[0])
        return replace(base, row_clocks=constants[0], column_clocks=constants[1])

    def error(constants: Sequence[float]) -> float:
        return float(np.mean(np.abs(np.array(predicted(made(constants))) / np.array(measured) - 1)))

    best = made(refined(error, (2.0,) if name.startswith("conv") else (300.0, 5.0)))
    report(name, predicted(best), measured)
    return best


def lines(found: dict[Case, Times], launches: dict[Case, Times]) -> Iterator[str]:
    yield f'source = "{SOURCE}"'
    fits = {"forward": fit_scan(found, launches, False), "backward": fit_scan(found, launches, True)}
    for name, fit in fits.items():
        works, measured = works_of(found, name == "backward")
        report(f"scan {name}", scan_times(works, fit), measured)
    yield f"spread = {left_out(found, launches):.3g}"
    for name, fit in fits.items():
        yield f"\n[scan.{name}]"
        for field in ("kernels", "bandwidth_efficiency", "input_clocks", "state_clocks", "fixed_s"):
            yield f"{field} = {getattr(fit, field):.4g}"
    for name in KERNELS:
        stream = fit_stream(found, name)
        yield f"\n[stream.{name}]"
        for field in ("bandwidth_efficiency", "elements_per_clock", "row_clocks", "column_clocks", "latency_s"):
            if value := getattr(stream, field):
                yield f"{field} = {value:.4g}"


if __name__ == "__main__":
    (DATA / "fits" / "mamba.toml").write_text("\n".join(lines(*cases())) + "\n", encoding="utf-8")
