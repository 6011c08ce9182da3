"""A running job, step by step: its level, drift, the forecast, stragglers, slow communication, expected finish.

A collective moves data once its last rank has arrived, so the shortest time of a communication timer over ranks is
its transfer: it grows with a slow link, and not with a straggler, whom the other ranks wait for.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median

import msgspec

from stepcast.analyze.compare import identity_of
from stepcast.analyze.result import SLOW_FACTOR, find_slow
from stepcast.ir.measured import LoggedScore, LoggedStep, LoggedTimer
from stepcast.ir.types import FactDict, Facts, sum_by_key
from stepcast.units import format_change, format_seconds
from stepcast.views.view import NAMES

WARM_UP = 2  # steps that compile and connect
LEVEL_STEPS = 20  # the first ones after them are the level
FEWEST = 5
RECENT = 5
DRIFT = 0.03
DRIFT_SIGMA = 4.0
PAUSE = 1.3  # times the recent steps, from which a step holds a pause, such as a checkpoint
SLOW_PART = 1.3  # times the usual transfer
SLOW_PART_SHARE = 0.005  # of the step, that the extra time takes
CONFIRMED = 3  # reports in succession
COMPUTE = re.compile(r"(?:forward|backward)-compute")
TRANSFER = re.compile(r".*(?:grads-sync|all-gather|all-reduce|reduce-scatter|all-to-all)")
LINKS = NAMES["links"]


class WatchAlert(msgspec.Struct, frozen=True):
    """Something that began or ended: drift, straggler, slow link, forecast, recovered."""

    kind: str
    step: int
    text: str
    rank: int | None = None
    part: str | None = None
    factor: float | None = None


class WatchedStep(msgspec.Struct, frozen=True):
    """A step in its context; times in seconds, changes as shares."""

    step: int
    total: int | None
    step_s: float
    level_s: float | None
    recent_s: float
    change: float | None  # of recent steps against the level
    forecast_error: float | None
    finish_s: float | None


class StepWatch:
    """Follows one job; *forecast* is the JSON of a prediction, *steps* the length of the run (default: as logged)."""

    def __init__(self, forecast: Facts | None = None, steps: int | None = None) -> None:
        self.forecast, self.given_total, self.total = forecast, steps, steps
        self.alerts: list[WatchAlert] = []
        self.steps: list[tuple[int, float]] = []
        self._seen = 0
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._paused_s = 0.0
        self._raised: set[str] = set()
        self._ranks: dict[str, dict[int, float]] = defaultdict(dict)
        self._timers: dict[str, float] = {}  # the shortest of all ranks
        self._transfers: dict[str, list[float]] = defaultdict(list)
        self._late: dict[int, int] = defaultdict(int)

    @property
    def level_s(self) -> float | None:
        return median(self._first) if len(self._first) >= FEWEST else None

    def time(self, timer: LoggedTimer) -> None:
        """Note a timer of the step that was logged last; the next step judges it."""
        if timer.rank is not None:
            self._ranks[timer.name][timer.rank] = timer.longest_s
        else:
            self._timers[timer.name] = timer.shortest_s

    def score(self, score: LoggedScore) -> Iterator[WatchAlert]:
        """Yield an alert on a rank that a straggler detection calls slow, or fast again."""
        step, factor = self.steps[-1][0] if self.steps else 0, 1 / max(score.score, 1e-3)
        words = f"rank {score.rank} on {score.node} has a relative performance of {score.score:.2f}"
        alert = WatchAlert("straggler", step, words, rank=score.rank, factor=factor)
        yield from self._raise_or_clear(factor >= SLOW_FACTOR, alert)

    def add(self, step: LoggedStep, total: int | None = None) -> Iterator[WatchedStep | WatchAlert]:
        """Yield alerts on the timers before this step, the step in its context, and alerts on it."""
        self.total = self.given_total or total or self.total
        yield from self._judge_timers(step.step)
        self._seen += 1
        if step.seconds is None or step.seconds <= 0 or self._seen <= WARM_UP:
            return
        batch = identity_of(self.forecast or {}).get("global_batch")
        if isinstance(batch, int) and step.samples:
            words = f"the forecast is of another run: its global batch is {batch:,}, that of the log {step.samples:,}"
            alert = WatchAlert("forecast", step.step, words, part="global batch")
            yield from self._raise_or_clear(step.samples != batch, alert)
        self.steps.append((step.step, step.seconds))
        if len(self._first) < LEVEL_STEPS:
            self._first.append(step.seconds)
        self._recent.append(step.seconds)
        recent_s, level_s = median(self._recent), self.level_s
        if step.seconds > PAUSE * recent_s:
            self._paused_s += step.seconds - recent_s
        pause_s = self._paused_s / len(self.steps) if len(self.steps) > LEVEL_STEPS else 0.0
        forecast_s = self.forecast["step_s"] if self.forecast else None
        left = self.total - step.step if self.total and self.total >= step.step else None
        change = recent_s / level_s - 1 if level_s else None
        error = forecast_s / recent_s - 1 if forecast_s else None
        finish_s = None if left is None else left * (recent_s + pause_s)
        yield WatchedStep(step.step, self.total, step.seconds, level_s, recent_s, change, error, finish_s)
        if level_s and len(self._recent) == RECENT and len(self.steps) > FEWEST + RECENT:
            yield from self._judge_level(step.step, recent_s, level_s)

    def _judge_level(self, step: int, recent_s: float, level_s: float) -> Iterator[WatchAlert]:
        noise = 1.4826 * median(abs(seconds / level_s - 1) for seconds in self._first)
        change = recent_s / level_s - 1
        before, now = format_seconds(level_s), format_seconds(recent_s)
        words = f"steps take {now}, {format_change(change)} against {before} at the start"
        limit = max(DRIFT, DRIFT_SIGMA * noise / RECENT**0.5)
        slow = change > (limit / 2 if "drift" in self._raised else limit)
        yield from self._raise_or_clear(slow, WatchAlert("drift", step, words, factor=1 + change))
        if self.forecast:
            interval = self.forecast.get("uncertainty") or {}
            high_s = interval.get("high_s") or self.forecast["step_s"] * (1 + DRIFT)
            words = f"steps take {now}, above the forecast's {format_seconds(high_s)}"
            alert = WatchAlert("forecast", step, words, factor=recent_s / self.forecast["step_s"])
            yield from self._raise_or_clear(recent_s > high_s, alert)

    def _judge_timers(self, step: int) -> Iterator[WatchAlert]:
        self._timers |= {name: min(ranks.values()) for name, ranks in self._ranks.items()}
        computes = (ranks for name, ranks in self._ranks.items() if COMPUTE.fullmatch(name))
        compute_s = sum_by_key(pair for ranks in computes for pair in ranks.items())
        slow = {rank: factor for rank, factor, _ in find_slow(compute_s)}
        for rank in compute_s:
            factor = slow.get(rank, 1.0)
            self._late[rank] = self._late[rank] + 1 if rank in slow else 0
            words = f"rank {rank} computes {factor:.2f} times as long as the median of the others"
            alert = WatchAlert("straggler", step, words, rank=rank, factor=factor)
            yield from self._raise_or_clear(self._late[rank] >= CONFIRMED, alert)
        for name, shortest_s in self._timers.items():
            if TRANSFER.fullmatch(name):
                yield from self._judge_transfer(step, name, shortest_s)
        self._ranks.clear()
        self._timers.clear()

    def _judge_transfer(self, step: int, name: str, seconds: float) -> Iterator[WatchAlert]:
        past = self._transfers[name]
        past.append(seconds)
        if len(past) < FEWEST + CONFIRMED:
            return
        usual_s = median(past[1 : 1 + LEVEL_STEPS])
        last = past[-CONFIRMED:]
        least_s = SLOW_PART_SHARE * (self.level_s or 0.0)
        slow = min(last) > SLOW_PART * usual_s and median(last) - usual_s > least_s
        where = LINKS.get(name, name)
        words = f"{where}: {name} takes {format_seconds(median(last))} instead of {format_seconds(usual_s)}"
        alert = WatchAlert("slow link", step, words, part=name, factor=median(last) / usual_s if usual_s else None)
        yield from self._raise_or_clear(slow, alert)

    def _raise_or_clear(self, wrong: bool, alert: WatchAlert) -> Iterator[WatchAlert]:
        """Yield an alert once when it begins, and once when it is over."""
        subject = alert.part or (alert.kind if alert.rank is None else f"rank {alert.rank}")
        if wrong == (subject in self._raised):
            return
        self._raised ^= {subject}
        if not wrong:
            alert = WatchAlert("recovered", alert.step, f"{subject} is back to normal", alert.rank, alert.part)
        self.alerts.append(alert)
        yield alert

    def facts(self) -> FactDict:
        """Return what was seen so far, with the keys of the last line of JSON."""
        times_s = [seconds for _, seconds in self.steps]
        return {
            "steps": len(self.steps),
            "last_step": self.steps[-1][0] if self.steps else None,
            "total_steps": self.total,
            "step_s": median(times_s) if times_s else None,
            "level_s": self.level_s,
            "forecast_s": self.forecast["step_s"] if self.forecast else None,
            "active": sorted(self._raised),
            "alerts": [msgspec.to_builtins(alert) for alert in self.alerts],
            "warnings": [] if times_s else ["no line states how long a step took"],
        }
