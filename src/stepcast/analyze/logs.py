"""Steps and collectives that programs logged: usual times, slow ones, and ranks that stayed behind."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepcast.ir.measured import CollectiveLog, LoggedCollective, LoggedStep, StepLog

WARM = 2  # steps at the start that compile and connect
SLOW = 1.5  # of the usual step
MOST_TOLD = 20
DONE = "completed"


@dataclass(frozen=True)
class StepLogAnalysis:
    log: StepLog

    def facts(self) -> dict[str, Any]:
        steps = self.log.steps
        warm = steps[WARM:] if len(steps) > 2 * WARM else steps
        timed = [step.seconds for step in warm if step.seconds is not None]
        usual = statistics.median(timed) if timed else None
        return {
            "program": self.log.program,
            "steps": len(steps),
            "step_s": usual,
            "p10_s": float(np.percentile(timed, 10)) if timed else None,
            "p90_s": float(np.percentile(timed, 90)) if timed else None,
            "tflops_per_gpu": _median(step.tflops_per_gpu for step in warm),
            "tokens_per_s_per_gpu": _median(step.tokens_per_s_per_gpu for step in warm),
            "global_batch": next((step.samples for step in reversed(warm) if step.samples), None),
            "peak_memory_bytes": self.log.peak_bytes,
            "last_loss": next((step.loss for step in reversed(steps) if step.loss is not None), None),
            "slow_steps": [
                {"step": step.step, "seconds": step.seconds, "factor": step.seconds / usual}
                for step in warm
                if usual and step.seconds is not None and step.seconds > SLOW * usual
            ][:MOST_TOLD],
            "lost_s": sum(max(0.0, each - usual) for each in timed) if usual else 0.0,
            **dict(self.log.facts),
            "warnings": [*self.log.warnings, *_doubts(steps, timed)],
        }


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _doubts(steps: Sequence[LoggedStep], timed: Sequence[float]) -> list[str]:
    if not timed:
        return ["no line tells how long a step took"]
    return [f"{len(steps)} steps are too few to leave out the first ones"] if len(steps) <= 2 * WARM else []


@dataclass(frozen=True)
class CollectiveLogAnalysis:
    """Collectives by kind and size, and where ranks disagree: the first call that not all have finished."""

    log: CollectiveLog

    def facts(self) -> dict[str, Any]:
        calls = self.log.calls
        return {
            "program": self.log.program,
            "ranks": list(self.log.ranks),
            "calls": len(calls),
            "groups": {name: list(ranks) for name, ranks in self.log.members.items()},
            "collectives": self._kinds(),
            "unfinished": self._unfinished(),
            "mismatched": self._mismatched(),
            "stragglers": self._late(),
            "warnings": list(self.log.warnings),
        }

    def _kinds(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str, int], list[LoggedCollective]] = defaultdict(list)
        for call in self.log.calls:
            found[call.kind, call.group, call.size_bytes].append(call)
        rows = []
        for (kind, group, size), calls in found.items():
            seconds = [call.seconds for call in calls if call.seconds is not None]
            rates = [call.bus_bytes_per_s for call in calls if call.bus_bytes_per_s is not None]
            rows.append(
                {
                    "kind": kind,
                    "group": group,
                    "size_bytes": size,
                    "calls": len(calls),
                    "median_s": statistics.median(seconds) if seconds else None,
                    "total_s": sum(seconds),
                    "busbw_bytes_per_s": statistics.median(rates) if rates else None,
                }
            )
        return sorted(rows, key=lambda row: (-row["total_s"], -row["calls"]))

    def _by_turn(self) -> dict[tuple[str, int], list[LoggedCollective]]:
        found: dict[tuple[str, int], list[LoggedCollective]] = defaultdict(list)
        for call in self.log.calls:
            found[call.group, call.turn].append(call)
        return found

    def _unfinished(self) -> list[dict[str, Any]]:
        """Calls that some rank has not finished, and the ranks that did not come to them."""
        last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        for call in self.log.calls:
            last[call.group, call.rank] = max(last[call.group, call.rank], call.turn)
        rows = []
        for (group, turn), calls in sorted(self._by_turn().items()):
            waiting = sorted({call.rank for call in calls if call.state != DONE})
            if not waiting:
                continue
            known = set(self.log.members.get(group, self.log.ranks)) & set(self.log.ranks)
            absent = sorted(rank for rank in known if last[group, rank] < turn)
            rows.append(
                {"group": group, "turn": turn, "kind": calls[0].kind, "size_bytes": calls[0].size_bytes,
                 "waiting": waiting, "absent": absent}
            )  # fmt: skip
        return rows[:MOST_TOLD]

    def _mismatched(self) -> list[dict[str, Any]]:
        """Turns at which ranks called different collectives, or of different sizes."""
        rows = []
        for (group, turn), calls in sorted(self._by_turn().items()):
            kinds = {(call.kind, call.size_bytes) for call in calls if call.kind not in ("send", "recv")}
            if len(kinds) > 1:
                rows.append({"group": group, "turn": turn, "called": sorted(map(list, kinds), key=str)})
        return rows[:MOST_TOLD]

    def _late(self) -> list[dict[str, Any]]:
        """How often each rank was the last to come, and how long the others waited for it."""
        late: dict[int, list[float]] = defaultdict(list)
        for calls in self._by_turn().values():
            issued = sorted((call.issued_s, call.rank) for call in calls if call.issued_s is not None)
            if len(issued) > 1:
                waited = issued[-1][0] - issued[-2][0]
                late[issued[-1][1]].append(waited)
        rows: list[dict[str, Any]] = [
            {"rank": rank, "last": len(waits), "waited_s": sum(waits), "factor": None} for rank, waits in late.items()
        ]
        return sorted(rows, key=lambda row: -row["waited_s"])


def analyze_step_log(log: StepLog) -> StepLogAnalysis:
    return StepLogAnalysis(log)


def analyze_collective_log(log: CollectiveLog) -> CollectiveLogAnalysis:
    return CollectiveLogAnalysis(log)
