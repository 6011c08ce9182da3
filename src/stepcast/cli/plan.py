"""``stepcast plan --model M --cluster C --gpus N ... --tokens 15T``"""

import argparse
import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stepcast.cli.forecasting import add_forecast_arguments, forecast, run_facts
from stepcast.cli.options import add_options
from stepcast.cli.output import write_file
from stepcast.cli.pages import print_view, write_view
from stepcast.cli.plan_words import above_zero, bandwidth, date, need, pairs, pue, share
from stepcast.cli.predict import DOES_NOT_FIT
from stepcast.cli.remedies import remedies
from stepcast.ir.facts import find_doubts
from stepcast.ir.limits import STEPS
from stepcast.outputs.plain import table_bytes
from stepcast.questions.numbers import amount, check_multiple, count
from stepcast.units import DEFAULT_CURRENCY, parse_duration_s
from stepcast.version import __version__
from stepcast.views.step import memory_words, remedy_pairs
from stepcast.views.text import visible

if TYPE_CHECKING:
    from stepcast.goodput.operation import Operation
    from stepcast.goodput.plan import Plan, TrainingPhase
    from stepcast.ir.step import StepReport
    from stepcast.questions.settle import SettledRun

MOST_STEPS = STEPS.most
SPARES = (0, 1, 2, 4, 8, 16)
DEFAULT_FAILURES = "llama-3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    row = "run RUN  a run that predict --save wrote, a configuration, or a model"
    add_options(parser, row, run={"nargs": "?"})
    add_forecast_arguments(parser)
    _add_run(parser)
    _add_operation(parser)
    drawn = parser.add_argument_group("result")
    add_options(
        drawn,
        """
        --runs N           runs to draw (default 1000)
        --seed N           seed of the drawing
        --allow-oom        plan a run that does not fit into GPU memory (default: refuse it, exit status 1)
        -o, --output FILE  goodput by interval and spares, as csv
        --html
        --json
        """,
        runs=1000,
        seed=0,
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("the run")
    add_options(
        run,
        """
        --tokens N                 tokens to train on, such as 15T
        --steps N                  steps, instead of tokens
        --until DATE               as many steps as end by then, 2027-01-31
        --from DATE                first day (default: today)
        --step-s S                 seconds of a step that was measured
        --stage KEY=VALUE,... ...  a stage of the run, in order: tokens or steps, and options that change in
                                   it, as tokens=1T,global-batch=2048,seq=4096
        --price X                  price per GPU-hour, 2.5 or 2.5/gpu-hour
        --currency
        --pue X                    energy of the building for that used
        --host-power W             of a node beside its GPUs (default 0)
        """,
        **{"until": date, "from": {"dest": "start", "type": date}},
        pue={"type": pue, "default": 1.0},
        host_power=0.0,
    )


def _add_operation(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("operation")
    add_options(
        how,
        f"""
        --failures NAME             a profile of failures, a TOML file of one, or none (default
                                    {DEFAULT_FAILURES})
        --mtbf gpu=T,node=T,link=T  mean times between failures of one part
        --checkpoint-every T        work between checkpoints, 30m or 500steps (default: the best)
        --checkpoint-size SIZE
        --node-write RATE           of a node (default 1 GB/s)
        --store-write RATE          of the store (default: no limit)
        --blocking                  training stops until a checkpoint is written
        --restart detect=T,reschedule=T,warm-up=T  until the first step after a failure
        --spares N                  spare nodes (default: always one)
        --shrink                    without a spare, go on with fewer replicas
        --repair share=X,takes=T    nodes that break, and how long they are out
        --stragglers per-node-day=X,for=T,slower=X  spells of slow nodes
        --evaluate every=N,for=T    a pause after every N steps
        """,
        node_write=bandwidth,
        store_write=bandwidth,
        spares=count(0, 100000),
    )


class DoesNotFitError(ValueError):
    """A stage of the run does not fit into GPU memory."""

    status = DOES_NOT_FIT


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what is told of it."""

    plan: "Plan"
    facts: dict[str, Any]


def planned(args: argparse.Namespace) -> Planned:
    """Plan the run that *args* describe; a DoesNotFitError if it needs more memory than the GPUs have."""
    from stepcast.goodput.plan import plan, plan_alternatives

    if args.step_s is None and (args.model is None or (args.cluster or args.gpu) is None):
        raise ValueError("a run has steps: give --model and --cluster, or --step-s of a measured one")
    if args.step_s is not None and args.gpus is None:
        raise ValueError("--step-s knows no layout: give --gpus as well")
    if args.step_s is not None and args.shrink and _measured_replicas(args) is None:
        raise ValueError("--shrink needs the replicas of the measured run: give --dp, or --tp, --cp and --pp, as well")
    if args.step_s is not None and args.allow_oom:
        raise ValueError("--allow-oom has no effect: memory is not checked with --step-s")
    if args.price is None and args.currency != DEFAULT_CURRENCY:
        raise ValueError(f"--currency {args.currency} has no effect: give --price as well")
    stages = [_stage(args, text) for text in args.stage] or [args]
    forecasts = [forecast(each) if each.step_s is None else None for each in stages]
    unfit = _check_memory(forecasts, args.allow_oom)
    assumptions = list(dict.fromkeys(note for each in forecasts if each for note in each.assumptions))
    operation = _operation(args, forecasts[-1], assumptions)
    phases = [_phase(each, found, operation) for each, found in zip(stages, forecasts, strict=True)]
    made = plan(phases, operation, args.price, args.pue, args.runs, args.seed, args.currency)
    if made.energy_mwh and not args.host_power and args.pue == 1:
        assumptions.append("energy is what GPUs draw, without hosts, network and cooling (--host-power, --pue)")
    spares = sorted({*SPARES, args.spares}) if args.spares is not None else ()
    facts = made.facts()
    asked = run_facts(forecasts[0]) if forecasts[0] else {}
    found = {
        **asked,
        **facts,
        "mfu": _mfu(forecasts, phases),
        "step_band_days": _band_days(facts["days"]["median"], forecasts, phases),
        "failures": operation.failures.name,
        "spares": args.spares,
        "checkpoint_bytes": operation.saving.size_bytes,
        "choices": plan_alternatives(phases, operation, spares=spares),
        "assumptions": assumptions,
        "warnings": [
            *unfit,
            *(args.described.warnings if args.described else []),
            *(note for each in forecasts if each for note in each.prediction.report.warnings),
        ],
    }
    answer = {key: found[key] for key in ("days", "split_s", "tokens_per_s", "gpu_hours", "cost", "energy_mwh")}
    found["warnings"] += find_doubts(answer)
    if args.until:
        found["until"] = args.until.isoformat()
    return Planned(made, found)


def _check_memory(forecasts: "list[SettledRun | None]", allowed: bool) -> list[str]:
    """Return a warning for each stage that does not fit; unless that is *allowed*, refuse the first one."""
    warnings = []
    for number, found in enumerate(forecasts, 1):
        if found is None or found.prediction.fits:
            continue
        which = f"stage {number} of the run" if len(forecasts) > 1 else "the run"
        memory = found.prediction.report.memory_bytes
        assert memory is not None
        told = f"{which} does not fit into GPU memory ({memory_words(memory).partition(':')[0]})"
        if not allowed:
            remedied = {"remedies": remedies(found, found.prediction.step_s)}
            fixes = "; ".join(f"{name}: {text}" for name, text in remedy_pairs(remedied))
            raise DoesNotFitError(f"{told}; {fixes}; --allow-oom plans it as it is")
        warnings.append(told)
    return warnings


def run(args: argparse.Namespace) -> int:
    from stepcast.views.plan import plan_view

    found = {**planned(args).facts, "command": args.command, "version": __version__}
    if args.output:
        write_file(args.output, table_bytes(args.output, found["choices"]))
    view = plan_view(found)
    write_view(args, view)
    print_view(args, view)
    if args.output and not args.json:
        print(f"\nwrote {visible(args.output)}")
    return 0


def _band_days(
    median: float, forecasts: "list[SettledRun | None]", phases: list["TrainingPhase"]
) -> dict[str, float] | None:
    """The median with every step at the low and at the high end of its range."""
    reports = [found.prediction.report for found in forecasts if found]
    if len(reports) < len(phases):
        return None
    whole = sum(phase.steps * report.step_s for phase, report in zip(phases, reports, strict=True))
    ends = {"low": [report.low_s for report in reports], "high": [report.high_s for report in reports]}
    return {
        name: median * sum(phase.steps * step_s for phase, step_s in zip(phases, seconds, strict=True)) / whole
        for name, seconds in ends.items()
    }


def _mfu(forecasts: "list[SettledRun | None]", phases: list["TrainingPhase"]) -> float | None:
    """Return the MFU of the steps, weighted by GPU time; None if one was measured."""
    reached = [found.prediction.report.throughput if found else None for found in forecasts]
    if None in reached:
        return None
    weights = [phase.steps * phase.step_s * phase.gpus for phase in phases]
    done = sum(each.mfu * weight for each, weight in zip(reached, weights, strict=True) if each)
    return done / sum(weights) if sum(weights) else None


def _stage(args: argparse.Namespace, text: str) -> argparse.Namespace:
    """*args* with what one stage changes of them."""
    words: list[str] = []
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--stage {text!r}: expected KEY=VALUE,..., such as tokens=1T,seq=8192")
        words += [f"--{name.strip()}", value.strip()]
    base = copy.copy(args)
    base.tokens = base.steps = None
    if "--global-batch" in words:
        base.accumulation = None
    elif "--accumulation" in words:
        base.global_batch = None
    found: argparse.Namespace = args.own.parse_args(words, base)
    if (found.tokens is None) == (found.steps is None):
        raise ValueError(f"--stage {text!r}: give tokens or steps of the stage")
    return found


def _phase(args: argparse.Namespace, found: "SettledRun | None", operation: "Operation") -> "TrainingPhase":
    from stepcast.goodput.operation import idle_node_watts, node_watts
    from stepcast.goodput.plan import TrainingPhase

    if found is None:
        tokens = float(args.seq or 0) * (args.global_batch or 0)
        phase = TrainingPhase(0, args.step_s, tokens, args.gpus, replicas=_measured_replicas(args) or 1)
    else:
        node, report, layout = found.cluster.node, found.prediction.report, found.strategy.layout
        gpus = min(node.gpus, layout.gpus)
        phase = TrainingPhase(
            0,
            report.step_s,
            found.strategy.tokens,
            layout.gpus,
            gpus_per_node=gpus,
            links_per_node=node.nics,
            replicas=layout.dp,
            busy_node_w=node_watts(node.gpu.power_w, gpus, args.host_power, report.breakdown_s),
            idle_node_w=idle_node_watts(node.gpu.power_w, gpus, args.host_power),
            memory_bytes=_verdict(report),
        )
    return replace(phase, steps=_steps(args, phase, operation))


def _measured_replicas(args: argparse.Namespace) -> int | None:
    """Return the replicas of a measured run; None if no option gives its layout."""
    if args.dp is not None:
        return int(args.dp)
    if not args.given & {"tp", "cp", "pp"}:
        return None
    ways = args.tp * args.cp * args.pp
    check_multiple(args.gpus, ways)
    return int(args.gpus // ways)


def _verdict(report: "StepReport") -> dict[str, Any] | None:
    """Return the memory of a step without its breakdown by pipeline stage."""
    if report.memory_bytes is None:
        return None
    return {name: value for name, value in report.memory_bytes.items() if name != "stages"}


def _steps(args: argparse.Namespace, phase: "TrainingPhase", operation: "Operation") -> int:
    given = [name for name in ("tokens", "steps", "until") if getattr(args, name) is not None]
    if len(given) != 1:
        raise ValueError("say how long the run is: one of --tokens 15T, --steps 100000 or --until 2027-01-31")
    if args.steps is not None:
        return int(args.steps)
    if args.until is not None:
        from stepcast.goodput.plan import steps_within

        return int(steps_within(phase, operation, _seconds_until(args)))
    if not phase.tokens_per_step:
        raise ValueError("--tokens with --step-s needs --global-batch and --seq, the tokens of a step")
    return math.ceil(float(args.tokens) / phase.tokens_per_step)


def _seconds_until(args: argparse.Namespace) -> float:
    import datetime

    start = args.start or datetime.date.today()
    seconds = (args.until - start).total_seconds()
    if seconds <= 0:
        raise ValueError(f"--until {args.until} is not after the first day, {start} (--from)")
    return float(seconds)


def _operation(args: argparse.Namespace, found: "SettledRun | None", assumptions: list[str]) -> "Operation":
    from stepcast.goodput.operation import Failures, Operation, Pause, Stragglers, load_failures
    from stepcast.goodput.process import Shortage

    failures, restart = load_failures(args.failures or (DEFAULT_FAILURES if args.mtbf is None else "none"))
    if args.failures is None and args.mtbf is None:
        assumptions.append(f"parts fail as {failures.description} (--failures, --mtbf)")
    if args.mtbf is not None:
        said = pairs("--mtbf", args.mtbf, dict.fromkeys(("gpu", "node", "link"), parse_duration_s))
        for name, value in said.items():
            if not value:
                raise ValueError(f"--mtbf {name}=0: a time between failures is above zero")
        name = failures.name if args.failures else "as given"
        failures = replace(failures, name=name, **{f"{part}_s": value for part, value in said.items()})
    if args.repair is not None:
        said = pairs("--repair", args.repair, {"share": share, "takes": parse_duration_s})
        failures = replace(
            failures,
            broken_share=said.get("share", failures.broken_share),
            repair_s=said.get("takes", failures.repair_s),
        )
    if args.restart is not None:
        words = dict.fromkeys(("detect", "reschedule", "warm-up"), parse_duration_s)
        said = pairs("--restart", args.restart, words)
        restart = replace(restart, **{f"{name.replace('-', '_')}_s": value for name, value in said.items()})
    pause, stragglers = None, Stragglers()
    if args.evaluate is not None:
        said = pairs("--evaluate", args.evaluate, {"every": count(1, MOST_STEPS), "for": parse_duration_s})
        need("--evaluate", said, "every", "for")
        pause = Pause(said["every"], said["for"])
    if args.stragglers is not None:
        words = {"per-node-day": amount, "for": parse_duration_s, "slower": amount}
        said = pairs("--stragglers", args.stragglers, words)
        need("--stragglers", said, *words)
        stragglers = Stragglers(said["per-node-day"], said["for"], said["slower"])
    failing = failures.per_s(1, 1, 1) > 0
    if args.spares is None and failing:
        assumptions.append("another node stands in at once for one that breaks (--spares)")
    if args.shrink and args.spares is None:
        raise ValueError("--shrink has no effect: there is always another node; give --spares 0 or more")
    assert isinstance(failures, Failures)
    return Operation(
        failures,
        _saving(args, found, failing, assumptions),
        restart,
        stragglers,
        pause,
        interval_s=_interval_s(args, found),
        spares=args.spares,
        shortage=Shortage.SHRINK if args.shrink else Shortage.WAIT,
    )


def _saving(args: argparse.Namespace, found: "SettledRun | None", failing: bool, assumptions: list[str]) -> Any:
    from stepcast.goodput.operation import Saving

    size = args.checkpoint_size
    if size is None and found is not None:
        from stepcast.cost.memory.states import checkpoint_bytes

        size = checkpoint_bytes(found.model, found.strategy, found.framework)
    if size is None and failing:
        raise ValueError("--step-s knows no model: give --checkpoint-size, such as 1TB, or --failures none")
    saving = Saving(float(size or 0), background=not args.blocking)
    if args.node_write is None and failing:
        assumptions.append("a node writes and reads checkpoints at 1 GB/s (--node-write)")
    return replace(
        saving,
        node_bytes_per_s=args.node_write or saving.node_bytes_per_s,
        store_bytes_per_s=args.store_write or math.inf,
    )


def _interval_s(args: argparse.Namespace, found: "SettledRun | None") -> float | None:
    text = args.checkpoint_every
    if text is None:
        return None
    number = text.removesuffix("steps").strip() if text.endswith("steps") else ""
    if number:
        step_s = args.step_s if found is None else found.prediction.step_s
        return float(count(1, MOST_STEPS)(number) * step_s)
    return above_zero("--checkpoint-every", parse_duration_s, text)
