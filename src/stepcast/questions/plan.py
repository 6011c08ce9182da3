"""The question of ``stepcast plan``, and the training run that it means."""

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

from stepcast import units
from stepcast.cost.memory.states import checkpoint_bytes
from stepcast.goodput import plan as goodput
from stepcast.goodput.plan import Operation, Plan, Saving, TrainingPhase, load_failures
from stepcast.goodput.process import Shortage
from stepcast.hardware import load_cluster
from stepcast.inputs.source import DATA, prefix_errors, read_toml
from stepcast.ir.limits import RUNS, STEPS
from stepcast.ir.types import FactDict, dataclass, find_doubts, pick, require
from stepcast.questions import choices as readers
from stepcast.questions.changes import find_remedies
from stepcast.questions.choices import Choice, ValueSpellingError, amount, count, number_reader, positive
from stepcast.questions.question import CHOICES, PredictQuestion, check_rules
from stepcast.questions.runs import run_facts
from stepcast.questions.settle import SettledRun, name_cluster, settle, settle_price
from stepcast.views.step import memory_words, remedy_pairs

MOST_STEPS = STEPS.most
DEFAULT_FAILURES = "llama-3"
SPARES = (0, 1, 2, 4, 8, 16)  # numbers of spare nodes that an answer compares
SIZES = {"gpus", "nodes", "dp", "step_s", "stage"}
MOST_REPLICAS = 2**16
YEAR_HOURS = 365.25 * 24
MONTH_S = 30.44 * units.DAY


def _read_date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ValueSpellingError(f"expected a date, such as 2027-01-31, not {text!r}") from None


_read_pue = number_reader("a ratio from 1 to 10", lambda value: 1 <= value <= 10)
_read_share = number_reader("a share from 0 to 1", lambda value: 0 <= value <= 1)
_read_bandwidth = positive(lambda text: units.parse_quantity(text, units.Dimension.RATE))


class PlanQuestion(PredictQuestion, frozen=True, kw_only=True):
    """A question about a training run: a step, the length of the run, and how it is operated."""

    # fmt: off
    steps: Annotated[int | None, Choice(read=count(1, MOST_STEPS))] = None
    until: Annotated[datetime.date | None, Choice(read=_read_date)] = None
    from_: Annotated[datetime.date | None, Choice(read=_read_date)] = None
    step_s: Annotated[float | None, Choice(read=readers.rate)] = None
    stage: tuple[str, ...] = ()
    buy: str | None = None
    carbon: str | None = None
    pue: Annotated[float, Choice(read=_read_pue)] = 1.0
    host_power: Annotated[float, Choice(read=amount)] = 0.0
    failures: str | None = None
    mtbf: str | None = None
    spot: Annotated[float | None, Choice(read=readers.share)] = None
    checkpoint_every: str | None = None
    checkpoint_size: Annotated[float | None, Choice(read=positive(units.parse_size_bytes))] = None
    node_write: Annotated[float | None, Choice(read=_read_bandwidth)] = None
    store_write: Annotated[float | None, Choice(read=_read_bandwidth)] = None
    blocking: bool = False
    restart: str | None = None
    spares: Annotated[int | None, Choice(read=count(0, 100_000))] = None
    shrink: bool = False
    repair: str | None = None
    stragglers: str | None = None
    evaluate: str | None = None
    runs: Annotated[int, Choice(read=count(1, RUNS.most))] = 1000
    seed: Annotated[int, Choice(read=count(0, 2**63))] = 0
    allow_oom: bool = False
    # fmt: on

    @property
    def step(self) -> PredictQuestion:
        """Return the question about one step of the run."""
        of_run = ("tokens", "steps", "price", "currency")  # settling the step turns samples and epochs into tokens
        values = {name: getattr(self, name) for name in CHOICES if name not in of_run}
        return PredictQuestion(**values, file=self.file, unchecked=self.unchecked)


class DoesNotFitError(ValueError):
    """A stage of the run does not fit into GPU memory."""

    status = 1  # exit status


