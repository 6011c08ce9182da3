"""What ``show`` tells of logs: what ``analyze`` finds in them."""

from collections.abc import Callable
from typing import Any

KINDS = {"StepLog": "step log", "CollectiveLog": "collectives", "WorkerSteps": "worker steps"}


def log_facts(document: Any) -> dict[str, Any]:
    from stepcast.analyze.logs import analyze_collective_log, analyze_step_log
    from stepcast.analyze.stragglers import analyze_stragglers

    analyze: dict[str, Any] = {
        "StepLog": analyze_step_log,
        "CollectiveLog": analyze_collective_log,
        "WorkerSteps": analyze_stragglers,
    }
    name = type(document).__name__
    found: dict[str, Any] = analyze[name](document).facts()
    return {"kind": KINDS[name], **found}


def log_text(found: dict[str, Any], width: int) -> str:
    from stepcast.report.jobs import collective_log_text, step_log_text, stragglers_text

    texts: dict[str, Callable[[dict[str, Any], int], str]] = {
        "step log": step_log_text,
        "collectives": collective_log_text,
        "worker steps": stragglers_text,
    }
    return texts[found["kind"]](found, width)
