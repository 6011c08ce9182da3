"""The question of ``stepcast search``, the search that it means, and its answer in the words of the JSON contract:
ranked rows, why they rank so, and what would change it.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Annotated, Any

import numpy as np

from stepcast.forecast.predict import predict
from stepcast.frameworks.catalog import Profile, fit_precision, load_profile, missing_features
from stepcast.frameworks.catalog import settle as settle_profile
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import suggest_larger
from stepcast.inputs.source import prefix_errors
from stepcast.ir.arrays import distinct_rows
from stepcast.ir.children import usable_workers
from stepcast.ir.framework import Framework, parse_optimizer
from stepcast.ir.layout import Layout
from stepcast.ir.legality import find_recomputable
from stepcast.ir.limits import SEQUENCES
from stepcast.ir.model import Model
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import BaseWeights, ContextKind, Recompute, Strategy, offload_of, offload_word
from stepcast.ir.types import DType, FactDict, Facts, dataclass, pick, require
from stepcast.models.catalog import load_model
from stepcast.questions import choices as readers
from stepcast.questions import settle as settling
from stepcast.questions.changes import RECOMPUTES, SHARDINGS, explain_choices
from stepcast.questions.choices import Choice, Question, build_question, choices_of, option_of, plain_word
from stepcast.questions.question import CHOICES, PRECISIONS, PredictQuestion, check_rules
from stepcast.questions.runs import choice_of_field, predict_choices, predict_words, strategy_facts, training_facts
from stepcast.questions.settle import adapter_fields, default_framework, name_cluster, settle_price
from stepcast.searching import mixed
from stepcast.searching import result as results
from stepcast.searching import space as spaces
from stepcast.searching.best import MEMORY_RESERVE, guess_candidate, search_parts, usable_memory_bytes
from stepcast.searching.result import SearchCounts, SearchResult, SearchWatch, SimulatedCandidate
from stepcast.searching.search import Refinement, measure_sensitivity, refine_best
from stepcast.searching.space import CandidateSpace, SpacePart, split_by_software
from stepcast.units import DEFAULT_CURRENCY, MIB, parse_count, parse_duration_s, parse_size_bytes

OBJECTIVES = ("step", "robust", "throughput", "cost", "memory", "energy")
OVERLAPPING = ("usual", "none", "tensor", "experts")
MOST_GPU_COUNTS, MOST_ROWS, MOST_WORKERS = 64, 1000, 1024
FIXED = ("tp", "cp", "ep", "pp", "vpp", "micro_batch", "schedule", "recompute", "sharding", "precision")
Counts = tuple[int, ...] | None
Words = tuple[str, ...] | None
MOST_VARIANTS = 5  # of a row, with the same degrees of parallelism
# If nothing fits, these multiples of the GPUs are tried.
MORE_GPUS = (2, 4, 8, 16)
AxisValues = tuple[Any, ...]  # enums, numbers or words, as a choice has them
Meaning = Callable[..., object]
Reader = Callable[[str], object]


def read_gpu_counts(text: str) -> tuple[int, ...]:
    """Read ``64``, ``64,96``, or ``64..512``, which doubles from 64 to 512."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted({readers.gpu_count(number) for number in text.split(",")}))
    low, high = readers.gpu_count(first), readers.gpu_count(last)
    if high < low:
        raise readers.ValueSpellingError(f"{text!r} ends before it begins; use {high}..{low}")
    return tuple(low * 2**power for power in range(MOST_GPU_COUNTS) if low * 2**power <= high)


def _axis(
    name: str, read: Reader | None = None, values: Sequence[str] | None = None, means: Meaning | None = None
) -> Choice:
    """Return the choice of the values that a search may try of the choice *name* of a prediction, read as there."""
    single = CHOICES[name]
    read_one, known = read or single.read, single.values if values is None else tuple(values)

    def read_several(text: str) -> tuple[object, ...]:
        words = tuple(dict.fromkeys(read_one(word) for word in text.split(",")))
        for word in words if known else ():
            readers.check_known(str(word), known)
        return words

    metavar = "A,..." if known or name == "recompute" else "N,..."
    about: FactDict = {"metavar": metavar, "listed": known, "read": read_several, "means": means or single.means}
    return Choice(sets="axis", **about, **pick(single, "aliases flags"))