@dataclass(frozen=True, slots=True)
class SettledPlan:
    """The training run that a question means; *assumptions* are the defaults that were used."""

    question: PlanQuestion
    steps: list[SettledRun | None]  # the predicted step of each stage; None if its time was measured
    phases: list[TrainingPhase]
    operation: Operation
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    def answer(self) -> Plan:
        """Return the plan of the run."""
        asked, electricity = self.question, 0.0
        price = asked.price if isinstance(asked.price, float) else None
        if asked.buy is not None:
            owned = _read_pairs("--buy", asked.buy, dict.fromkeys(("gpu", "years", "electricity"), amount))
            price, electricity = owned["gpu"] / (owned.get("years", 5.0) * YEAR_HOURS), owned.get("electricity", 0.0)
        carbon = _grams_per_kwh(asked.carbon) if asked.carbon is not None else None
        given = price, asked.pue, asked.runs, asked.seed, asked.currency, electricity, carbon
        return replace(goodput.plan(self.phases, self.operation, *given), describe=partial(plan_facts, self))


def plan_facts(settled: SettledPlan, plan: Plan) -> FactDict:
    """Return the answer in the words of the JSON contract."""
    question, phases, first = settled.question, settled.phases, settled.steps[0]
    assumptions, answer = list(settled.assumptions), plan.facts()
    reports = [step.prediction.report for step in settled.steps if step]
    reached = [report.throughput for report in reports if report.throughput]
    band_days = mfu = None
    if len(reports) == len(phases):  # the median with every step at the low and at the high end of its interval
        steps, median = [phase.steps for phase in phases], answer["days"]["median"]
        low_s, high_s, step_s = (
            sum(count * float(getattr(report, name)) for count, report in zip(steps, reports, strict=True))
            for name in ("low_s", "high_s", "step_s")
        )
        band_days = {"low": median * low_s / step_s, "high": median * high_s / step_s}
    weights = [phase.steps * phase.step_s * phase.gpus for phase in phases]
    if len(reached) == len(phases) and (total := sum(weights)) > 0:
        mfu = sum(throughput.mfu * weight for throughput, weight in zip(reached, weights, strict=True)) / total
    if plan.energy_mwh and not question.host_power and question.pue == 1:
        assumptions.append("energy is what GPUs draw, without hosts, network and cooling (--host-power, --pue)")
    spares = sorted({*SPARES, question.spares}) if question.spares is not None else ()
    facts: FactDict = {
        **(run_facts(first) if first else {}),
        **answer,
        "mfu": mfu,
        "step_band_days": band_days,
        "choices": goodput.plan_alternatives(phases, settled.operation, spares=spares),
        "assumptions": assumptions,
        "warnings": [*settled.warnings, *(note for report in reports for note in report.warnings)],
    }
    checked = {key: facts[key] for key in ("days", "split_s", "tokens_per_s", "gpu_hours", "cost", "energy_mwh")}
    facts["warnings"] += find_doubts(checked)
    apart_s = max(phase["interval_s"] or 0.0 for phase in answer["phases"])
    if settled.operation.interval_s and apart_s > 1.5 * settled.operation.interval_s:
        facts["warnings"].append(
            f"--checkpoint-every {question.checkpoint_every}: checkpoints are {units.format_duration(apart_s)} apart, "
            "since each begins after a step and when the one before it is safe"
        )
    if question.until:
        facts["until"] = question.until.isoformat()
    return facts


def _grams_per_kwh(text: str) -> float:
    """Return the CO2 of a kWh: a number, or that of a country in ``data/carbon.toml``."""
    known = read_toml(str(DATA / "carbon.toml"))["grams_per_kwh"]
    if (word := text.strip().lower()) in known:
        return float(known[word])
    try:
        return amount(word)
    except ValueSpellingError:
        raise ValueError(f"--carbon {text!r}: expected grams per kWh, or one of {', '.join(known)}") from None


