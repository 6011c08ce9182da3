"""Why the best is the best: what binds it, and where the next one loses."""

from collections.abc import Mapping

from stepcast.ir.step import StepReport

# Parts of a step by what would make them shorter.
CAUSES: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "optimizer"),
    "network": ("tp", "cp", "ep", "dp", "pp"),
    "bubble": ("bubble",),
    "host": ("other",),
}


def shares(report: StepReport) -> dict[str, float]:
    """Of the step, by cause; they sum to 1."""
    parts = report.breakdown_s
    return {cause: sum(parts[name] for name in names) / report.step_s for cause, names in CAUSES.items()}


def binding(report: StepReport, faster_without_memory: bool) -> str:
    """What keeps the step from being shorter.

    Memory, where a strategy that lacks it might be faster; else what takes most of the step.
    """
    if faster_without_memory:
        return "memory"
    found = shares(report)
    return max(found, key=lambda cause: found[cause])


def differences_s(report: StepReport, best: StepReport) -> dict[str, float]:
    """By part of the step, what *report* spends beyond *best*: the largest loss first."""
    parts = {name: seconds - best.breakdown_s[name] for name, seconds in report.breakdown_s.items()}
    return dict(sorted(parts.items(), key=lambda each: -each[1]))