def _read_recompute(text: str) -> str:
    word = readers.read_recompute(text.replace("+", ","))
    readers.check_known(word.partition(":")[0], RECOMPUTES)
    return word


def _switch(name: str) -> Choice:
    return _axis(name, readers.read_word({"yes": "true", "no": "false"}), ("yes", "no"), lambda word: word == "yes")


class SearchQuestion(Question, frozen=True, kw_only=True):
    """A question about the best strategies; None leaves a choice open to be searched."""

    # fmt: off
    model: Annotated[Model | str | None, CHOICES["model"]] = None
    cluster: Annotated[Cluster | str | None, CHOICES["cluster"]] = None
    gpu: Annotated[str | None, CHOICES["gpu"]] = None
    set: Annotated[tuple[str, ...], CHOICES["set"]] = ()
    gpus: Annotated[tuple[int, ...] | None, Choice(read=read_gpu_counts)] = None
    global_batch: Annotated[int | None, Choice(read=CHOICES["global_batch"].read)] = None
    tokens_per_batch: Annotated[float | None, Choice(read=readers.positive(parse_count))] = None
    seq: Annotated[int | None, Choice(read=CHOICES["seq"].read)] = None
    framework: Annotated[str | None, Choice(several=True)] = None
    any_framework: bool = False
    lora: Annotated[str | None, CHOICES["lora"]] = None
    base_weights: Annotated[Words, _axis("base_weights", plain_word, tuple(map(str, BaseWeights)))] = None
    tp: Annotated[Counts, _axis("tp")] = None
    cp: Annotated[Counts, _axis("cp")] = None
    ep: Annotated[Counts, _axis("ep")] = None
    expert_tp: Annotated[Counts, _axis("expert_tp")] = None
    pp: Annotated[Counts, _axis("pp")] = None
    vpp: Annotated[Counts, _axis("vpp")] = None
    micro_batch: Annotated[Counts, _axis("micro_batch", readers.count(1, SEQUENCES.most))] = None
    schedule: Annotated[Words, _axis("schedule")] = None
    recompute: Annotated[Words, _axis("recompute", _read_recompute)] = None
    sharding: Annotated[Words, _axis("sharding", values=SHARDINGS)] = None
    sequence_parallel: Annotated[Words, _switch("sequence_parallel")] = None
    precision: Annotated[Words, _axis("precision", values=PRECISIONS, means=DType)] = None
    dispatcher: Annotated[Words, _axis("dispatcher")] = None
    cp_comm: Annotated[Words, _axis("cp_comm", values=tuple(map(str, ContextKind)), means=ContextKind)] = None
    gradients: Annotated[Words, _axis("gradients")] = None
    optimizer: Annotated[Words, _axis("optimizer", plain_word)] = None
    offload: Annotated[Words, _axis("offload", means=lambda word: offload_of(word.replace("+", ",")))] = None
    fp8_params: Annotated[Words, _switch("fp8_params")] = None
    mtp_layers: Annotated[Counts, _axis("mtp_layers")] = None
    overlap: Annotated[Words, _axis("overlap", plain_word, OVERLAPPING, str)] = None
    fix: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    objective: Annotated[str, Choice(values=OBJECTIVES)] = "step"
    max_memory: Annotated[float | None, Choice(read=readers.number_reader("a size, such as 70GiB",
        lambda size: size >= MIB, parse_size_bytes))] = None
    memory_reserve: Annotated[float | None, Choice(read=readers.share)] = None
    top: Annotated[int, Choice(read=readers.count(1, MOST_ROWS))] = 10
    tokens: Annotated[float | None, CHOICES["tokens"]] = None
    price: Annotated[float | str | None, CHOICES["price"]] = None
    currency: Annotated[str, CHOICES["currency"]] = DEFAULT_CURRENCY
    time: Annotated[float | None, Choice(read=readers.positive(parse_duration_s))] = None
    explain: bool = False
    workers: Annotated[int | None, Choice(read=readers.count(1, MOST_WORKERS))] = None
    # fmt: on

    @property
    def axes(self) -> dict[str, AxisValues]:
        """Return the values that each restricted choice may take, with those of ``--fix`` and ``--allow``."""
        words = {name: getattr(self, name) for name in AXES if getattr(self, name) is not None}
        entries = [*(("--fix", entry) for entry in self.fix), *(("--allow", entry) for entry in self.allow)]
        for option, entry in entries:  # tp=8 or tp=4,8
            word, equals, values = entry.partition("=")
            name = word.replace("-", "_")
            if name not in AXES or not equals:
                known = ", ".join(axis.replace("_", "-") for axis in AXES)
                raise ValueError(f"{option} {entry!r}: expected a value of {known}, such as tp=8")
            require(option != "--fix" or "," not in values, f"--fix {entry!r}: several values; use --allow {entry}")
            with prefix_errors(f"{option} {entry!r}", kinds=(readers.ValueSpellingError,)):
                read = AXES[name].read(values)
            require(name not in words, f"{option} {entry!r}: {name.replace('_', '-')} is given twice")
            words[name] = read
        return {name: tuple(map(AXES[name].means, values)) for name, values in words.items()}