def settle_plan(question: PlanQuestion) -> SettledPlan:
    """Return the run that *question* means; a DoesNotFitError if it needs more memory than the GPUs have."""
    readers.refuse_several(question)
    if question.until is not None and question.tokens is not None and not question.given & SIZES:
        return _size_run(question)
    measured = question.step_s is not None
    if not measured and (question.model is None or (question.cluster or question.gpu) is None):
        raise ValueError("a plan needs a step: use --model and --cluster, or --step-s with a measured time")
    require(not measured or question.gpus is not None, "--step-s gives no layout: use --gpus as well")
    if measured:
        why = "has no effect: --step-s states the step, of any model and cluster; leave one of them out"
        readers.refuse_options(sorted(question.given & {"model", "cluster", "gpu", "framework"}), why)
    if measured and question.shrink and _measured_replicas(question) is None:
        raise ValueError(
            "--shrink needs the number of replicas of the measured run: use --dp, or --tp, --cp and --pp, as well"
        )
    check_rules("plan", question.given, pick(question, "price step_s spares"))
    if question.buy is not None and (question.price is not None or "gpu=" not in question.buy):
        raise ValueError("--buy needs the price of a GPU, as gpu=40000, and takes the place of --price")
    if question.carbon is not None:
        _grams_per_kwh(question.carbon)
    stages = [_read_stage(question, text) for text in question.stage] or [question]
    steps = [settle(stage.step) if stage.step_s is None else None for stage in stages]
    stages = [
        stage if step is None or stage.samples is None else stage.change({"tokens": step.question.tokens})
        for stage, step in zip(stages, steps, strict=True)
    ]
    assumptions = list(dict.fromkeys(note for step in steps if step for note in step.assumptions))
    if (first := steps[0]) is not None:
        question = settle_price(question, first.cluster, assumptions)
    elif question.price == "auto":
        raise ValueError("--price auto needs --cluster; give the price as a number with --step-s")
    if question.buy is not None and "years=" not in question.buy:
        assumptions.append("hardware is in use for 5 years (--buy years=N)")
    if question.carbon is not None:
        assumptions.append("the CO2 of electricity is a yearly average: Ember 2023, or as given (--carbon)")
    operation = _build_operation(question, steps[-1], assumptions)
    phases = [_build_phase(stage, step, operation) for stage, step in zip(stages, steps, strict=True)]
    warnings = _check_memory(steps, question.allow_oom)
    return SettledPlan(question, steps, phases, operation, tuple(assumptions), tuple(warnings))


def _available_s(question: PlanQuestion) -> float:
    """Return the seconds from the first day of the run to the date by which it ends."""
    assert question.until is not None
    start = question.from_ or datetime.date.today()
    require(question.until > start, f"--until {question.until} is not after the first day, {start} (--from)")
    return (question.until - start).total_seconds()


def _size_run(question: PlanQuestion) -> SettledPlan:
    """Return the plan on the fewest GPUs that finish the tokens by the date: ranks of the model, or complete nodes."""
    available_s = _available_s(question)
    ranks = question.tp * question.cp * question.pp
    place = name_cluster(question.step)
    per_node = (load_cluster(place, question.set) if isinstance(place, str) else place).node.gpus

    def is_possible(replicas: int) -> bool:
        """Return whether replicas divide the batch and into groups of experts and of shards, on complete nodes."""
        gpus, states = ranks * replicas, max(question.shard, 1) * max(question.replicate, 1)
        return (
            not (question.global_batch or 0) % (question.micro_batch * replicas)
            and not question.tp * question.cp * replicas % (question.ep * max(question.expert_tp, 1))
            and not question.cp * replicas % states
            and (gpus <= per_node or gpus % per_node == 0)
        )

    options = list(filter(is_possible, range(1, min(question.global_batch or MOST_REPLICAS, MOST_REPLICAS) + 1))) or [1]
    best: SettledPlan | None = None
    late, done = -1, len(options)  # positions of the most replicas that are late, and of the fewest that are not
    limit = why = shortage = ""
    while done - late > 1:
        middle = (late + done) // 2 if done < len(options) else min(2 * (late + 1), done - 1)
        try:
            settled = settle_plan(question.change({"until": None, "gpus": ranks * options[middle]}))
        except DoesNotFitError as error:  # more replicas shard its states further
            late, why, shortage = middle, "do not fit", str(error)
            continue
        except ValueError as error:  # more GPUs than the cluster has
            done, limit = middle, str(error)
            continue
        if goodput.expected_s(settled.phases, settled.operation) > available_s:
            late, why, shortage = middle, "do not", ""
        else:
            done, best = middle, settled
    if best is None and (limit or shortage):
        raise ValueError(f"no number of GPUs finishes by {question.until}: {limit or shortage}")
    if best is None:
        raise ValueError(
            f"{ranks * options[late]:,} GPUs do not finish by {question.until}; use a larger batch, or a later date"
        )
    fewer = f"; {ranks * options[late]:,} {why}" if late >= 0 else ""
    tokens = units.format_short_count(question.tokens or 0)
    note = f"{ranks * options[done]:,} GPUs finish {tokens} tokens by {question.until}{fewer} (--gpus)"
    return replace(best, assumptions=(note, *best.assumptions))


