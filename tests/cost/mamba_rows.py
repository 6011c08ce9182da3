"""The measured kernels of Mamba-2 blocks: src/stepcast/data/h200/mamba.csv by case."""

import csv
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import stepcast
from stepcast.ir.recurrent import Scan

FILE = Path(stepcast.__file__).parent / "data" / "h200" / "mamba.csv"
SIZES = ("heads", "head_dim", "state", "groups", "chunk", "batch", "seq")
SCANNING = ("_bmm_", "_chunk_", "_state_", "torch")


@dataclass
class Case:
    """One call forward and backward; seconds by phase (forward, or both passes) and kernel."""

    sizes: dict[str, int]
    saved_bytes: int = 0
    peak_bytes: int = 0
    kernel_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def scan(self, backward: bool) -> Scan:
        heads, head_dim, state, groups, chunk, batch, seq = (self.sizes[name] for name in SIZES)
        return Scan(batch, seq, heads, head_dim, state, groups, chunk, backward)

    def scan_s(self, backward: bool) -> float:
        sums: dict[str, float] = defaultdict(float)
        for (phase, kernel), seconds in self.kernel_s.items():
            if kernel.startswith(SCANNING):
                sums[phase] += seconds
        return sums["both"] - sums["forward"] if backward else sums["forward"]


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    found: dict[tuple[int, ...], Case] = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = {name: int(row[name]) for name in SIZES}
            case = found.setdefault(tuple(sizes.values()), Case(sizes))
            case.saved_bytes, case.peak_bytes = int(row["saved_bytes"]), int(row["peak_bytes"])
            seconds = float(row["us"]) * float(row["launches"]) * 1e-6
            case.kernel_s[row["phase"], row["kernel"]] = seconds
    return tuple(found.values())