AXES = {name: choice for name, choice in choices_of(SearchQuestion).items() if choice.sets == "axis"}


# Layouts that experts try first: one sequence at a time, the usual schedules, everything else as the software has it.
USUAL: Mapping[str, AxisValues] = {
    "cp": (1,),
    "expert_tp": (1,),
    "vpp": (1, 2, 4),
    "micro_batch": (1,),
    "schedule": (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED),
    "sequence_parallel": (True,),
}
# Keys of [supports] in profiles.
SUPPORTED = {"schedule": "schedules", "recompute": "recompute", "dispatcher": "dispatchers", "cp_comm": "contexts"}
# Choices that are settled with the software.
SOFTWARE = ("dispatcher", "cp_comm", "gradients", "optimizer", "offload", "fp8_params", "mtp_layers", "base_weights")
SETTLED_ELSEWHERE = ("precision", "sharding", "sequence_parallel", "recompute")
FEW_COUNTS = 4  # numbers of GPUs that a message lists one by one
# What decides whether software has all that a candidate uses, and how far degrees matter for that.
DEGREES = ("tp", "cp", "ep", "pp", "vpp")
CHOSEN = ("schedule", "recompute", "sharding", "overlap")
Watching = Callable[[], "AbstractContextManager[SearchWatch | None]"]