def _check_memory(steps: list[SettledRun | None], allowed: bool) -> list[str]:
    """Return a warning for each stage that does not fit; unless that is *allowed*, refuse the first one."""
    warnings = []
    for number, step in enumerate(steps, 1):
        if step is None or step.prediction.fits:
            continue
        which = f"stage {number} of the run" if len(steps) > 1 else "the run"
        memory = step.prediction.report.memory_bytes
        assert memory is not None
        warning = f"{which} does not fit into GPU memory ({memory_words(memory).partition(':')[0]})"
        if not allowed:
            remedies = remedy_pairs(find_remedies(step, step.prediction.step_s))
            fixes = "; ".join(f"{name}: {text}" for name, text in remedies)
            raise DoesNotFitError(f"{warning}; {fixes}; --allow-oom plans it anyway")
        warnings.append(warning)
    return warnings


def _read_stage(question: PlanQuestion, text: str) -> PlanQuestion:
    """Return *question* with the changes of one stage."""
    words = {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in text.split(","))}
    if "" in words or not all("=" in pair for pair in text.split(",")):
        raise ValueError(f"--stage {text!r}: expected KEY=VALUE,..., such as tokens=1T,seq=8192")
    with prefix_errors(f"--stage {text!r}", kinds=(TypeError, ValueError)):
        choices = readers.read_choices(PlanQuestion, words)
    stage = question.change({"tokens": None, "steps": None, **choices})
    if (stage.tokens is None) == (stage.steps is None):
        raise ValueError(f"--stage {text!r}: give the tokens or the steps of the stage")
    return stage


def _build_phase(question: PlanQuestion, step: SettledRun | None, operation: Operation) -> TrainingPhase:
    if step is None:
        assert question.step_s is not None
        assert question.gpus is not None
        tokens = float(question.seq or 0) * (question.global_batch or 0)
        phase = TrainingPhase(0, question.step_s, tokens, question.gpus, replicas=_measured_replicas(question) or 1)
    else:
        node, report, layout = step.cluster.node, step.prediction.report, step.strategy.layout
        gpus, memory = min(node.gpus, layout.gpus), report.memory_bytes
        phase = TrainingPhase(
            0,
            report.step_s,
            step.strategy.tokens,
            layout.gpus,
            gpus_per_node=gpus,
            links_per_node=node.nics,
            replicas=layout.dp,
            busy_node_w=goodput.node_watts(node.gpu.power_w, gpus, question.host_power, report.breakdown_s),
            idle_node_w=goodput.idle_node_watts(node.gpu.power_w, gpus, question.host_power),
            memory_bytes=memory and {name: value for name, value in memory.items() if name != "stages"},
        )
    return replace(phase, steps=_count_steps(question, phase, operation))


def _measured_replicas(question: PlanQuestion) -> int | None:
    """Return the replicas of a measured run; None if no option gives its layout."""
    if question.dp is not None:
        return question.dp
    if not question.given & {"tp", "cp", "pp"}:
        return None
    ways, gpus = question.tp * question.cp * question.pp, question.gpus or 1
    readers.check_multiple(gpus, ways)
    return gpus // ways


def _count_steps(question: PlanQuestion, phase: TrainingPhase, operation: Operation) -> int:
    given = [name for name in ("tokens", "steps", "until") if getattr(question, name) is not None]
    if question.until is not None and len(given) > 1:
        raise ValueError(
            f"--until and --{given[0]} both say how long the run is: leave one of them out"
            + (", or --gpus to find the fewest that finish by then" if given[0] == "tokens" else "")
        )
    require(len(given) < 2, "--tokens and --steps both say how long the run is: leave one of them out")
    if not given:
        raise ValueError(
            "length of the run missing: use one of --tokens 15T, --samples 50k, --steps 100000 or --until 2027-01-31"
        )
    if question.steps is not None:
        return question.steps
    if question.until is not None:
        return int(goodput.steps_within(phase, operation, _available_s(question)))
    assert question.tokens is not None
    require(phase.tokens_per_step > 0, "--tokens with --step-s needs --global-batch and --seq, the tokens of a step")
    return math.ceil(question.tokens / phase.tokens_per_step)


Readers = Mapping[str, Callable[[str], float]]


def _read_pairs(option: str, text: str, readers: Readers, needed: bool = False) -> FactDict:
    """Read ``name=value,...``; with *needed* every name must occur."""
    values: FactDict = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or name not in readers:
            raise ValueError(f"{option} {pair!r}: expected {', '.join(f'{known}=...' for known in readers)}")
        with prefix_errors(f"{option} {name}"):
            values[name] = readers[name](value.strip())
    for name in readers if needed else ():
        require(name in values, f"{option}: {name}=... is missing")
    return values


