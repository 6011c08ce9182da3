"""Where the source of a published run contradicts itself, or says elsewhere what its row leaves out.

``data/corrections/training_runs.toml`` lists such places as data. Each correction names a source, the rows
(by id, or by what other columns hold), the values as published and corrected, and its reason: arithmetic, or
where the source says so. A row that does not hold the published value is left as it is.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files

from stepcast.units import TFLOPS

Record = Mapping[str, str | None]
CORRECTED = "corrected"  # the column that tells what was changed, and why
LEFT_OUT = "left out"  # the status of a row that contradicts its source and cannot be put right


class CorrectionError(ValueError):
    """A list of corrections that says too little."""


@dataclass(frozen=True, slots=True)
class Change:
    column: str
    published: str
    corrected: str

    def __str__(self) -> str:
        return f"{self.column} {self.published or 'blank'} -> {self.corrected or 'blank'}"


@dataclass(frozen=True, slots=True)
class RowCorrection:
    """Of the rows whose source starts with *source*: those of *rows*, or all for which *when* holds."""

    source: str
    rows: tuple[str, ...]
    when: tuple[tuple[str, str], ...]
    changes: tuple[Change, ...]
    reason: str

    def concerns(self, record: Record) -> bool:
        if not (record.get("source") or "").startswith(self.source):
            return False
        if self.rows and record.get("id") not in self.rows:
            return False
        return all(_same(record.get(column), value) for column, value in self.when)


def corrected(records: Iterable[Record], known: Iterable[RowCorrection]) -> Iterator[Record]:
    """*records* with what is *known* to be wrong put right, and told in the column ``corrected``."""
    known = tuple(known)
    for record in records:
        told: list[str] = []
        for each in known:
            if not each.concerns(record):
                continue
            made = [one for one in each.changes if _same(record.get(one.column), one.published)]
            if made:
                told.append(f"{', '.join(map(str, made))}: {each.reason}")
                record = {**record, **{one.column: one.corrected for one in made}}
        yield {**record, CORRECTED: "; ".join(told)} if told else record


@lru_cache(maxsize=1)
def corrections() -> tuple[RowCorrection, ...]:
    """Those that ship with the package."""
    return parse(files("stepcast").joinpath("data/corrections/training_runs.toml").read_text(encoding="utf-8"))


def parse(text: str) -> tuple[RowCorrection, ...]:
    return tuple(_correction(entry) for entry in tomllib.loads(text).get("correction", ()))


def _correction(entry: Mapping[str, object]) -> RowCorrection:
    for needed in ("source", "change", "reason"):
        if not entry.get(needed):
            raise CorrectionError(f"a correction of {entry.get('source', '?')!r} has no {needed}")
    rows, when, change = entry.get("rows", []), entry.get("when", {}), entry["change"]
    if not (rows or when):
        raise CorrectionError(f"a correction of {entry['source']!r} needs rows or when: which rows it is about")
    assert isinstance(rows, list)
    assert isinstance(when, dict)
    assert isinstance(change, dict)
    for column, pair in change.items():
        if not (isinstance(pair, list) and len(pair) == 2):
            raise CorrectionError(f"{entry['source']!r}: {column} needs two values, published and corrected")
    return RowCorrection(
        source=str(entry["source"]),
        rows=tuple(map(str, rows)),
        when=tuple((str(column), str(value)) for column, value in when.items()),
        changes=tuple(Change(str(column), str(old), str(new)) for column, (old, new) in change.items()),
        reason=" ".join(str(entry["reason"]).split()),
    )


def _same(held: str | None, stated: str) -> bool:
    """256 and 256.0 are the same."""
    held = (held or "").strip()
    try:
        return float(held) == float(stated)
    except ValueError:
        return held == stated


# One published training run as its csv row states it: a blank stays None.

# What rows need to say to be compared at all.
NEEDED = ("id", "model", "gpu", "num_gpus", "framework", "tp", "pp", "dp", "global_batch")


# Column -> field of an Overlap.
OVERLAPS = {"tp_comm_overlap": "tensor", "overlap_grad_reduce": "gradients", "overlap_param_gather": "parameters"}


class NotComparableError(ValueError):
    """A row that states too little, or something of which no prediction can be made."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """The columns that a prediction or its target is made from."""

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
    # What runs beside computation, by fields of an Overlap; a field that the row does not state is absent.
    overlapped: Mapping[str, bool] = field(default_factory=dict, hash=False)
    flags: tuple[str, ...] = ()
    # The peak of the rank that writes the log, the first, and not of the fullest.
    logged_by_first: bool = False
    corrected: str = ""

    @property
    def out_of_memory(self) -> bool:
        return self.status.strip().lower() == "oom"

    @property
    def counts_causal(self) -> bool:
        """Whether its FLOP/s count the causal half of attention, or the whole square."""
        return "causal" in self.tflops_kind and "non-causal" not in self.tflops_kind

    @property
    def reshard(self) -> bool | None:
        """Whether FSDP frees gathered weights between forward and backward; None where the row is silent."""
        return False if "no reshard" in self.sharding else None

    @property
    def recomputes_by_op(self) -> bool:
        """torchtitan's selective activation checkpointing, which decides operator by operator."""
        return self.recompute.lower().endswith("ac")

    @property
    def overlaps_experts(self) -> bool:
        return "a2a overlap" in self.schedule.lower()


