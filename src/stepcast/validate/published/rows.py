"""Rows of published training runs, corrected where their sources contradict themselves.

``data/corrections/training_runs.toml`` lists such places as data. Each correction names a source, the rows
(by id, or by what other columns hold), the values as published and corrected, and its reason: arithmetic, or
where the source says so. A row that does not hold the published value is left as it is.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from typing import get_args, get_type_hints

from stepcast.inputs.source import parse_toml
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import TableError, convert_table
from stepcast.units import TFLOPS
from stepcast.validate.scoreboard import DATA, load_table

Record = Mapping[str, str | None]
CORRECTED = "corrected"  # the column that lists what was changed, and why
LEFT_OUT = "left out"  # the status of a row that contradicts its source and cannot be put right


class CorrectionError(ValueError):
    """A list of corrections that says too little."""


@dataclass(frozen=True, slots=True)
class RowCorrection:
    """Changes of the rows whose source starts with *source*: those of *rows*, or all for which *when* holds.

    *change* holds by column the value as published and as corrected; values of *when* may be "this | that".
    """

    source: str
    change: Mapping[str, tuple[str, str]] = field(hash=False)
    reason: str
    rows: tuple[str, ...] = ()
    when: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (self.rows or self.when):
            raise ValueError("needs rows or when: which rows it is about")

    def applies_to(self, record: Record) -> bool:
        """Return True if the correction is about this row."""
        if not (record.get("source") or "").startswith(self.source):
            return False
        if self.rows and record.get("id") not in self.rows:
            return False
        return all(
            any(_is_same(record.get(column), value) for value in values.split(" | "))
            for column, values in self.when.items()
        )


def correct_records(records: Iterable[Record], corrections: Iterable[RowCorrection]) -> Iterator[Record]:
    """Yield *records* with known mistakes put right, and listed in the column ``corrected``."""
    corrections = tuple(corrections)
    for record in records:
        notes: list[str] = []
        for correction in corrections:
            if not correction.applies_to(record):
                continue
            changes = {
                column: pair for column, pair in correction.change.items() if _is_same(record.get(column), pair[0])
            }
            if changes:
                words = (f"{column} {old or 'blank'} -> {new or 'blank'}" for column, (old, new) in changes.items())
                notes.append(f"{', '.join(words)}: {' '.join(correction.reason.split())}")
                record = {**record, **{column: new for column, (_, new) in changes.items()}}
        yield {**record, CORRECTED: "; ".join(notes)} if notes else record


@lru_cache(maxsize=1)
def load_corrections() -> tuple[RowCorrection, ...]:
    """Return the corrections that ship with the package."""
    return parse_corrections((DATA / "corrections" / "training_runs.toml").read_text(encoding="utf-8"))


def parse_corrections(text: str) -> tuple[RowCorrection, ...]:
    """Return the corrections of a TOML text."""
    corrections = []
    for entry in parse_toml(text).get("correction", ()):
        try:
            corrections.append(convert_table(entry, RowCorrection))
        except TableError as error:
            pairs = "; a change has two values, published and corrected" if "change" in error.path else ""
            raise CorrectionError(f"a correction of {entry.get('source', '?')!r}: {error}{pairs}") from None
    return tuple(corrections)


def _is_same(held: str | None, stated: str) -> bool:
    """Return True if two values are the same text or number: 256 and 256.0 are."""
    held = (held or "").strip()
    try:
        return float(held) == float(stated)
    except ValueError:
        return held == stated


class NotComparableError(ValueError):
    """A row that states too little, or something of which no prediction can be made."""


# ---- one published training run as its csv row states it: a blank stays None --------------------------------


def _text(record: Record, name: str) -> str:
    return (record.get(name) or "").strip()


def _number(record: Record, name: str) -> float | None:
    text = _text(record, name)
    if not text or text.lower() == "nan":
        return None
    try:
        return float(text)
    except ValueError:
        raise NotComparableError(f"{name} {text!r} is not a number") from None


def _count(record: Record, name: str) -> int | None:
    number = _number(record, name)
    if number is None:
        return None
    if not number.is_integer() or number < 1:
        raise NotComparableError(f"{name} {number:g} is not a whole number above zero")
    return int(number)


def _needed_count(record: Record, name: str) -> int:
    count = _count(record, name)
    if count is None:
        raise NotComparableError(f"{name} is not published")
    return count


def _flag(record: Record, name: str) -> bool | None:
    number = _number(record, name)
    return None if number is None else number != 0


# Columns that a row needs to be compared at all.
NEEDED = ("id", "model", "gpu", "num_gpus", "framework", "tp", "pp", "dp", "global_batch")
# Column -> field of an Overlap.
OVERLAPS = {"tp_comm_overlap": "tensor", "overlap_grad_reduce": "gradients", "overlap_param_gather": "parameters"}
# Field of a PublishedRun -> column, where their names differ.
COLUMNS: Mapping[str, str] = load_table("rows/published")["columns"]


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """The columns that a prediction or its target is made from; READERS reads a column by its field's type."""

    name: str
    source: str
    table: str
    model: str
    gpu: str
    network: str
    framework: str
    precision: str
    sharding: str
    recompute: str
    schedule: str
    status: str
    tflops_kind: str
    gpus: int
    tp: int
    pp: int
    dp: int
    global_batch: int
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    micro_batch: int | None = None
    seq: int | None = None
    sequence_parallel: bool | None = None
    flash_attention: bool | None = None
    gpu_memory_gb: float | None = None
    iteration_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    flops_per_gpu: float | None = None
    utilisation: float | None = None
    peak_memory_gib: float | None = None
    derived: bool = False
    compiled: bool | None = None
    further_tokens: bool | None = None
    lora_rank: int | None = None
    fp8_parameters: bool | None = None
    # How kernels are captured in graphs; blank where the row is silent.
    graphs: str = ""
    # Communication that overlaps computation, by fields of an Overlap; a field that the row does not state is absent.
    overlapped: Mapping[str, bool] = field(default_factory=dict, hash=False)
    flags: tuple[str, ...] = ()
    # The peak of the rank that writes the log, the first, and not of the fullest.
    logged_by_first: bool = False
    corrected: str = ""

    @property
    def out_of_memory(self) -> bool:
        """Return True if the run ended for lack of memory."""
        return self.status.strip().lower() == "oom"

    @property
    def counts_causal(self) -> bool:
        """Return True if its FLOP/s count the causal half of attention, not the full square."""
        return "causal" in self.tflops_kind and "non-causal" not in self.tflops_kind

    @property
    def reshard(self) -> bool | None:
        """Return whether FSDP frees gathered weights between forward and backward; None where the row is silent."""
        return False if "no reshard" in self.sharding else None