def _build_operation(question: PlanQuestion, step: SettledRun | None, assumptions: list[str]) -> Operation:
    failures, restart = load_failures(question.failures or (DEFAULT_FAILURES if question.mtbf is None else "none"))
    if question.failures is None and question.mtbf is None:
        assumptions.append(f"parts fail as {failures.description} (--failures, --mtbf)")
    if question.mtbf is not None:
        times_s = _read_pairs("--mtbf", question.mtbf, dict.fromkeys(("gpu", "node", "link"), units.parse_duration_s))
        for name, value in times_s.items():
            require(value, f"--mtbf {name}=0: a time between failures is above zero")
        name = failures.name if question.failures else "as given"
        failures = replace(failures, name=name, **{f"{part}_s": value for part, value in times_s.items()})
    if question.repair is not None:
        repair = _read_pairs("--repair", question.repair, {"share": _read_share, "takes": units.parse_duration_s})
        fields = {"share": "broken_share", "takes": "repair_s"}
        failures = replace(failures, **{fields[name]: value for name, value in repair.items()})
    if question.restart is not None:
        parts = dict.fromkeys(("detect", "reschedule", "warm-up"), units.parse_duration_s)
        named = read_toml(str(DATA / "restarts.toml"))
        times_s = _read_pairs("--restart", named.get(question.restart, question.restart), parts)
        restart = replace(restart, **{f"{name.replace('-', '_')}_s": value for name, value in times_s.items()})
    if question.spot:
        reclaimed_per_s = -math.log1p(-min(question.spot, 1 - 1e-9)) / MONTH_S
        failures = replace(failures, node_s=1 / (1 / failures.node_s + reclaimed_per_s))
        assumptions.append(
            f"{units.format_percent(question.spot, 0)} of nodes are reclaimed in a month, each an interruption (--spot)"
        )
    pause, stragglers = None, goodput.Stragglers()
    if question.evaluate is not None:
        readers: Readers = {"every": count(1, MOST_STEPS), "for": units.parse_duration_s}
        breaks = _read_pairs("--evaluate", question.evaluate, readers, needed=True)
        pause = goodput.Pause(breaks["every"], breaks["for"])
    if question.stragglers is not None:
        readers = {"per-node-day": amount, "for": units.parse_duration_s, "slower": amount}
        slow = _read_pairs("--stragglers", question.stragglers, readers, needed=True)
        stragglers = goodput.Stragglers(*(slow[name] for name in readers))
    can_fail = failures.per_s(1, 1, 1) > 0
    if question.spares is None and can_fail:
        assumptions.append("a spare node replaces a broken one at once (--spares)")
    saving = _build_saving(question, step, can_fail, assumptions)
    shortage = Shortage.SHRINK if question.shrink else Shortage.WAIT
    interval_s = _read_interval_s(question, step)
    return Operation(failures, saving, restart, stragglers, pause, interval_s, question.spares, shortage)


def _build_saving(question: PlanQuestion, step: SettledRun | None, can_fail: bool, assumptions: list[str]) -> Saving:
    size = question.checkpoint_size
    if size is None and step is not None:
        size = checkpoint_bytes(step.model, step.strategy, step.framework)
    if size is None and can_fail:
        raise ValueError("--step-s gives no model: use --checkpoint-size, such as 1TB, or --failures none")
    if question.node_write is None and can_fail:
        assumptions.append("a node writes and reads checkpoints at 1 GB/s (--node-write)")
    rates = question.node_write or Saving().node_bytes_per_s, question.store_write or math.inf
    return Saving(float(size or 0), *rates, background=not question.blocking)


def _read_interval_s(question: PlanQuestion, step: SettledRun | None) -> float | None:
    text = question.checkpoint_every
    if text is None:
        return None
    number = text.removesuffix("steps").strip() if text.endswith("steps") else ""
    if number:
        step_s = question.step_s if step is None else step.prediction.step_s
        assert step_s is not None
        return float(count(1, MOST_STEPS)(number) * step_s)
    try:
        seconds = units.parse_duration_s(text)
    except ValueError as error:
        raise ValueError(f"--checkpoint-every {error}") from None
    require(seconds > 0, "--checkpoint-every must be above zero")
    return seconds