@dataclass(frozen=True, slots=True)
class SettledSearch:
    """The search that a question means; *assumptions* are the defaults that were used."""

    question: SearchQuestion
    model: Model
    cluster: Cluster
    profile: Profile
    gpus: tuple[int, ...]
    global_batch: int
    seq: int
    axes: Mapping[str, AxisValues]
    max_bytes: float | None
    reserve: float | None = None  # share of a GPU's memory that stays free
    assumptions: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> float:
        """The memory of a GPU that a candidate may use."""
        return usable_memory_bytes(self.cluster.gpu.memory_bytes, self.max_bytes, self.reserve)

    @property
    def is_mixed(self) -> bool:
        """True if the search needs both kinds of GPUs of a cluster that has two."""
        first = self.cluster.gpus
        return self.cluster.other is not None and first is not None and max(self.gpus) > first

    @property
    def joined_cluster(self) -> Cluster:
        """The cluster on which rows are predicted: with both of its kinds if the search needs them."""
        return mixed.join_gpu_kinds(self.cluster) if self.is_mixed else self.cluster

    def answer(
        self, top: int | None = None, watching: Watching = nullcontext, most_s: float = math.inf
    ) -> SearchResult:
        """Return the best *top*, or as many as the question asks for, after at most *most_s* seconds.

        *watching* opens the function that is called with the progress. Without *top* the best are refined by
        uneven splits of their layers.
        """
        began, question = time.monotonic(), self.question
        with watching() as watch:
            most_s = min(most_s, question.time or math.inf)
            first = self._guess(watch, most_s) if watch is not None and top is None and not self.is_mixed else None
            asked = (self._split(self._space()), self.cluster, top or question.top, question.objective)
            left_s = max(0.0, most_s - (time.monotonic() - began))
            if self.is_mixed:
                return mixed.search_mixed(*asked, self.max_bytes, watch, left_s, self.reserve)
            where = self.capacity_bytes, watch, question.workers or usable_workers()
            if top is not None:
                return search_parts(*asked, *where, looks_around=False, most_s=left_s, by_family=False, first=first)
            improve = Refinement(self.model, self.cluster, question.objective, self.capacity_bytes).improve
            result = search_parts(*asked, *where, most_s=left_s, by_family=True, first=first, improve=improve)
        return refine_best(result, self.model, self.cluster, question.objective, self.capacity_bytes)

    def _guess(self, watch: SearchWatch, most_s: float) -> SimulatedCandidate | None:
        """Return the layout that experts would try first, and report it: all candidates take longer to list."""
        usual = {**USUAL, "sharding": (self.profile.defaults.sharding,)}
        narrow: dict[str, AxisValues] = {}
        for name, values in usual.items():
            narrow[name] = tuple(value for value in self.axes.get(name, values) if value in values) or self.axes[name]
        few = replace(self, axes={**self.axes, **narrow}, gpus=self.gpus[-1:])
        try:
            parts = few._split(few._space())
        except ValueError:  # the search itself says why there are none
            return None
        return guess_candidate(parts, self.cluster, self.question.objective, self.capacity_bytes, watch, most_s)

    def facts(self, candidate: SimulatedCandidate) -> FactDict:
        """Return the choices of a candidate, including framework settings if the search varies them."""
        strategy, framework, layout = candidate.strategy, candidate.framework, candidate.strategy.layout
        used = {
            "dispatcher": str(framework.dispatcher) if layout.ep > 1 else "",
            "cp_comm": str(strategy.context) if layout.cp > 1 else "",
            "gradients": str(framework.gradient_dtype),
            "optimizer": choice_of_field("optimizer", framework.optimizer)[1],
            "offload": offload_word(strategy.offload),
            "fp8_params": strategy.fp8_parameters,
            "mtp_layers": strategy.mtp_layers,
            "base_weights": str(strategy.base_weights),
        }
        several = {name for name, values in self.axes.items() if len(values) > 1}
        return {**strategy_facts(strategy), **{name: value for name, value in used.items() if name in several}}

    def predict(self, candidate: SimulatedCandidate) -> StepReport:
        """Return the report of a candidate's step."""
        values = candidate.strategy, candidate.framework, candidate.options
        return mixed.rate_by_mean_peak(predict(self.model, self.joined_cluster, *values).report, candidate)

    def command(self, candidate: SimulatedCandidate) -> str:
        """Return the command that predicts a candidate; with two kinds of GPUs, the one that searches it alone."""
        question = self.question
        place = ["--model", str(question.model), "--cluster", str(question.cluster)]
        place += [word for entry in question.set for word in ("--set", entry)]
        if not candidate.kinds:
            words = predict_words(self.profile, self.model, self.cluster.gpu, candidate.strategy, candidate.framework)
            if str(candidate.options.place) != "even":
                words += ["--place", str(candidate.options.place)]
            return shlex.join(["stepcast", "predict", *place, *words])
        facts = strategy_facts(candidate.strategy)
        words = ["--framework", self.profile.name, "--gpus", str(candidate.gpus), "--seq", str(self.seq)]
        words += ["--global-batch", str(self.global_batch), "--top", "1"]
        for name in FIXED:
            words += ["--fix", f"{name.replace('_', '-')}={facts[name]}"]
        if facts["tp"] > 1:
            words += ["--fix", f"sequence-parallel={'yes' if facts['sequence_parallel'] else 'no'}"]
        return shlex.join(["stepcast", "search", *place, *words])

    def _space(self) -> CandidateSpace:
        """Return the candidates; raise a ValueError if there are none."""
        precision = self.profile.defaults.precision
        recomputes = spaces.useful_recomputes(self.model, self._settle(Layout(), precision, "none", {})[0])
        usual: dict[str, AxisValues] = {"precision": (precision,), "recompute": recomputes}
        named = {name: values for name, values in self.axes.items() if name not in SOFTWARE}
        axes = spaces.SearchAxes(gpus=self.gpus, **(usual | named))
        space = spaces.build_space(self.model, axes, self.global_batch, self.seq, self.joined_cluster.domain_gpus)
        if not len(space):
            counts = [f"{number:,}" for number in self.gpus]
            text = " or ".join(counts) if len(counts) <= FEW_COUNTS else f"{counts[0]} to {counts[-1]}"
            raise ValueError(f"no candidates: tp x cp x pp divides {text} GPUs for none of the values allowed")
        return space if self.question.any_framework else select_supported(space, self.profile)

    def _split(self, space: CandidateSpace) -> list[SpacePart]:
        """Return the candidates by their software: as the profile settles it, with each dispatcher and exchange."""
        parts, may = [], {"dispatcher": space.columns["ep"] > 1, "cp_comm": space.columns["cp"] > 1}
        axes = {name: self.axes[name] for name in SOFTWARE if name in self.axes}
        for number, values in enumerate(product(*axes.values())):
            chosen = dict(zip(axes, values, strict=True))
            rows = np.arange(len(space))
            for name in may.keys() & axes.keys():
                # Without ranks that exchange tokens or context, all values are one candidate.
                if chosen[name] != axes[name][0]:
                    rows = rows[may[name][rows]]
            for has_context in (False, True):
                own = rows[may["cp_comm"][rows] == has_context]
                stated = {name: value for name, value in chosen.items() if has_context or name != "cp_comm"}
                settle = partial(self._settle, chosen=stated)
                for part in split_by_software(space.only(own), settle) if len(own) else ():
                    parts.append(replace(part, rows=number * len(space) + own[part.rows]))
        return parts

    def _settle(self, layout: Layout, precision: DType, sharding: str, chosen: Facts) -> tuple[Framework, FactDict]:
        adapters = readers.split_lora(self.question.lora) if self.question.lora else {}
        given: FactDict = {"precision": precision, "sharding": sharding}
        given |= {CHOICES[name].sets: CHOICES[name].means(value) for name, value in adapters.items() if value}
        settle = partial(settle_profile, self.profile, self.model, self.cluster.gpu.name, layout)
        for name, value in chosen.items():
            if name == "optimizer":
                usual = settle(given).framework.optimizer
                named = parse_optimizer(value, usual.master_weights, usual.clips)
                given["optimizer"] = replace(named, fused=usual.fused)
            elif name != "dispatcher" or layout.ep > 1:
                given[CHOICES[name].sets] = value
        settled = settle(given)
        choices = {**settled.choices, **adapter_fields(given.get("lora_rank", 0), settled.framework)}
        return settled.framework, {name: value for name, value in choices.items() if name not in SETTLED_ELSEWHERE}


