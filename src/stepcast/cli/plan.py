"""``stepcast plan --model M --cluster C --gpus N ... --tokens 15T``"""

import argparse

from stepcast.cli.output import print_notes, show_alternatives, show_view, write_file
from stepcast.goodput.plan import Plan, plan_alternatives
from stepcast.ir.facts import FactDict, find_doubts
from stepcast.outputs.plain import table_bytes
from stepcast.questions.choices import several_of
from stepcast.questions.plan import SettledPlan, settle_plan
from stepcast.questions.runs import run_facts
from stepcast.version import __version__
from stepcast.views.plan import plan_view
from stepcast.views.text import visible

SPARES = (0, 1, 2, 4, 8, 16)


def run(args: argparse.Namespace) -> int:
    if args.captured:
        raise ValueError(
            "--captured: a plan needs --model, whose checkpoints and restarts it knows; 'stepcast predict --captured "
            "FILE' and 'stepcast search --captured FILE' predict the step of a captured program"
        )
    if several_of(args.question):
        return show_alternatives(args, args.question)
    settled = settle_plan(args.question)
    print_notes(dict.fromkeys(note for step in settled.steps if step for note in step.notes))
    facts = {**plan_facts(settled, settled.answer()), "command": args.command, "version": __version__}
    if args.run_file:
        unfit = len(settled.warnings)
        facts["warnings"] = [*facts["warnings"][:unfit], *args.run_file.warnings, *facts["warnings"][unfit:]]
    if args.output:
        write_file(args.output, table_bytes(args.output, facts["choices"]))
    show_view(args, plan_view(facts), below=[f"wrote {visible(args.output)}"] if args.output else ())
    return 0


def plan_facts(settled: SettledPlan, plan: Plan) -> FactDict:
    """Return the answer in the words of the JSON contract."""
    question, operation, first = settled.question, settled.operation, settled.steps[0]
    assumptions = list(settled.assumptions)
    if plan.energy_mwh and not question.host_power and question.pue == 1:
        assumptions.append("energy is what GPUs draw, without hosts, network and cooling (--host-power, --pue)")
    spares = sorted({*SPARES, question.spares}) if question.spares is not None else ()
    answer = plan.facts()
    facts: FactDict = {
        **(run_facts(first) if first else {}),
        **answer,
        "mfu": _mean_mfu(settled),
        "step_band_days": _band_days(answer["days"]["median"], settled),
        "failures": operation.failures.name,
        "spares": question.spares,
        "checkpoint_bytes": operation.saving.size_bytes,
        "choices": plan_alternatives(settled.phases, operation, spares=spares),
        "assumptions": assumptions,
        "warnings": [
            *settled.warnings,
            *(note for step in settled.steps if step for note in step.prediction.report.warnings),
        ],
    }
    checked = {key: facts[key] for key in ("days", "split_s", "tokens_per_s", "gpu_hours", "cost", "energy_mwh")}
    facts["warnings"] += find_doubts(checked)
    if question.until:
        facts["until"] = question.until.isoformat()
    return facts


def _band_days(median: float, settled: SettledPlan) -> dict[str, float] | None:
    """Return the median days with every step at the low and at the high end of its interval."""
    phases, reports = settled.phases, [step.prediction.report for step in settled.steps if step]
    if len(reports) < len(phases):
        return None
    total = sum(phase.steps * report.step_s for phase, report in zip(phases, reports, strict=True))
    ends = {"low": [report.low_s for report in reports], "high": [report.high_s for report in reports]}
    return {
        name: median * sum(phase.steps * step_s for phase, step_s in zip(phases, seconds, strict=True)) / total
        for name, seconds in ends.items()
    }


def _mean_mfu(settled: SettledPlan) -> float | None:
    """Return the MFU of the steps, weighted by GPU time; None if one was measured."""
    reached = [step.prediction.report.throughput if step else None for step in settled.steps]
    if None in reached:
        return None
    weights = [phase.steps * phase.step_s * phase.gpus for phase in settled.phases]
    weighted = sum(report.mfu * weight for report, weight in zip(reached, weights, strict=True) if report)
    return weighted / sum(weights) if sum(weights) else None
