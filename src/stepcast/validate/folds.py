"""Cross-validation: constants learnt without some of the rows, so that no row is predicted by its own fit.

``tools/fit_folds.py`` repeats the fits of the operator prices with one family of shapes, or one GPU, left out
at a time and writes what it found to ``data/fits/folds.toml``. The digest there says which fit it belongs to.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache

from stepcast.cost.compute import compute_price
from stepcast.cost.fits import ComputeFit, compute_fit, merge_tables
from stepcast.cost.power import Load
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Gpu
from stepcast.ir.dataclass import dataclass
from stepcast.ir.work import Compute

# Lists of kernels, priced.


def price_kernels(kernels: Sequence[Compute], gpu: Gpu, fit: ComputeFit, load: Load) -> list[float]:
    """Return the seconds of each kernel; equal kernels are estimated once."""
    seconds = {work: compute_price(work, gpu, fit, load).seconds for work in set(kernels)}
    return [seconds[work] for work in kernels]


Family = tuple[int, ...]
STALE = (
    "the cross-validated constants belong to another fit (run tools/fit_folds.py): "
    "every row is predicted by constants that have seen it"
)


@dataclass(frozen=True, slots=True)
class Folds:
    """Fits that have not seen some rows."""

    families: Mapping[tuple[str, Family], ComputeFit]  # kind of rows and their family -> fit without it
    gpus: Mapping[str, "GpuFold"]  # GPU -> fit without it
    note: str = ""

    def without(self, kind: str, family: Family) -> ComputeFit | None:
        """Return the fit that has not seen the family; None where there is none."""
        return self.families.get((kind, family))


@dataclass(frozen=True, slots=True)
class GpuFold:
    """Constants for NeuSight's set, learnt without one GPU."""

    fit: ComputeFit
    added_s: Mapping[str, float] = field(hash=False)
    least_s: Mapping[str, float] = field(hash=False)


def fit_digest() -> str:
    """Return the digest of the committed fit of operators, without the host's times."""
    compute = {name: table for name, table in load_fit("compute").items() if name != "dispatch"}
    tables = [compute, load_fit("neusight")]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def load_folds() -> Folds:
    """Return the folds of the committed fit; none, with a note, where they belong to another."""
    table = load_fit("folds")
    if table["fit"] != fit_digest():
        return Folds({}, {}, STALE)
    families: dict[tuple[str, Family], ComputeFit] = {}
    compute = load_fit("compute")
    for fold in table["family"]:
        fit = compute_fit(merge_tables(compute, fold["values"]))
        families |= {(fold["kind"], tuple(family)): fit for family in fold["held"]}
    own = load_fit("neusight")
    base = merge_tables(compute, {section: own[section] for section in ("matmul", "stream")})
    gpus = {
        fold["held"]: GpuFold(
            compute_fit(merge_tables(base, fold["values"])),
            own["added_s"] | fold["added_s"],
            own["least_s"] | fold["least_s"],
        )
        for fold in table["gpu"]
    }
    return Folds(families, gpus)