def select_supported(space: CandidateSpace, profile: Profile) -> CandidateSpace:
    """Return the candidates that the software of *profile* can run; raise a ValueError if there are none."""
    if not profile.supports:
        return space
    several = [*(np.minimum(space.columns[name], 2) for name in DEGREES), np.clip(space.dp, 1, 2)]
    first, member = distinct_rows([*several, *(space.columns[name] for name in CHOSEN)])
    reasons: list[list[str]] = []  # what the software lacks for candidates like that of each row
    for row in first.tolist():
        values = space.values(row)
        layout = Layout(**{name: int(degree[row]) for name, degree in zip((*DEGREES, "dp"), several, strict=True)})
        chosen: FactDict = {name: value for name, value in values.items() if name in CHOSEN}
        chosen["overlap"] = replace(profile.defaults.overlap, **spaces.OVERLAPS[values["overlap"]])
        strategy = Strategy(layout, 1, 2 * layout.dp, space.seq, context=profile.defaults.context, **chosen)
        reasons.append(missing_features(profile, strategy, profile.framework))
    rows = np.flatnonzero(np.array([not reason for reason in reasons])[member])
    if not len(rows):
        raise ValueError(f"no candidates: {min(reasons, key=len)[0]}; --any-framework searches them anyway")
    return space.only(rows)


