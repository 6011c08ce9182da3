"""``stepcast predict --model M --cluster C --gpus N ...``"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcast.cli.configured import equivalent_command, save_run
from stepcast.cli.forecasting import add_forecast_arguments, forecast, run_facts
from stepcast.cli.neighbours import neighbours
from stepcast.cli.options import add_options
from stepcast.cli.output import write_file, write_files
from stepcast.cli.remedies import remedies
from stepcast.cli.results import add_result_arguments, show_prediction
from stepcast.cli.rules import check_applicable
from stepcast.units import DAY, HOUR, format_seconds

DOES_NOT_FIT = 1  # exit status
SAME_STEP = 0.01  # of a step: an exported workload that differs by more is reported

if TYPE_CHECKING:
    from stepcast.ir.strategy import Strategy
    from stepcast.ir.work import Work
    from stepcast.ir.workload import Workload
    from stepcast.questions.question import PredictQuestion
    from stepcast.questions.settle import SettledRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    row = "run RUN  a run that --save wrote, a configuration as --config takes it, or a model"
    add_options(parser, row, run={"nargs": "?"})
    add_forecast_arguments(parser)
    add_options(
        parser,
        """
        --captured FILE  instead of --model: a program that 'stepcast capture' wrote
        --engine
        --background
        """,
    )
    answer = parser.add_argument_group("the answer")
    add_options(
        answer,
        """
        --save FILE.toml    write the run, to predict it again from the file
        --to-workload FILE  also write the workload: SimAI text, or Chakra, a file per rank, if it ends in .et
                            (.gz compresses)
        --tokens
        --price
        --currency
        --explain-memory    what fills the GPUs of each stage
        --require-fit       exit with status 1 where the memory does not suffice
        """,
    )
    add_result_arguments(answer)


def run(args: argparse.Namespace) -> int:
    if args.captured:
        return _run_captured(args)
    from stepcast.ir.framework import Execution

    check_applicable(args)
    found = forecast(args, training=True)
    described = getattr(args, "described", None)
    warnings = described.warnings if described else []
    if args.to_workload:
        warnings += _write_workload(Path(args.to_workload), found)
        if found.framework.execution is not Execution.GRAPHS:
            warnings += [f"{args.to_workload} holds no host: read back, it runs as captured graphs do"]
    if args.save:
        if not args.save.endswith(".toml"):
            raise ValueError(f"--save {args.save}: name a file that ends in .toml")
        write_file(args.save, save_run(found))
    prediction = found.prediction.noting(found.assumptions, warnings)
    unfit = not prediction.fits
    show_prediction(
        prediction,
        args,
        run_facts(found),
        lambda: neighbours(found, args.command),
        training=training(args, found.strategy, prediction.step_s),
        remedies=remedies(found, prediction.step_s) if unfit else None,
        config=described.facts(equivalent_command(found)) if described else None,
    )
    return DOES_NOT_FIT if unfit and args.require_fit else 0


def _run_captured(args: argparse.Namespace) -> int:
    """Predict the step of a captured program."""
    from stepcast.cli.captured import check_captured_options, predicted, read_captured

    check_captured_options(args)
    prediction, asked = predicted(read_captured(args.captured), args)
    show_prediction(prediction, args, asked)
    return DOES_NOT_FIT if args.require_fit and not prediction.fits else 0


def training(
    asked: "PredictQuestion | argparse.Namespace", strategy: "Strategy", step_s: float
) -> dict[str, Any] | None:
    """Return what training on ``--tokens`` takes without interruptions; ``stepcast plan`` includes those."""
    tokens, gpu_hour = asked.tokens, asked.price
    if tokens is None:
        return None
    steps = math.ceil(tokens / strategy.tokens)
    seconds = steps * step_s
    hours = seconds / HOUR * strategy.layout.gpus
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / DAY,
        "gpu_hours": hours,
        "cost": None if gpu_hour is None else hours * gpu_hour,
        "currency": None if gpu_hour is None else asked.currency,
    }


def _write_workload(path: Path, found: "SettledRun") -> list[str]:
    """Write the generated workload with its estimated times, for other simulators; return warnings."""
    from stepcast.forecast.predict import compute_pricer, manner_of
    from stepcast.generate.aicb import aicb_times, aicb_workload, recorded
    from stepcast.generate.workload import generate
    from stepcast.ir.strategy import NO_OFFLOAD, StrategyError
    from stepcast.outputs import chakra, simai

    model, strategy, framework = found.model, found.strategy, found.framework
    if strategy.offload != NO_OFFLOAD:
        raise ValueError(f"{path}: workload files hold no host; leave --offload out")
    workload = generate(model, strategy, framework)
    price = compute_pricer(workload, found.cluster, found.calibration, framework.attention)

    def seconds(work: "Work") -> float:
        return price(work).seconds  # type: ignore[arg-type]

    packed = path.suffix == ".gz"
    if (path.with_suffix("") if packed else path).suffix == ".et":
        timed = replace(recorded(workload, seconds), manner=manner_of(model, strategy, framework))
        write_files(chakra.files(timed, str(path)))
        return []
    if strategy.further_tokens:
        raise ValueError(f"{path}: AICB writes no further tokens; a name that ends in .et writes Chakra, with them")
    times = aicb_times(workload, seconds, model.layers // (strategy.layout.pp * strategy.layout.vpp))
    try:
        written = aicb_workload(model, strategy, times)
        data = simai.write(written)
    except StrategyError as error:
        raise ValueError(f"{path}: {error}; a name that ends in .et writes Chakra, which may") from None
    write_file(str(path), data)
    return _aicb_warnings(path, written, found)


def _aicb_warnings(path: Path, written: "Workload", found: "SettledRun") -> list[str]:
    """Say by how much the step changes in AICB's form, which cannot hold all of it."""
    from stepcast.forecast.simulate import simulate

    step_s, predicted_s = simulate(written, found.cluster).step_s, found.prediction.step_s
    if abs(step_s / predicted_s - 1) < SAME_STEP:
        return []
    return [
        f"{path} has AICB's form of this step, which overlaps no gradients and counts parameters in its own "
        f"way: simulated, it takes {format_seconds(step_s)}, {step_s / predicted_s - 1:+.0%} against this "
        "prediction; a name that ends in .et writes Chakra, which simulates to the predicted step"
    ]
