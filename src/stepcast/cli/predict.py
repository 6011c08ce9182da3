"""``stepcast predict --model M --cluster C --gpus N ...``"""

import argparse
from dataclasses import replace
from pathlib import Path

from stepcast.cli.options import check_applicable
from stepcast.cli.output import print_notes, show_alternatives, show_emitted, show_prediction, write_file, write_files
from stepcast.forecast.predict import compute_pricer, manner_of
from stepcast.forecast.simulate import simulate
from stepcast.generate.workload import generate
from stepcast.ir.framework import Execution
from stepcast.ir.strategy import NO_OFFLOAD, StrategyError
from stepcast.ir.types import ChangeFacts
from stepcast.ir.work import Work
from stepcast.questions.choices import refuse_options, several_of
from stepcast.questions.runs import answer_facts, emit_config, save_run
from stepcast.questions.settle import SettledRun, settle
from stepcast.units import format_change, format_seconds

DOES_NOT_FIT = 1  # exit status
SAME_STEP = 0.01  # of a step: an exported workload that differs by more is reported


def run(args: argparse.Namespace) -> int:
    if args.captured:
        return _run_captured(args)
    if several_of(args.question):
        return show_alternatives(args, args.question)
    check_applicable(args)
    settled = settle(args.question)
    print_notes(settled.notes)
    warnings = args.run_file.warnings if args.run_file else []
    if args.to_workload:
        warnings += _write_workload(Path(args.to_workload), settled)
        if settled.framework.execution is not Execution.GRAPHS:
            warnings += [f"{args.to_workload} has no CPU launch overhead: read back, it runs as CUDA graphs do"]
    if args.save:
        if not args.save.endswith(".toml"):
            raise ValueError(f"--save {args.save}: use a file name that ends in .toml")
        write_file(args.save, save_run(settled))
    prediction = settled.prediction.noting(settled.assumptions, warnings)
    fits = prediction.fits
    values = settled.model, settled.cluster, settled.strategy, settled.framework
    emitted = emit_config(args.emit, settled.question, *values, prediction.step_s) if args.emit else None

    def changes() -> list[ChangeFacts]:
        from stepcast.questions.changes import find_neighbours

        return find_neighbours(settled, args.command)

    facts = answer_facts(prediction, settled, args.run_file)
    show_prediction(prediction, args, {**facts, "emitted": emitted.facts()} if emitted else facts, changes)
    show_emitted(args, emitted)
    return DOES_NOT_FIT if args.require_fit and not fits else 0


def _run_captured(args: argparse.Namespace) -> int:
    """Predict the step of a captured program."""
    from stepcast.cli.capture import ACTING, predict_program, read_captured

    why = "the captured program fixes what it computes and which software runs it; leave it out"
    refuse_options(sorted(args.given - ACTING), f"has no effect with --captured: {why}")
    prediction, asked = predict_program(read_captured(args.captured), args.question)
    show_prediction(prediction, args, asked)
    return DOES_NOT_FIT if args.require_fit and not prediction.fits else 0


def _write_workload(path: Path, settled: SettledRun) -> list[str]:
    """Write the generated workload with its estimated times, for other simulators; return warnings."""
    from stepcast.generate.aicb import aicb_times, aicb_workload, record_times
    from stepcast.outputs import chakra, simai

    model, strategy, framework = settled.model, settled.strategy, settled.framework
    if strategy.offload != NO_OFFLOAD:
        raise ValueError(f"{path}: workload files cannot describe offloading; leave --offload out")
    workload = generate(model, strategy, framework)
    given = settled.calibration, framework.attention
    price = compute_pricer(workload, settled.cluster, *given, schedule=strategy.schedule)

    def seconds(work: Work) -> float:
        return price(work).seconds  # type: ignore[arg-type]

    packed = path.suffix == ".gz"
    if (path.with_suffix("") if packed else path).suffix == ".et":
        timed = replace(record_times(workload, seconds), manner=manner_of(model, strategy, framework))
        write_files(chakra.files(timed, str(path)))
        return []
    if strategy.mtp_layers:
        raise ValueError(f"{path}: AICB cannot describe MTP layers; a name that ends in .et writes Chakra, which can")
    times = aicb_times(workload, seconds, model.layers // (strategy.layout.pp * strategy.layout.vpp))
    try:
        written = aicb_workload(model, strategy, times)
        data = simai.write(written)
    except StrategyError as error:
        raise ValueError(f"{path}: {error}; a name that ends in .et writes Chakra, which may work") from None
    write_file(str(path), data)
    step_s, predicted_s = simulate(written, settled.cluster).step_s, settled.prediction.step_s
    if abs(step_s / predicted_s - 1) < SAME_STEP:
        return []
    return [
        f"{path} is this step in AICB's format, which overlaps no gradients and counts parameters differently: "
        f"simulated, it takes {format_seconds(step_s)}, {format_change(step_s / predicted_s - 1, 0)} against this "
        "prediction; a name that ends in .et writes Chakra, which simulates to the predicted step"
    ]
