"""Fit the constants of the delta rule and of Mamba's selective scan; writes data/fits/linear.toml.

Its measurements are those of tools/measure_linear.py on an H200. Of the scan each constant is the one with
the least mean relative error over all cases, and the spread that of cases left out one by one. Of the rule
two cases were measured: what moving its bytes leaves of their times, over the chunks of a sequence, is their
mean, and the spread the one that Mamba-2's scans have.

    python tools/fit_linear.py
"""

import csv
from collections.abc import Iterator, Sequence

import numpy as np
from fit_mamba import DATA, GPU, fit_clocks, report, scan_times
from msgspec.structs import replace

from stepcast.cost.fits import ScanFit, default_fit
from stepcast.cost.price import vector_rates
from stepcast.cost.scan_and_convolution import chunk_steps
from stepcast.hardware.catalog import load_fit
from stepcast.ir.recurrent import DeltaRule, SelectiveScan

SOURCE = (
    "tools/fit_linear.py on src/stepcast/data/h200/linear.csv (flash-linear-attention 0.6.0, whose check for "
    "this pair of GPU and triton was switched off for the time; mamba_ssm 2.3.2, torch 2.11, triton 3.6)"
)
FIELDS = ("kernels", "bandwidth_efficiency", "input_clocks", "state_clocks", "fixed_s", "chunk_clocks")
Case = tuple[DeltaRule | SelectiveScan, float, float]
"""Work, seconds and launches."""


def cases(mixer: str, backward: bool) -> list[Case]:
    found: list[Case] = []
    with (DATA / "h200" / "linear.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mixer"] != mixer or (row["phase"] == "backward") != backward:
                continue
            names = ("heads", "key_dim", "value_dim", "chunk", "batch", "seq")
            heads, key, value, chunk, batch, seq = (int(row[name]) for name in names)
            work: DeltaRule | SelectiveScan = SelectiveScan(batch, seq, heads, key, backward)
            if mixer == "delta":
                work = DeltaRule(batch, seq, heads, key, value, chunk, backward)
            found.append((work, float(row["us"]) * 1e-6, float(row["launches"])))
    return found


def times(found: Sequence[Case], fit: ScanFit) -> list[float]:
    return scan_times([work for work, *_ in found], fit)


def kernels_of(found: Sequence[Case]) -> float:
    return float(np.median([launches for *_, launches in found]))


def fit_selective(found: Sequence[Case]) -> ScanFit:
    works, measured, _ = zip(*found, strict=True)
    return fit_clocks(works, measured, kernels_of(found), (0.8, 0.3, 1e-6))


def fit_delta(found: Sequence[Case]) -> ScanFit:
    """Fit the clocks of a chunk to the time that remains when the time of moving the bytes is subtracted."""
    streaming, rates = default_fit().stream("add").bandwidth_efficiency, vector_rates(GPU)
    bare = ScanFit(round(kernels_of(found)), streaming, 0.0, 0.0, 0.0)
    left = [
        float((seconds - moved) * rates.clock_hz / chunk_steps(work, rates.sms))
        for (work, seconds, _), moved in zip(found, times(found, bare), strict=True)
    ]
    return replace(bare, chunk_clocks=float(np.mean(left)))


def left_out(found: Sequence[Case]) -> list[float]:
    return [times([each], fit_selective([other for other in found if other is not each]))[0] for each in found]


def lines() -> Iterator[str]:
    fits, spread = {}, 0.0
    for mixer, fit in (("delta", fit_delta), ("selective", fit_selective)):
        for phase in ("forward", "backward"):
            found = cases(mixer, phase == "backward")
            measured = [seconds for _, seconds, _ in found]
            fits[f"{mixer}.{phase}"] = made = fit(found)
            report(f"{mixer} {phase}", times(found, made), measured)
            if mixer == "selective":
                spread = max(spread, report(f"left out, {phase}", left_out(found), measured))
    yield f'source = "{SOURCE}"'
    yield f"\n[spread]\ndelta = {load_fit('mamba')['spread']:.3g}\nselective = {spread:.3g}"
    for name, made in fits.items():
        yield f"\n[{name}]"
        yield from (f"{field} = {getattr(made, field):.4g}" for field in FIELDS)


if __name__ == "__main__":
    (DATA / "fits" / "linear.toml").write_text("\n".join(lines()) + "\n", encoding="utf-8")
