"""A published run: its row, corrected where its source contradicts itself, and in our nouns: Model, Strategy,
Framework, Cluster, and the command that says the same.

``data/corrections/training_runs.toml`` lists such places as data. Each correction names a source, the rows
(by id, or by what other columns hold), the values as published and corrected, and its reason: arithmetic, or
where the source says so. A row that does not hold the published value is left as it is.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import lru_cache
from statistics import mode
from typing import get_args, get_type_hints

from stepcast.frameworks.catalog import Profile, load_profile, settle
from stepcast.hardware import Cluster, load_cluster
from stepcast.inputs.source import DATA, parse_toml
from stepcast.ir.framework import Dispatcher, Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model, spread_layers
from stepcast.ir.schedules import default_schedule
from stepcast.ir.strategy import PARAMETER_FORMATS, Recompute, RecomputeKind, RecomputeModule, Sharding, Strategy
from stepcast.ir.tables import TableError, convert_table
from stepcast.ir.types import DType, FactDict, Facts, dataclass, group_by_key, pick, require
from stepcast.models.catalog import load_model, model_of_columns, words_of
from stepcast.questions.runs import NoOptionError, predict_words
from stepcast.questions.settle import adapter_fields
from stepcast.units import TFLOPS
from stepcast.validate.scoreboard import load_table

Record = Mapping[str, str | None]
CORRECTED = "corrected"  # the column that lists what was changed, and why
LEFT_OUT = "left out"  # the status of a row that contradicts its source and cannot be put right


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
        require(bool(self.rows or self.when), "needs rows or when: which rows it is about")

    def applies_to(self, record: Record) -> bool:
        """Return True if the correction is about this row."""
        is_listed = not self.rows or record.get("id") in self.rows
        return (record.get("source") or "").startswith(self.source) and is_listed and all(
            any(_is_same(record.get(column), value) for value in values.split(" | "))
            for column, values in self.when.items()
        )  # fmt: skip


def correct_records(records: Iterable[Record], corrections: Sequence[RowCorrection]) -> Iterator[Record]:
    """Yield *records* with known mistakes put right, and listed in the column ``corrected``."""
    for record in records:
        notes: list[str] = []
        for correction in corrections:
            pairs = correction.change if correction.applies_to(record) else {}
            changes = {column: pair for column, pair in pairs.items() if _is_same(record.get(column), pair[0])}
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
            raise ValueError(f"a correction of {entry.get('source', '?')!r}: {error}{pairs}") from None
    return tuple(corrections)


def _is_same(held: str | None, stated: str) -> bool:
    """Return True if two values are the same text or number: 256 and 256.0 are."""
    held = (held or "").strip()
    try:
        return float(held) == float(stated)
    except ValueError:
        return held == stated


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
        raise ValueError(f"{name} {text!r} is not a number") from None


# Columns that a row needs to be compared at all.
NEEDED = ("id", "model", "gpu", "num_gpus", "framework", "tp", "pp", "dp", "global_batch")
# Column -> field of an Overlap.
OVERLAPS = {"tp_comm_overlap": "tensor", "overlap_grad_reduce": "gradients", "overlap_param_gather": "parameters"}
# Field of a PublishedRun -> column, where their names differ.
COLUMNS: Mapping[str, str] = load_table("rows/published")["columns"]


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """The columns that a prediction or its target is made from, each read by the type of its field."""

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
    mtp_layers: bool | None = None
    lora_rank: int | None = None
    fp8_parameters: bool | None = None
    graphs: str = ""  # how kernels are captured in graphs; blank where the row is silent
    # Communication that overlaps computation, by fields of an Overlap; a field that the row does not state is absent.
    overlapped: Mapping[str, bool] = field(default_factory=dict, hash=False)
    flags: tuple[str, ...] = ()
    logged_by_first: bool = False  # the peak of the rank that writes the log, the first, and not of the fullest
    corrected: str = ""

    @property
    def out_of_memory(self) -> bool:
        """Return True if the run ended for lack of memory."""
        return self.status.strip().lower() == "oom"


def read_run(record: Record) -> PublishedRun:
    """Return the run that one line of ``training_runs.csv`` describes."""
    missing = [name for name in NEEDED if _text(record, name).lower() in ("", "nan")]
    if missing:
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not published")
    if _text(record, "status") == LEFT_OUT:
        raise ValueError(f"{_text(record, 'id')} left out: {_text(record, CORRECTED).partition(': ')[2]}")
    values: FactDict = {}  # text, numbers, whole numbers above zero and switches; None where a cell is blank
    for name, kind in COLUMN_KINDS.items():
        column = COLUMNS.get(name, name)
        number = None if kind is str else _number(record, column)
        if kind is int and number is not None and (not number.is_integer() or number < 1):
            raise ValueError(f"{column} {number:g} is not a whole number above zero")
        values[name] = _text(record, column) if kind is str else None if number is None else kind(number)
    tflops, mfu_percent = _number(record, "tflops_per_gpu"), _number(record, "mfu_pct")
    return PublishedRun(
        **values,
        flops_per_gpu=None if tflops is None else tflops * TFLOPS,
        utilisation=None if mfu_percent is None else mfu_percent / 100,
        derived=_text(record, "derived").lower() == "true",
        overlapped={name: bool(on) for column, name in OVERLAPS.items() if (on := _number(record, column)) is not None},
        flags=tuple(_text(record, "flags").split()),
        logged_by_first=bool(_text(record, "bench")) or _text(record, "memory_of") == "first stage",
    )


# Fields that follow from columns of other names or units.
DERIVED = {"flops_per_gpu", "utilisation", "derived", "overlapped", "flags", "logged_by_first"}
# The fields that are columns, with their types, whether or not they may be blank.
FIELD_KINDS = {name: (get_args(kind) or (kind,))[0] for name, kind in get_type_hints(PublishedRun).items()}
COLUMN_KINDS: dict[str, type] = {name: kind for name, kind in FIELD_KINDS.items() if name not in DERIVED}


# The cluster a published run was measured on, from the words of its row.

WORDS = load_table("rows/published")
# Jobs on several NVL72 racks take 16 of their 18 trays, so that groups of 64 GPUs stay inside one (NVIDIA DGX Cloud
# recipes and MLPerf's scripts: Slurm segments of 16 nodes).
TRAYS_PER_RACK, RACK_GPUS = 16, 72


def cluster_words(run: PublishedRun) -> tuple[str, tuple[str, ...]]:
    """Return name and changes, as ``load_cluster`` and the command line take them."""
    word = run.gpu.lower()
    usual = next((cluster for part, cluster in WORDS["clusters"] if part in word), None)
    if usual is None:
        raise ValueError(f"GPU {run.gpu!r} is not known")
    name, *changes = usual.split()
    if "efa" in run.network.lower():
        name = str(WORDS["efa"].get(name, name))
    memory = f" {run.gpu_memory_gb:.0f}gb" if run.gpu_memory_gb else ""
    changes += (change for matches in _find_patterns(word + memory, "gpus") for change in matches)
    if name.endswith("nvl72") and run.gpus > RACK_GPUS:
        changes.append(f"network.scale_up_nodes={TRAYS_PER_RACK}")
    changes += next(_find_patterns(run.network, "networks"), ())
    return name, tuple(changes)


def _find_patterns(text: str, table: str) -> Iterator[list[str]]:
    """Yield the changes of each pattern of *table* that *text* contains."""
    for pattern, changes in WORDS[table]:
        if match := re.search(pattern, text, re.IGNORECASE):
            yield [match.expand(change) for change in changes]


# The profile that a published run's framework has, from the words of its row: data/rows/frameworks.toml.

RELEASE = re.compile(r"(\d\d\.\d\d)[. ].*NeMo Container")


def _fits(entry: Facts, record: Record) -> bool:
    released = RELEASE.match(_text(record, "table"))
    return (
        _text(record, "framework").lower().startswith(entry["framework"])
        and ("release" not in entry or (released is not None and released[1] >= entry["release"]))
        and all(word in _text(record, name).lower() for name, word in entry.get("words", {}).items())
        and ("says" not in entry or bool(_text(record, entry["says"])))
    )


# How a published run was spread: what its row says, else what its framework does unless told otherwise.

# How kernels are issued, by what the column of graphs says; whatever else it says are graphs.
ISSUED = {"none": Execution.EAGER, "blocking": Execution.BLOCKING}
MODULES = {word: RecomputeModule(module) for word, module in WORDS["modules"].items()}
BLOCK = re.compile(r"full block (\d+) layers")
DEFERRED, BUCKET = "wgrad_deferral_limit=", "bucket_size="
WITHIN = re.compile(r"within (\d+)")
GRADIENTS = {"/PURE": DType.BF16, "fp32 grad": DType.FP32}
# Where a micro-batch is not published and no pipeline asks for small ones: as many sequences as this holds.
USUAL_TOKENS = 16384
LORA_RANK = 16  # Megatron-Bridge's LoRA recipes


def build_strategy(run: PublishedRun, profile: Profile, model: Model, gpu: str) -> tuple[Strategy, Framework]:
    """Return the strategy and framework of *run*; the profile's defaults fill what the row leaves open."""
    layout = _layout(run)
    layout = replace(layout, vpp=_chunks(run, model, *profile.chunks(model, gpu, layout)))
    seq, micro_batch = run.seq or profile.defaults.seq, run.micro_batch or 1
    if run.micro_batch is None and run.pp == 1:
        share, fits = max(1, run.global_batch // run.dp), max(1, USUAL_TOKENS * (run.cp or 1) // seq)
        micro_batch = max(size for size in range(1, min(share, fits) + 1) if share % size == 0)
    settled = settle(profile, model, gpu, layout, _list_stated(run))
    choices = {**settled.choices, **adapter_fields(settled.choices.get("lora_rank") or 0, settled.framework)}
    pieces = layout.pp * layout.vpp
    if ends := _ends(run, model.layers, pieces):
        choices["stage_layers"] = ends
    elif not choices.get("stage_layers") and model.layers % pieces:
        choices["stage_layers"] = spread_layers(model.layers, pieces)
    if "a2a overlap" in run.schedule.lower():
        choices["overlap"] = replace(choices["overlap"], experts=True)
    choices["overlap"] = replace(choices["overlap"], **run.overlapped)
    if layout.vpp > 1:
        choices["schedule"] = default_schedule(layout.vpp)
    # Composer's last micro-batch may be smaller; the time is scaled for it.
    per_round = micro_batch * layout.dp
    batch = max(1, round(run.global_batch / per_round)) * per_round
    return replace(settled, choices=choices).strategy(layout, micro_batch, batch, seq), settled.framework


def _list_stated(run: PublishedRun) -> FactDict:
    """Return the choices that the row itself states, by fields of a Strategy or a Framework."""
    stated: FactDict = {
        "precision": (word := _find_word(run.precision, "precision")) and DType(word),
        "sharding": (word := _find_word(run.sharding, "sharding")) and Sharding(word),
        "recompute": read_recompute(run.recompute),
        "sequence_parallel": run.sequence_parallel,
        "flash_attention": run.flash_attention,
        "kernels": Kernels.PLAIN if run.compiled is False else None,
        "dispatcher": next((kind for kind in Dispatcher if kind in run.framework.lower()), None),
        # Composer's PURE reduces in the training precision.
        "gradient_dtype": next((kind for word, kind in GRADIENTS.items() if word in run.sharding), None),
        "mtp_layers": 0 if run.mtp_layers is False else None,
        # FSDP frees gathered weights between forward and backward, or keeps them.
        "reshard": False if "no reshard" in run.sharding else None,
    }
    if run.lora_rank or "lora" in run.table.lower():
        stated["lora_rank"] = run.lora_rank or LORA_RANK
        bench = WORDS["benches"].get(run.table, {})
        stated |= {name: tuple(value) if isinstance(value, list) else value for name, value in bench.items()}
    # NeMo keeps the frozen weights quantised, whatever is gathered of trained ones.
    quantised = run.lora_rank if "lora_rank" in stated else run.fp8_parameters
    if quantised and stated.get("precision") in PARAMETER_FORMATS:
        stated["fp8_parameters"] = True
    stated |= {field: True for flag, field in WORDS["flags"].items() if flag in run.flags}
    if "defer_embedding_wgrad_compute" in run.flags:
        stated["deferred_gradients"] = _read_count(run, DEFERRED)
    if parameters := _read_count(run, BUCKET):
        stated["bucket_bytes"] = parameters * int(DType.BF16.bytes)
    if run.graphs:
        stated["execution"] = ISSUED.get(run.graphs, Execution.GRAPHS)
    return {name: value for name, value in stated.items() if value is not None}


def _read_count(run: PublishedRun, name: str) -> int:
    """Return the number that a flag states; 0 where there is none."""
    return next((int(flag.removeprefix(name)) for flag in run.flags if flag.startswith(name)), 0)


def _ends(run: PublishedRun, layers: int, pieces: int) -> tuple[int, ...]:
    """Return the layers of stages with one less at the embedding or the loss (Megatron-Core: account_for_embedding)."""
    first, last = (int(f"asym_pp_{end}" in run.flags) for end in ("embed", "loss"))
    share, rest = divmod(layers + first + last, pieces)
    if pieces == 1 or rest or not (first or last):
        return ()
    return (share - first, *(share,) * (pieces - 2), share - last)


def _layout(run: PublishedRun) -> Layout:
    within = WITHIN.search(run.sharding)
    layout = Layout(
        **pick(run, "tp dp pp"),
        cp=run.cp or 1,
        ep=run.ep or 1,
        # Recipes of mixtures do not split single experts unless they say so.
        expert_tp=run.expert_tp or (1 if run.ep and run.ep > 1 else 0),
        shard=min(int(within[1]), run.dp) if within else 0,
    )
    if layout.gpus != run.gpus:
        # Some tables count context parallel ranks among dp.
        dp, rest = divmod(run.gpus, layout.tp * layout.cp * layout.pp)
        require(not rest and dp > 0, "tp x cp x pp x dp does not make the number of GPUs")
        layout = replace(layout, dp=dp)
    return layout


def _chunks(run: PublishedRun, model: Model, usual: int, recipe: bool) -> int:
    if run.pp == 1:
        return 1
    if run.vpp is not None:
        # The embedding and the loss may each have a piece to themselves; each of the others holds a layer.
        return run.vpp if run.pp * run.vpp <= model.layers + 2 else model.layers // run.pp
    if recipe:
        return usual
    if "interleaved" not in run.schedule.lower() or not usual:
        return 1
    # A prime number of layers can only be cut into chunks of one.
    layers = model.layers // run.pp
    return usual if layers % usual == 0 else layers


def read_recompute(text: str) -> Recompute | None:
    """Return the recomputation that a row states, None where it is blank."""
    word = text.lower()
    if not word:
        return None
    if word.startswith("none"):
        return Recompute()
    if match := BLOCK.match(word):
        return Recompute(RecomputeKind.BLOCK, layers=int(match[1]))
    if word.startswith("full"):
        return Recompute(RecomputeKind.FULL)
    if word == "selective" or word.endswith("ac"):  # torchtitan's, operator by operator
        return Recompute(RecomputeKind.SELECTIVE)
    named = re.findall(r"\w+", word.removeprefix("selective").removeprefix(" modules"))
    if not named or any(name not in MODULES for name in named):
        raise ValueError(f"recompute {text!r} is not known")
    return Recompute(RecomputeKind.SELECTIVE, modules=tuple(MODULES[name] for name in named))


def _find_word(text: str, column: str) -> str | None:
    """Return the meaning of the first word of the table that *text* contains."""
    meaning = next((meaning for word, meaning in WORDS[f"{column}s"] if word in text.lower()), None)
    if meaning is None and text and not (column == "sharding" and "optimizer" in text.lower()):
        raise ValueError(f"{'zero_fsdp' if column == 'sharding' else column} {text!r} is not known")
    return meaning


@dataclass(frozen=True, slots=True)
class Setup:
    """A published run in our nouns."""

    run: PublishedRun
    model: Model
    cluster: Cluster
    strategy: Strategy
    framework: Framework
    profile: Profile
    # What the row says of its model's sizes, by column.
    sizes: Mapping[str, str | None] = field(default_factory=dict, hash=False)

    @property
    def command(self) -> str:
        """Return the command of the same prediction, or why there is none."""
        name, changes = cluster_words(self.run)
        machine = ["--cluster", name, *(word for change in changes for word in ("--set", change))]
        try:
            word, model = self._find_model()
            options = predict_words(self.profile, model, self.cluster.gpu, self.strategy, self.framework)
        except NoOptionError as error:
            return f"cannot be expressed: {error}"
        scaled = self.strategy.global_batch != self.run.global_batch
        note = f"  # times {self.run.global_batch}/{self.strategy.global_batch}" if scaled else ""
        return shlex.join(["stepcast", "predict", "--model", word, *machine, *options]) + note

    def _find_model(self) -> tuple[str, Model]:
        """Return the row's model by its name, or by name and sizes, as ``load_model`` takes it."""
        needed = str(max(self.strategy.seq, self.model.max_seq))  # unless the row says
        sized = words_of(self.run.model, {**self.sizes, "seq": self.sizes.get("seq") or needed})
        for word in (self.run.model, sized):
            with suppress(ValueError):
                model = load_model(word)
                if replace(model, name=self.model.name) == self.model:
                    return word, model
        raise NoOptionError(f"{sized} is another model")


def complete_heads(records: Sequence[Record]) -> Iterator[Record]:
    """Yield *records* with blank heads filled as in most runs of the same source and hidden size."""
    return complete_blanks(records, "heads", "source", "hidden")


def complete_blanks(records: Sequence[Record], column: str, *keys: str) -> Iterator[Record]:
    """Yield *records*; a blank *column* takes the most frequent value of the records with the same *keys*.

    Records whose last key is blank stay as they are.
    """
    stated = ((tuple(map(record.get, keys)), record.get(column)) for record in records)
    known = group_by_key((key, value) for key, value in stated if value)
    for record in records:
        usual = known.get(tuple(map(record.get, keys)))
        blank = not record.get(column) and record.get(keys[-1]) and usual
        yield {**record, column: mode(usual)} if blank and usual else record


def read_setup(record: Record) -> Setup:
    """Return the model, cluster and strategy of one row; a ValueError where it states too little."""
    run = read_run(record)
    model = model_of_columns(run.model, record)
    cluster, entries = load_cluster(*cluster_words(run)), load_table("rows/frameworks")["row"]
    profile = load_profile(next(entry["profile"] for entry in entries if _fits(entry, record)))
    strategy, framework = build_strategy(run, profile, model, cluster.gpu.name)
    if strategy.seq > model.max_seq:
        model = model.with_max_seq(strategy.seq)
    return Setup(run, model, cluster, strategy, framework, profile, record)