def run_of(record: Mapping[str, str | None]) -> PublishedRun:
    """The run that one line of ``training_runs.csv`` describes."""
    missing = [name for name in NEEDED if not _text(record, name)]
    if missing:
        raise NotComparableError(f"{missing[0]} is not published")
    if _text(record, "status") == LEFT_OUT:
        raise NotComparableError(f"{_text(record, 'id')} left out: {_text(record, CORRECTED).partition(': ')[2]}")
    tflops, mfu_percent = _number(record, "tflops_per_gpu"), _number(record, "mfu_pct")
    return PublishedRun(
        name=_text(record, "id"),
        source=_text(record, "source"),
        table=_text(record, "table"),
        model=_text(record, "model"),
        gpu=_text(record, "gpu"),
        network=_text(record, "network"),
        framework=_text(record, "framework"),
        precision=_text(record, "precision"),
        sharding=_text(record, "zero_fsdp"),
        recompute=_text(record, "recompute"),
        schedule=_text(record, "schedule"),
        status=_text(record, "status"),
        tflops_kind=_text(record, "tflops_kind"),
        gpus=_needed(record, "num_gpus"),
        tp=_needed(record, "tp"),
        pp=_needed(record, "pp"),
        dp=_needed(record, "dp"),
        global_batch=_needed(record, "global_batch"),
        vpp=_count(record, "vpp"),
        cp=_count(record, "cp"),
        ep=_count(record, "ep"),
        expert_tp=_count(record, "etp"),
        micro_batch=_count(record, "micro_batch"),
        seq=_count(record, "seq"),
        sequence_parallel=_flag(record, "sp"),
        flash_attention=_flag(record, "flash_attn"),
        gpu_memory_gb=_number(record, "gpu_mem_gb"),
        iteration_s=_number(record, "iter_time_s"),
        tokens_per_s_per_gpu=_number(record, "tokens_per_s_per_gpu"),
        flops_per_gpu=None if tflops is None else tflops * TFLOPS,
        utilisation=None if mfu_percent is None else mfu_percent / 100,
        peak_memory_gib=_number(record, "peak_mem_gib"),
        derived=_text(record, "derived").lower() == "true",
        compiled=_flag(record, "compile"),
        further_tokens=_flag(record, "mtp"),
        lora_rank=_count(record, "lora_rank"),
        fp8_parameters=_flag(record, "fp8_params"),
        graphs=_text(record, "cuda_graphs"),
        overlapped={name: on for column, name in OVERLAPS.items() if (on := _flag(record, column)) is not None},
        flags=tuple(_text(record, "flags").split()),
        logged_by_first=bool(_text(record, "bench")),
        corrected=_text(record, CORRECTED),
    )


def _text(record: Mapping[str, str | None], name: str) -> str:
    return (record.get(name) or "").strip()


def _number(record: Mapping[str, str | None], name: str) -> float | None:
    text = _text(record, name)
    if not text or text.lower() == "nan":
        return None
    try:
        return float(text)
    except ValueError:
        raise NotComparableError(f"{name} {text!r} is not a number") from None


def _count(record: Mapping[str, str | None], name: str) -> int | None:
    number = _number(record, name)
    if number is None:
        return None
    if not number.is_integer() or number < 1:
        raise NotComparableError(f"{name} {number:g} is not a whole number above zero")
    return int(number)


def _needed(record: Mapping[str, str | None], name: str) -> int:
    found = _count(record, name)
    if found is None:
        raise NotComparableError(f"{name} is not published")
    return found


def _flag(record: Mapping[str, str | None], name: str) -> bool | None:
    number = _number(record, name)
    return None if number is None else number != 0