def settle_search(question: SearchQuestion) -> SettledSearch:
    """Return the search that *question* means; the framework and the model fill what it leaves open."""
    readers.refuse_several(question)
    check_rules("search", question.given, {"tokens": question.tokens, "price": question.price})
    place = name_cluster(PredictQuestion(model=question.model, cluster=question.cluster, gpu=question.gpu))
    assert question.model is not None
    model = load_model(question.model)
    cluster = load_cluster(place, question.set) if isinstance(place, str) else place
    assumptions = list(model.unread)
    profile = load_profile(question.framework or default_framework(question.lora))
    question = settle_price(question, cluster, assumptions)
    seq, gpus = question.seq, question.gpus
    if seq is None:
        seq = min(model.max_seq, profile.defaults.seq)
        assumptions.append(f"sequences of {seq} tokens (--seq)")
    if gpus is None and question.gpu is not None:
        gpus = (1,)
        assumptions.append(f"a single GPU, as --gpu names one; {cluster.name} has {cluster.gpus} (--gpus)")
    elif gpus is None:
        if cluster.gpus is None:
            raise ValueError("number of GPUs missing: use --gpus, such as --gpus 64 or --gpus 8..64")
        gpus = (mixed.join_gpu_kinds(cluster).gpus or cluster.gpus,)
        assumptions.append(f"all {gpus[0]} GPUs of {cluster.name} (--gpus)")
    global_batch, axes = _settle_global_batch(question, seq), question.axes
    settling.note_batch(global_batch, seq, assumptions)
    if "base_weights" in axes and not question.lora:
        raise ValueError("--base-weights are frozen: train adapters on them, such as --lora 16")
    modules = find_recomputable(model)
    if any(set(value.modules) - modules for value in axes.get("recompute", ())):
        listed = ", ".join(sorted(modules)) or "none"
        raise ValueError(f"--recompute: {model.name} lacks one of these modules; choose from {listed}")
    if question.any_framework and not profile.supports:
        raise ValueError(f"--any-framework has no effect: {profile.name} does not list what it can run")
    if not question.any_framework:
        axes = {name: _supported_values(name, values, profile, assumptions) for name, values in axes.items()}
        if profile.supports and not {"schedule", "sharding"} <= axes.keys():
            assumptions.append(f"schedules, shardings and overlaps that {profile.name} has (--any-framework)")
    if "precision" not in axes:
        profile = fit_precision(profile, cluster.gpu, assumptions)
    if question.max_memory is None and question.memory_reserve is None:
        assumptions.append(f"a reserve of {MEMORY_RESERVE * 100:g} % of each GPU's memory (--memory-reserve)")
    values = model, cluster, profile, gpus, global_batch, seq, axes, question.max_memory, question.memory_reserve
    settled = SettledSearch(question.change({"cluster": place}), *values, tuple(assumptions))
    most, wanted = mixed.join_gpu_kinds(cluster).gpus, max(gpus)
    if most is not None and wanted > most:
        raise ValueError(f"--gpus {wanted:,}: cluster {cluster.name} has {most:,} GPUs{suggest_larger(cluster)}")
    if settled.is_mixed and gpus != (most,):
        raise ValueError(
            f"--gpus {wanted:,}: cluster {cluster.name} has two kinds of GPUs; use all {most:,}, or at most the "
            f"{cluster.gpus:,} of the first kind"
        )
    return settled


def _supported_values(name: str, values: AxisValues, profile: Profile, assumptions: list[str]) -> AxisValues:
    """Return those of the *values* of a choice that the software has; raise a ValueError if it has none of them."""
    known = profile.supports.get(SUPPORTED.get(name, ""))
    if known is None:
        return values
    words = [{value.kind, *value.modules} if isinstance(value, Recompute) else {value} for value in values]
    missing = [", ".join(sorted(named - {*known})) for named in words]
    lacking = [f"{name.replace('_', '-')} {listed}" for listed in missing if listed]
    if len(lacking) == len(values):
        has = f"it has {', '.join(known)}" if known else "nor any other"
        raise ValueError(
            f"no candidates: {profile.name} has no {lacking[0]} ({has}); --any-framework searches it anyway"
        )
    if lacking:
        assumptions.append(f"without {' and '.join(lacking)}, which {profile.name} does not have (--any-framework)")
    return tuple(value for value, listed in zip(values, missing, strict=True) if not listed)