def read_run(record: Record) -> PublishedRun:
    """Return the run that one line of ``training_runs.csv`` describes."""
    missing = [name for name in NEEDED if not _text(record, name)]
    if missing:
        raise NotComparableError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not published")
    if _text(record, "status") == LEFT_OUT:
        raise NotComparableError(f"{_text(record, 'id')} left out: {_text(record, CORRECTED).partition(': ')[2]}")
    own = {"flops_per_gpu", "utilisation", "derived", "overlapped", "flags", "logged_by_first"}
    values = {name: read(record, COLUMNS.get(name, name)) for name, read in _readers() if name not in own}
    tflops, mfu_percent = _number(record, "tflops_per_gpu"), _number(record, "mfu_pct")
    return PublishedRun(
        **values,  # type: ignore[arg-type]
        flops_per_gpu=None if tflops is None else tflops * TFLOPS,
        utilisation=None if mfu_percent is None else mfu_percent / 100,
        derived=_text(record, "derived").lower() == "true",
        overlapped={name: on for column, name in OVERLAPS.items() if (on := _flag(record, column)) is not None},
        flags=tuple(_text(record, "flags").split()),
        logged_by_first=bool(_text(record, "bench")) or _text(record, "memory_of") == "first stage",
    )


READERS: Mapping[frozenset[type], Callable[[Record, str], object]] = {
    frozenset({str}): _text,
    frozenset({int}): _needed_count,
    frozenset({int, types.NoneType}): _count,
    frozenset({float, types.NoneType}): _number,
    frozenset({bool, types.NoneType}): _flag,
}


@lru_cache(maxsize=1)
def _readers() -> list[tuple[str, Callable[[Record, str], object]]]:
    """Return the fields of a run with the functions that read them."""
    kinds = {name: frozenset(get_args(kind) or (kind,)) for name, kind in get_type_hints(PublishedRun).items()}
    return [(name, READERS[kind]) for name, kind in kinds.items() if kind in READERS]
