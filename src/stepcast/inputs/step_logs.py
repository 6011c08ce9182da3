"""Step times that training programs print: Megatron-LM, torchtitan, NeMo, DeepSpeed, Trainer, verl, NeMo RL, MLPerf.

``StepLines`` reads line by line, from a finished log or from one that grows.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import pairwise

import msgspec

from stepcast.inputs.source import DATA, Source, expect, read_toml, read_words
from stepcast.ir.measured import LoggedScore, LoggedStep, LoggedTimer, StepLog
from stepcast.ir.types import FactDict
from stepcast.units import GIB, MIB, MS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINES = {name: re.compile(pattern) for name, pattern in read_words("traces")["log_lines"].items()}
MLPERF_FACTS = read_words("traces")["mlperf"]["facts"].split()
Values = dict[str, float]
UNITS = {"": 1.0, "%": 0.01, "ms": MS, "GiB": GIB}
NAMED_NUMBERS = r"([^|]*):([^|:]*)"  # name: value | name: value


def _finite_numbers(texts: Iterable[tuple[str, str]]) -> Values:
    numbers = {}
    for name, text in texts:
        with suppress(ValueError):
            if math.isfinite(number := float(text.replace(",", ""))):
                numbers[name.strip()] = number
    return numbers


def _pick_numbers(fields: Mapping[str, tuple[str, str]], values: Values) -> Values:
    keys = {name: next((key for key in keys.split("|") if key in values), "") for name, (keys, _) in fields.items()}
    return {name: values[key] * UNITS[fields[name][1]] for name, key in keys.items() if key}


class LogProgram(msgspec.Struct, frozen=True):
    """The form in which a program prints a step; ``data/step_logs.toml`` explains its fields."""

    step: str
    fields: Mapping[str, tuple[str, str]]
    facts: Mapping[str, tuple[str, str]] = {}
    words: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    pairs: str = ""
    numbers: Mapping[str, str] = {}
    first: int = 1

    def parse(self, line: str) -> tuple[LoggedStep, int, Values] | None:
        """Return the step of a line, the number of steps of the run (0: unknown), and facts of the run."""
        matches = [*re.finditer(self.step, line)]  # progress bars overwrite each other: the last one counts
        if not matches or any(word not in line for word in self.words):
            return None
        texts = [(name, text) for name, text in matches[-1].groupdict().items() if text]
        texts += [(name, match[1]) for name, pattern in self.numbers.items() if (match := re.search(pattern, line))]
        values = _finite_numbers([*texts, *(re.findall(self.pairs, line) if self.pairs else ())])
        if values.get("steps_per_s"):
            values["step"] = 1 / values["steps_per_s"]
        known = FactDict(_pick_numbers(self.fields, values))
        if not known.get("seconds", 0.0) > 0:
            known.pop("seconds", None)
        if "samples" in known:
            known["samples"] = int(known["samples"])
        step, total = (*map(int, matches[-1].groups()[:2]), 0, 0)[:2]
        return LoggedStep(step, **known), total + 1 - self.first if total else 0, _pick_numbers(self.facts, values)


PROGRAMS = msgspec.convert(read_toml(DATA / "step_logs.toml"), dict[str, LogProgram])
VARIANTS = {name.lower().replace("-lm", "").replace(" ", "_"): name for name in PROGRAMS}

SLOW_SCORE = 1 / 1.1  # as analyses call a rank a straggler


class StepLines:
    """Reads the lines of one log; *program* is set by the first line that a parser knows."""

    def __init__(self, program: str = "") -> None:
        self.program = program
        self.total = 0
        self.facts: dict[str, list[float]] = {}
        self.peaks: dict[int, float] = {}
        self._last_printed: tuple[int, datetime] | None = None
        self._in_timers = False
        self._timer = ""
        self._batch = 0
        self._heading = 0  # the step that a heading announced
        self._relative = False

    def feed(self, line: str) -> Iterator[LoggedStep | LoggedTimer | LoggedScore]:
        """Yield the step, the timers or the score of a line."""
        text = COLOUR.sub("", line)
        if LINES["timers"].search(text):
            self._in_timers = True
        elif self._in_timers and (match := LINES["timer"].match(text)):
            self._timer = match[1]
            if match[2]:
                yield LoggedTimer(match[1], float(match[2]) * MS, float(match[3]) * MS)
        elif self._in_timers and (match := LINES["timed_rank"].match(text)) and self._timer:
            seconds = float(match[2]) * MS
            yield LoggedTimer(self._timer, seconds, seconds, int(match[1]))
        elif match := LINES["scores"].search(text):
            self._relative = match[1] == "relative"
        elif self._relative and (match := LINES["score"].search(text)):
            yield LoggedScore(int(match[1]), match[2], float(match[3]))
        elif match := LINES["rank_memory"].search(text):
            values = _finite_numbers(re.findall(NAMED_NUMBERS, match[2].lstrip(" |")))
            rank = int(match[1])
            self.peaks[rank] = max(self.peaks.get(rank, 0.0), values.get("max allocated", 0.0) * MIB)
        elif match := LINES["nemo_rl_step"].search(text):
            self._heading, self.total = int(match[1]), int(match[2])
        elif self.program == "NeMo RL" and (match := LINES["nemo_rl_phase"].search(text)):
            self.facts.setdefault(f"{match[1]}_s", []).append(float(match[2]))
        elif MLPERF_MARK in text and self.program in ("", "MLPerf"):
            yield from self._mlperf(text)
        else:
            names = [self.program] if self.program in PROGRAMS else [] if self.program else PROGRAMS
            parses = ((name, PROGRAMS[name].parse(text)) for name in names)
            name, parsed = next(((name, parsed) for name, parsed in parses if parsed is not None), ("", None))
            if parsed is not None:
                self.program, self._in_timers = name, False
                step, total, facts = parsed
                self.total = total or self.total
                for fact, value in facts.items():
                    self.facts.setdefault(fact, []).append(value)
                yield self._with_time(step._replace(step=step.step or self._heading), text)

    def _with_time(self, step: LoggedStep, text: str) -> LoggedStep:
        """Return the step with its time; lines may be steps apart, and share the time since the one before."""
        printed = LINES["time"].search(text)
        if step.seconds is not None or printed is None:
            return step
        try:
            time, last_printed = datetime.fromisoformat(printed[1].replace(",", ".")), self._last_printed
        except ValueError:
            return step
        self._last_printed = (step.step, time)
        if last_printed is None or step.step <= last_printed[0]:
            return step
        seconds = max(0.0, (time - last_printed[1]).total_seconds()) / (step.step - last_printed[0])
        return step._replace(seconds=seconds or None)

    def _mlperf(self, text: str) -> Iterator[LoggedStep]:
        event = _mlperf_event(text)
        if event is None:
            return
        self.program = "MLPerf"
        key, value = event.get("key"), event.get("value")
        if key == "global_batch_size" and isinstance(value, int):
            self._batch = value
        rate = value.get("throughput") if key == "tracked_stats" and isinstance(value, dict) else None
        if isinstance(rate, int | float) and rate > 0 and self._batch > 0:
            step = max(_mlperf_samples(event), 0) // self._batch
            yield LoggedStep(step, self._batch / rate, samples=self._batch)


def looks_like(head: str, variant: str) -> bool:
    program, plain = PROGRAMS[VARIANTS[variant]], COLOUR.sub("", head)
    pattern = LINES["nemo_rl_step"] if variant == "nemo_rl" else program.step
    return re.search(pattern, plain) is not None and all(word in plain for word in (*program.words, *program.head))


def read(source: Source, variant: str) -> StepLog:
    """Return the steps of a finished log of one of PROGRAMS."""
    program = VARIANTS[variant]
    lines, steps, scores = StepLines(program), [], dict[int, LoggedScore]()
    for line in source.each_line(errors="replace"):
        for event in lines.feed(line):
            if isinstance(event, LoggedStep):
                steps.append(event)
            elif isinstance(event, LoggedScore):
                scores[event.rank] = event
    expect(steps, f"holds no step of {program}", source.path)
    facts: dict[str, object] = {name: sorted(values)[len(values) // 2] for name, values in lines.facts.items()}
    if scores:
        by_score = sorted(scores.values(), key=lambda score: score.score)
        slow = [score for score in by_score if 0 < score.score < SLOW_SCORE]
        facts["stragglers"] = [{"rank": score.rank, "node": score.node, "factor": 1 / score.score} for score in slow]
    if program == "Megatron-LM":
        facts |= {"iterations": lines.total, "memory_bytes_by_rank": {k: v for k, v in lines.peaks.items() if v}}
    peaks = [step.memory_bytes for step in steps if step.memory_bytes is not None] + [*lines.peaks.values()]
    return StepLog(tuple(steps), source.path, program, max(filter(None, peaks), default=None), facts)


# MLPerf Training: lines of ``:::MLLOG`` and a JSON object (mlcommons/logging).
MLPERF_MARK = ":::MLLOG"


def _mlperf_event(line: str) -> FactDict | None:
    """Return the event of a line; None for other lines, and one that is cut off, as the last of a killed run."""
    _, mark, text = line.partition(MLPERF_MARK)
    try:
        event = msgspec.json.decode(text.strip()) if mark else None
    except msgspec.DecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("time_ms"), int | float) else None


def read_mlperf(source: Source) -> StepLog:
    facts, times = dict[str, object](), dict[str, float]()
    evaluations, blocks, rates = list[list[object]](), list[tuple[int, float]](), list[float]()
    for event in filter(None, map(_mlperf_event, source.each_line(errors="replace"))):
        key, value, time_s = event.get("key"), event.get("value"), float(event["time_ms"]) * MS
        if key in MLPERF_FACTS and value is not None:
            facts[str(key)] = value
        elif key in ("init_start", "init_stop", "run_start", "run_stop"):
            times[str(key)] = time_s
            if key == "run_stop":
                facts["status"] = _mlperf_metadata(event).get("status")
        elif key in ("eval_accuracy", "eval_error"):
            evaluations.append([_mlperf_samples(event), value])
            facts["evaluations"] = evaluations
        elif key == "block_stop" or (key == "tracked_stats" and isinstance(value, dict)):
            blocks.append((_mlperf_samples(event), time_s))
            rate = value.get("throughput") if key == "tracked_stats" and isinstance(value, dict) else None
            rates += [float(rate)] if isinstance(rate, int | float) else []
    expect(times or facts, "holds no event of MLPerf", source.path)
    if {"run_start", "run_stop"} <= times.keys():
        facts["run_s"] = times["run_stop"] - times["run_start"]
    if rates:
        facts["samples_per_s"] = sorted(rates)[len(rates) // 2]
    # The times of steps follow from samples per second, or from samples between two blocks.
    batch = facts.get("global_batch_size")
    steps = []
    if isinstance(batch, int) and batch > 0:
        steps = [LoggedStep(index, batch / rate, samples=batch) for index, rate in enumerate(rates) if rate > 0]
        for (before, began_s), (after, ended_s) in pairwise(() if rates else blocks):
            count = (after - before) / batch
            if count > 0 and before >= 0:
                steps.append(LoggedStep(after // batch, (ended_s - began_s) / count, samples=batch))
    return StepLog(tuple(steps), source.path, "MLPerf", None, facts)


def _mlperf_metadata(event: FactDict) -> FactDict:
    metadata = event.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _mlperf_samples(event: FactDict) -> int:
    values = map(_mlperf_metadata(event).get, ("samples_count", "step", "epoch_count", "epoch_num"))
    return next((int(value) for value in values if isinstance(value, int | float)), -1)