def _settle_global_batch(question: SearchQuestion, seq: int) -> int:
    """Return the sequences of a step."""
    batch, tokens = question.global_batch, question.tokens_per_batch
    require(None in (batch, tokens), "--global-batch and --tokens-per-batch state the same; leave one of them out")
    if batch is not None:
        return batch
    if tokens is None:
        raise ValueError(
            f"batch size missing: use --global-batch, in sequences, or --tokens-per-batch, such as {1024 * seq}"
        )
    sequences, rest = divmod(int(tokens), seq)
    if rest or not sequences:
        near = dict.fromkeys((2 ** max(0, round(math.log2(tokens / seq))), max(1, round(tokens / seq))))
        instead = " and ".join(f"{count * seq} is {count:,}" for count in near)
        given = f"--tokens-per-batch {int(tokens):,} is not a whole number of sequences"
        raise ValueError(f"{given} of {seq:,} tokens; {instead}")
    return sequences


def search_facts(asked: SettledSearch, result: SearchResult, watching: Watching = nullcontext) -> FactDict:
    """Return the ranked rows, why they rank so, and what would change it; *watching* is for searches that follow."""
    reports = [asked.predict(candidate) for candidate in result.best]
    rows = []
    for rank, (candidate, report) in enumerate(zip(result.best, reports, strict=True), 1):
        is_equal = _is_tie(asked, result.best[0], reports[0], candidate)
        family = [other for other in result.simulated if other.family == candidate.family]
        next_best = sorted((other for other in family if other.rank > candidate.rank), key=attrgetter("rank"))
        variants = [_candidate(asked, variant) for variant in next_best[:MOST_VARIANTS]]
        rows.append({**_row(asked, rank, candidate, report, is_equal), "variants": variants})
    second = next((index for index, row in enumerate(rows) if index and row["gpus"] == rows[0]["gpus"]), None)
    missed, binds, runner_up = result.missed, None, None
    if rows:
        binds = {"what": results.find_bottleneck(reports[0], result), "shares": results.cause_shares(reports[0])}
    if second is not None:
        slower_s = reports[second].step_s - reports[0].step_s
        parts_s = results.breakdown_differences(reports[second], reports[0])
        runner_up = {"rank": rows[second]["rank"], "slower_s": slower_s, "parts_s": parts_s}
    return {
        **pick(asked, "model=model.name parameters=model.parameters cluster=cluster.name"),
        "gpus": list(asked.gpus),
        "framework": asked.profile.name,
        "precision": rows[0]["precision"] if rows else None,
        **pick(asked, "objective=question.objective global_batch seq capacity_bytes"),
        "gpu_bytes": asked.cluster.gpu.memory_bytes,
        "counts": result.counts.facts(),
        "least_s": result.least_s,
        "rows": rows,
        "binds": binds,
        "missed": missed and {**strategy_facts(missed.strategy), **pick(missed, "bound_s memory_bytes")},
        "runner_up": runner_up,
        "sensitivity": _sensitivity(asked, result),
        "front": [_candidate(asked, point) for point in result.front],
        "smallest_bytes": result.smallest_bytes,
        "change": None if rows or not result.counts.complete else _find_change(asked, result.deadline, watching),
        **({"explained": _explain(asked, result.best[0])} if asked.question.explain and rows else {}),
        "assumptions": list(asked.assumptions),
    }


def _candidate(asked: SettledSearch, candidate: SimulatedCandidate) -> FactDict:
    return {**asked.facts(candidate), **pick(candidate, "step_s memory_bytes")}


