"""``stepcast gate MEASURED...``: is a run slower than the runs before it, or than its forecast; for CI."""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from stepcast.analyze.compare import identity_of
from stepcast.analyze.gate import STEP, GateResult, GateRun, advance, check_forecast, judge, measures_of, spread_of
from stepcast.cli.compare import read_facts
from stepcast.cli.output import show_view, write_file
from stepcast.cli.watch import read_forecast
from stepcast.inputs.source import Source, prefix_errors
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import RESULT
from stepcast.outputs.gate import add_runs, open_history, read_runs, write_junit, write_markdown
from stepcast.views.compare import gate_view

SLOWER = 1  # exit status of a regression
BASELINE = "stepcast baseline"
# The commit under test, as GitHub and GitLab name it.
COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA")


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options of a gate."""

    history: str | None = None
    name: str = "default"
    label: str = ""
    accept: bool = False
    baseline: str | None = None
    save: str | None = None
    forecast: str | None = None
    min_change: float = 0.01


def run(args: argparse.Namespace) -> int:
    names = GateOptions.__dataclass_fields__
    result = gate_files(args.measured, GateOptions(**{name: getattr(args, name) for name in names}))
    facts = result.facts()
    if args.markdown:
        rows = sorted(result.measures, key=lambda row: (row.name != "step", -abs(row.difference)))
        write_file(args.markdown, write_markdown(facts, [(row.name, row.texts) for row in rows]))
    if args.junit:
        write_file(args.junit, write_junit(facts))
    show_view(args, gate_view(facts))
    return SLOWER if result.failed else 0


def gate_files(measured: Sequence[str], options: GateOptions) -> GateResult:
    """Return the verdict on the last of *measured* runs; add all to the history, and write the baseline."""
    if options.history and options.baseline:
        raise ValueError("use --history or --baseline: the baseline is part of a history")
    if not (options.history or options.baseline or options.save or options.forecast):
        raise ValueError("nothing to compare with: use --history FILE, --baseline FILE, --save FILE or --forecast FILE")
    if options.accept and not options.history:
        raise ValueError("--accept has no effect without --history")
    label = options.label or next((os.environ[name][:12] for name in COMMITS if os.environ.get(name)), "")
    forecast = read_forecast(options.forecast)
    given = [_measure(path, label) for path in measured]
    with ExitStack() as stack:
        base, history = None, _read_baseline(options.baseline) if options.baseline else []
        if options.history:
            base = stack.enter_context(open_history(options.history))
            history = [_decode(run, options.history) for run in read_runs(base, options.name)]
        read = [*([] if options.history else history), *given]
        first = len(history) + 1
        alone = not options.history and len(given) == 1
        for path, one in zip(measured, given, strict=True):
            with prefix_errors(path):
                result = judge(history, one, options.name, options.min_change, strict=alone)
            history.append(advance(one, result, options.accept and one is given[-1]))
        if base is not None:
            add_runs(base, options.name, first, history[first - 1 :])
    if options.save:
        saved = {"format": BASELINE, "name": options.name, "runs": given}
        write_file(options.save, msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
    warnings = [text for run in read for text in run.warnings]
    result = msgspec.structs.replace(result, warnings=[*warnings, *result.warnings])
    return check_forecast(result, forecast, given[-1].identity) if forecast else result


def _measure(path: str, label: str) -> GateRun:
    facts = read_facts(path)
    with prefix_errors(path):
        measures = measures_of(facts)
    identity = {name: value for name, value in identity_of(facts).items() if name != "cluster"}
    warnings = [f"{path}: {text}" for text in facts.get("warnings", ())]
    return GateRun(measures, identity, label, spread=spread_of(facts), warnings=warnings)


def _read_baseline(path: str) -> list[GateRun]:
    """Return the runs of a baseline that ``--save`` wrote, or a measured run."""
    if os.path.isfile(path) and BASELINE in (source := Source(path)).head[:200]:
        with prefix_errors(f"{path}: is not a complete baseline", kinds=(msgspec.DecodeError, KeyError, TypeError)):
            runs = [*msgspec.json.decode(source.data(RESULT))["runs"]]
        return [_decode(msgspec.json.encode(run), path) for run in runs]
    return [_measure(path, "baseline")]


def _decode(run: "bytes | str", path: str) -> GateRun:
    with prefix_errors(f"{path}: holds a run that cannot be read", kinds=(msgspec.MsgspecError, TypeError)):
        decoded = msgspec.json.decode(run, type=GateRun)
    if STEP not in decoded.measures:
        raise ValueError(f"{path}: holds a run without a step")
    return decoded