def _explain(asked: SettledSearch, best: SimulatedCandidate) -> list[FactDict]:
    values = asked.profile, asked.model, asked.cluster.gpu, best.strategy, best.framework
    place = {"model": asked.model, "cluster": asked.joined_cluster, "place": str(best.options.place)}
    run = settling.settle(build_question(PredictQuestion, {**place, **predict_choices(*values)}))
    return explain_choices(run, asked.capacity_bytes)


def best_row(asked: SettledSearch) -> tuple[FactDict | None, SearchCounts]:
    """Return the best as a row of the table, or None if there is none, and the counts of candidates."""
    result = asked.answer(top=1)
    if not result.best:
        return None, result.counts
    best = result.best[0]
    return _row(asked, 1, best, asked.predict(best), True), result.counts


def _is_tie(asked: SettledSearch, best: SimulatedCandidate, report: StepReport, candidate: SimulatedCandidate) -> bool:
    """Return True if *candidate* is as good as the best within our error of its step, on as many GPUs."""
    if candidate.gpus != best.gpus:
        return False
    if asked.question.objective == "memory":
        return candidate.memory_bytes == best.memory_bytes
    return report.low_s <= report.step_s * (candidate.score / best.score) <= report.high_s


def _sensitivity(asked: SettledSearch, result: SearchResult) -> list[FactDict]:
    best, rows = result.best[0].strategy if result.best else None, []
    for change in measure_sensitivity(result, asked.model, asked.joined_cluster):
        other = best is not None and replace(change.strategy, global_batch=best.global_batch) != best
        times = pick(change, "step_s speed=speed_ratio")
        rows.append({"change": change.words, **strategy_facts(change.strategy), **times, "other": other})
    return rows


def _row(
    asked: SettledSearch, rank: int, candidate: SimulatedCandidate, report: StepReport, is_equal: bool
) -> FactDict:
    assert report.throughput is not None
    training = training_facts(asked.question, candidate.strategy, candidate.step_s) or {}
    return {
        "rank": rank,
        **asked.facts(candidate),
        "place": str(candidate.options.place),
        "kinds": mixed.describe_gpu_kinds(candidate.kinds),
        "step_s": candidate.step_s,
        **pick(report, "low_s high_s"),
        "equal": is_equal,
        "tokens_per_s_per_gpu": report.throughput.tokens_per_s / candidate.gpus,
        "mfu": report.throughput.mfu,
        "memory_bytes": candidate.memory_bytes,
        "free_bytes": mixed.find_free_bytes(candidate, asked.model, asked.cluster.gpu),
        "breakdown_s": dict(report.breakdown_s),
        **{name: training.get(name) for name in ("days", "gpu_hours", "cost", "currency")},
        "command": asked.command(candidate),
    }


def _changes(asked: SettledSearch) -> Iterator[tuple[str, SettledSearch]]:
    """Yield changes of a search, the smallest first: more memory, a choice left open, or more GPUs."""
    if asked.max_bytes is not None:
        yield "all memory of a GPU: leave --max-memory out", replace(asked, max_bytes=None)
    if asked.reserve != 0 and asked.max_bytes is None:
        yield "no reserve of memory: --memory-reserve 0", replace(asked, reserve=0.0)
    for name in asked.axes:
        rest = {axis: values for axis, values in asked.axes.items() if axis != name}
        yield f"leave {option_of(name)} out", replace(asked, axes=rest)
    most = mixed.join_gpu_kinds(asked.cluster).gpus
    for times in MORE_GPUS:
        more = tuple(number * times for number in asked.gpus)
        if most is None or max(more) <= most:
            counts = ", ".join(f"{number:,}" for number in more)
            yield f"{times} times the GPUs: --gpus {counts}", replace(asked, gpus=more)


def _find_change(asked: SettledSearch, deadline: float, watching: Watching) -> FactDict | None:
    """Return the smallest change that lets something fit, of those that can be searched until *deadline*."""
    for words, changed in _changes(asked):
        result = changed.answer(top=1, watching=watching, most_s=deadline - time.monotonic())
        if not result.counts.complete:
            return None
        if result.best:
            best = result.best[0]
            return {"words": words, **_candidate(changed, best), "command": changed.command(best)}
    return None
